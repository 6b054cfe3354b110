package console

import (
	"context"
	"crypto/sha256"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
)

// accountKey is a hash of credentials.
type accountKey [sha256.Size]byte

func (c credentials) key() accountKey {
	return sha256.Sum256([]byte(strings.Join([]string{c.Token, c.Certificate, c.Key, c.Code}, "\x00")))
}

// account is what sessions with the very same credentials share: copies of objects that findings and traces are made from, and what nodes
// count. The same credentials have the same rights. Both are there only while pages need them.
type account struct {
	console *Console
	config  *rest.Config
	feeds   atomic.Int32 // of its sessions, that run

	mu      sync.Mutex
	objects *objects
	holders int // of objects
	used    time.Time
	traffic *traffic
}

// accounts are those of all sessions.
type accounts struct {
	mu  sync.Mutex
	all map[accountKey]*account
}

func (a *accounts) get(c *Console, k accountKey, config *rest.Config) *account {
	a.mu.Lock()
	defer a.mu.Unlock()
	one := a.all[k]
	if one == nil {
		one = &account{console: c, config: config}
		one.traffic = newTraffic(one)
		a.all[k] = one
	}
	return one
}

// expire ends the watches of those whose pages are closed, and forgets those without sessions.
func (a *accounts) expire(now time.Time, inUse map[*account]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for k, one := range a.all {
		one.mu.Lock()
		if one.objects != nil && one.holders == 0 && (now.Sub(one.used) > feedIdle || !inUse[one]) {
			one.objects.stop()
			one.objects = nil
		}
		if one.objects == nil && !inUse[one] && one.traffic.idle() {
			delete(a.all, k)
		}
		one.mu.Unlock()
	}
}

// hold has the account's objects kept until release is called, and a while longer.
func (a *account) hold() (_ *objects, release func(), err error) {
	ctx, err := a.console.context()
	if err != nil {
		return nil, nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.objects == nil || a.objects.ended.Err() != nil {
		made, err := newObjects(a.config, &a.console.kept)
		if err != nil {
			return nil, nil, err
		}
		if a.console.copies.Add(1) > maxFeeds || a.console.kept.Load() > maxObjects {
			a.console.copies.Add(-1)
			return nil, nil, errTooManyFeeds
		}
		run := func() {
			defer a.console.copies.Add(-1)
			made.run()
		}
		if err := a.console.spawn(ctx, func(ctx context.Context) { made.ended, made.stop = context.WithCancel(ctx) }, run); err != nil {
			a.console.copies.Add(-1)
			return nil, nil, err
		}
		a.objects = made
	}
	a.holders++
	return a.objects, sync.OnceFunc(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.holders--
		a.used = time.Now()
	}), nil
}

// spawn runs something as long as the console does: first prepare, at once, and then run.
func (c *Console) spawn(ctx context.Context, prepare func(context.Context), run func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ctx.Err() != nil {
		return errStopping
	}
	prepare(ctx)
	c.feeds.Go(run)
	return nil
}

package apiserver

import (
	"context"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
	"portal/internal/store"
)

// tracker tells the allocator what is claimed in etcd, whoever claimed it. One goroutine lists and watches, so that an
// older list can't undo what a newer event has said.
type tracker struct {
	client *clientv3.Client
	// history ends when etcd was restored to an older revision, and with it what the allocator knows.
	history   func() context.Context
	allocator *alloc.Allocator
	// refreshes are requests to list everything again; each is answered when that is done.
	refreshes chan chan error

	mu        sync.Mutex
	refreshed time.Time
}

func newTracker(s *store.Store, allocator *alloc.Allocator) *tracker {
	return &tracker{client: s.Client(), history: s.History, allocator: allocator, refreshes: make(chan chan error)}
}

const (
	// refreshEvery bounds how often requests that find a range full make everything be listed again.
	refreshEvery = time.Second
	// relistAfter is the pause before a list that failed is tried again.
	relistAfter = time.Second
)

var claimPrefixes = []string{store.Prefix + service.AddressPrefix, store.Prefix + service.PortPrefix}

// load lists every claim and returns the revision of the list, after which to watch.
func (t *tracker) load(ctx context.Context) (int64, error) {
	var claims []alloc.Claim
	var revision int64
	for _, prefix := range claimPrefixes {
		resp, err := t.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithRev(revision))
		if err != nil {
			return 0, fmt.Errorf("list claims: %w", err)
		}
		if revision == 0 {
			revision = resp.Header.Revision // that of the others would be of their answer, not of what they read
		}
		for _, kv := range resp.Kvs {
			if claim, ok := service.ParseClaim(store.Prefix, string(kv.Key)); ok {
				claims = append(claims, claim)
			}
		}
	}
	t.allocator.Reset(claims)
	return revision, nil
}

// refresh has everything listed again, unless that was done a moment ago, and waits for it.
func (t *tracker) refresh(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.refreshed) < refreshEvery {
		return nil
	}
	done := make(chan error, 1)
	select {
	case t.refreshes <- done:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		t.refreshed = time.Now()
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run follows the claims from a revision on until ctx ends.
func (t *tracker) run(ctx context.Context, revision int64) {
	for ctx.Err() == nil {
		waiting, err := t.follow(ctx, revision)
		if ctx.Err() != nil {
			return
		}
		if waiting == nil {
			klog.InfoS("watch on claims was interrupted, listing them again", "err", err)
		}
		for ctx.Err() == nil {
			revision, err = t.load(ctx)
			if waiting != nil {
				waiting <- err
				waiting = nil
			}
			if err == nil {
				break
			}
			klog.ErrorS(err, "list of claims failed, retrying", "in", relistAfter)
			select {
			case <-ctx.Done():
			case <-time.After(relistAfter):
			}
		}
	}
}

// follow watches both kinds of claims. It returns when a watch ends, or with the first who asks for a new list.
func (t *tracker) follow(ctx context.Context, revision int64) (waiting chan error, err error) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	defer context.AfterFunc(t.history(), cancel)()
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	ended := make(chan error, len(claimPrefixes))
	for _, prefix := range claimPrefixes {
		group.Go(func() { ended <- t.followPrefix(ctx, prefix, revision) })
	}
	select {
	case waiting = <-t.refreshes:
		return waiting, nil
	case err = <-ended:
		return nil, err
	}
}

func (t *tracker) followPrefix(ctx context.Context, prefix string, revision int64) error {
	for resp := range t.client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(revision+1)) {
		if err := resp.Err(); err != nil {
			return err
		}
		for _, event := range resp.Events {
			claim, ok := service.ParseClaim(store.Prefix, string(event.Kv.Key))
			switch {
			case !ok:
			case event.Type == clientv3.EventTypeDelete:
				t.allocator.Freed(claim)
			case event.IsCreate():
				t.allocator.Taken(claim)
			}
		}
	}
	return ctx.Err()
}

// claimed asks etcd itself whether a claim is held.
func (t *tracker) claimed(ctx context.Context, key string) (bool, error) {
	resp, err := t.client.Get(ctx, store.Prefix+key, clientv3.WithCountOnly())
	if err != nil {
		return false, err
	}
	return resp.Count > 0, nil
}

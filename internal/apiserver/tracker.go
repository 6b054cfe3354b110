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

// tracker tells the book of what is claimed in etcd, whoever claimed it.
type tracker struct {
	client *clientv3.Client
	book   *alloc.Book

	mu        sync.Mutex
	refreshed time.Time
}

// refreshEvery bounds how often requests that find a range full make everything be listed again.
const refreshEvery = time.Second

var claimPrefixes = []string{store.Prefix + service.AddressPrefix, store.Prefix + service.PortPrefix}

// load lists every claim and returns the revision from which to watch.
func (t *tracker) load(ctx context.Context) (int64, error) {
	var claims []alloc.Claim
	var revision int64
	for _, prefix := range claimPrefixes {
		resp, err := t.client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithRev(revision))
		if err != nil {
			return 0, fmt.Errorf("list claims: %w", err)
		}
		revision = resp.Header.Revision
		for _, kv := range resp.Kvs {
			if claim, ok := service.ParseClaim(store.Prefix, string(kv.Key)); ok {
				claims = append(claims, claim)
			}
		}
	}
	t.book.Reset(claims)
	return revision, nil
}

// refresh lists everything again, unless that was done a moment ago.
func (t *tracker) refresh(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.refreshed) < refreshEvery {
		return nil
	}
	_, err := t.load(ctx)
	if err == nil {
		t.refreshed = time.Now()
	}
	return err
}

// run follows the claims from a revision on until ctx ends.
func (t *tracker) run(ctx context.Context, revision int64) {
	for ctx.Err() == nil {
		err := t.follow(ctx, revision)
		if ctx.Err() != nil {
			return
		}
		klog.InfoS("Following claims was interrupted; listing them again", "err", err)
		for ctx.Err() == nil {
			if revision, err = t.load(ctx); err == nil {
				break
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// follow watches both kinds of claims. It returns when a watch ends.
func (t *tracker) follow(ctx context.Context, revision int64) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	var group sync.WaitGroup
	errs := make(chan error, len(claimPrefixes))
	for _, prefix := range claimPrefixes {
		group.Go(func() {
			defer cancel()
			errs <- t.followPrefix(ctx, prefix, revision)
		})
	}
	group.Wait()
	return <-errs
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
				t.book.Freed(claim)
			case event.IsCreate():
				t.book.Taken(claim)
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

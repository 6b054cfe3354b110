package store

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
)

// revisions remembers the highest revision that etcd has answered with. A lower one means that etcd was restored from a
// snapshot while the server ran: a watch from the old revision would wait until the new history has grown that far.
type revisions struct {
	seen atomic.Int64

	mu      sync.Mutex
	current context.Context
	cancel  context.CancelFunc
}

func newRevisions() *revisions {
	r := &revisions{}
	r.current, r.cancel = context.WithCancel(context.Background())
	return r
}

// history ends when etcd turns out to have been restored to an older revision. Everything learnt from it is void then.
func (r *revisions) history() context.Context {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current
}

// observe takes note of an answer. floor is what had been seen before the request was sent: reads and writes are
// linearizable, so that no answer can be older, whichever member of a cluster gives it.
func (r *revisions) observe(floor int64, header *etcdserverpb.ResponseHeader) {
	revision := header.GetRevision()
	if revision == 0 {
		return
	}
	if revision < floor {
		r.restart(revision)
		return
	}
	for {
		seen := r.seen.Load()
		if revision <= seen || r.seen.CompareAndSwap(seen, revision) {
			return
		}
	}
}

func (r *revisions) restart(revision int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen.Load()
	if revision >= seen {
		return // somebody else noticed it
	}
	klog.InfoS("etcd was restored to an older revision, restarting watches and caches", "revision", revision, "before", seen)
	r.seen.Store(revision)
	r.cancel()
	r.current, r.cancel = context.WithCancel(context.Background())
}

// check refuses a resourceVersion that etcd has not reached. It asks etcd only if the version is news to this server.
func (r *revisions) check(ctx context.Context, resourceVersion string, ask func(context.Context) error) error {
	version, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil || version <= r.seen.Load() {
		return nil
	}
	if err := ask(ctx); err != nil {
		return nil // the watch itself will say what is wrong
	}
	if seen := r.seen.Load(); version > seen {
		return apierrors.NewResourceExpired("resourceVersion " + resourceVersion + " is newer than the storage, which is at " +
			strconv.FormatInt(seen, 10) + " and may have been restored from a snapshot: list again")
	}
	return nil
}

// observedKV tells revisions of every answer, and the quota's watcher of every write that was refused for lack of space.
type observedKV struct {
	clientv3.KV
	revisions *revisions
	noSpace   func()
}

func (k *observedKV) note(floor int64, header *etcdserverpb.ResponseHeader, err error) {
	if err == nil {
		k.revisions.observe(floor, header)
	} else if IsNoSpace(err) {
		k.noSpace()
	}
}

func (k *observedKV) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	floor := k.revisions.seen.Load()
	resp, err := k.KV.Get(ctx, key, opts...)
	if err == nil {
		k.note(floor, resp.Header, nil)
	}
	return resp, err
}

func (k *observedKV) Put(ctx context.Context, key, value string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	floor := k.revisions.seen.Load()
	resp, err := k.KV.Put(ctx, key, value, opts...)
	k.note(floor, (*etcdserverpb.PutResponse)(resp).GetHeader(), err)
	return resp, err
}

func (k *observedKV) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	floor := k.revisions.seen.Load()
	resp, err := k.KV.Delete(ctx, key, opts...)
	k.note(floor, (*etcdserverpb.DeleteRangeResponse)(resp).GetHeader(), err)
	return resp, err
}

func (k *observedKV) Txn(ctx context.Context) clientv3.Txn {
	return &committing{k.KV.Txn(ctx), func(txn clientv3.Txn) (*clientv3.TxnResponse, error) {
		floor := k.revisions.seen.Load()
		resp, err := txn.Commit()
		k.note(floor, (*etcdserverpb.TxnResponse)(resp).GetHeader(), err)
		return resp, err
	}}
}

// observedWatcher ends watches when etcd turns out to have been restored to an older revision: one from the revision before would
// hear nothing until the new history has grown that far.
type observedWatcher struct {
	clientv3.Watcher
	revisions *revisions
}

func (w *observedWatcher) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(w.revisions.history(), cancel)
	context.AfterFunc(ctx, func() { stop() })
	return w.Watcher.Watch(ctx, key, opts...)
}

// IsNoSpace says whether etcd refused a write because it is at its quota.
func IsNoSpace(err error) bool { return errors.Is(err, rpctypes.ErrNoSpace) }

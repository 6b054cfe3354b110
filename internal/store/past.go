package store

import (
	"context"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/klog/v2"
)

const (
	// pastRevisions is how many writes before a server's start its watch caches know of, at most.
	pastRevisions = 10_000
	// pastFor is how long after the start a cache that is filled for the first time begins with them.
	pastFor = time.Minute
	// catchUpFor is how long a cache may take until it is as far as the store.
	catchUpFor = 20 * time.Second
)

// past is the revision, older than the server's start, at which its watch caches start. With the events since then in their history, clients
// resume the watches that they had before a restart. Caches that started at the current revision would make each of them relist.
type past struct {
	revision int64
	until    time.Time
}

// findPast looks how far back the store's history goes. Without a past, caches start at the current revision.
func findPast(ctx context.Context, client *clientv3.Client) past {
	now, err := client.Get(ctx, Prefix, clientv3.WithCountOnly())
	if err != nil {
		klog.ErrorS(err, "clients can't resume watches from before the start")
		return past{}
	}
	oldest := max(1, now.Header.Revision-pastRevisions)
	// Revisions up to one have been compacted, those after it have not.
	steps := sort.Search(int(now.Header.Revision-oldest), func(i int) bool {
		_, err := client.Get(ctx, Prefix, clientv3.WithCountOnly(), clientv3.WithRev(oldest+int64(i)))
		return err == nil
	})
	return past{oldest + int64(steps), time.Now().Add(pastFor)}
}

// rewound is a resource's storage as its watch cache sees it: the first list is of the past, the watch from there catches up.
type rewound struct {
	storage.Interface
	store *Store

	listed   atomic.Bool
	catching atomic.Bool
	present  chan struct{} // closed when the cache has caught up, or was filled with the present
	once     sync.Once

	ctx   context.Context
	end   context.CancelFunc
	built chan struct{} // closed when there is a cache
	cache *cacher.Cacher
}

func rewind(below storage.Interface, store *Store) *rewound {
	r := &rewound{Interface: below, store: store, present: make(chan struct{}), built: make(chan struct{})}
	r.ctx, r.end = context.WithCancel(context.Background())
	return r
}

// fills says which cache it is that the storage fills.
func (r *rewound) fills(cache *cacher.Cacher) {
	r.cache = cache
	close(r.built)
}

// IsWatchListSemanticsUnSupported has the cache filled by GetList: a watch that begins with what there is can't begin in the past.
func (*rewound) IsWatchListSemanticsUnSupported() bool { return true }

// GetList is what fills the cache.
func (r *rewound) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	if opts.Predicate.Continue != "" {
		return r.Interface.GetList(ctx, key, opts, list)
	}
	if from := r.store.past; !r.listed.Swap(true) && from.revision > 0 && time.Now().Before(from.until) {
		then := opts
		then.ResourceVersion, then.ResourceVersionMatch = strconv.FormatInt(from.revision, 10), metav1.ResourceVersionMatchExact
		listed := list.DeepCopyObject() // an error may leave it half full
		if err := r.Interface.GetList(ctx, key, then, listed); err == nil {
			reflect.ValueOf(list).Elem().Set(reflect.ValueOf(listed).Elem())
			r.catching.Store(true)
			go r.catchUp(key, strconv.FormatInt(r.store.revisions.seen.Load(), 10))
			return nil
		}
	}
	// The cache starts at the current revision, or is filled again because its watch from the older one failed.
	r.caughtUp()
	return r.Interface.GetList(ctx, key, opts, list)
}

// catchUp waits until the cache is as far as the store was when it was filled.
func (r *rewound) catchUp(prefix, version string) {
	select {
	case <-r.built:
	case <-r.ctx.Done():
		return
	}
	absent := strings.TrimSuffix(prefix, "/") + "/ " // no object can have such a name
	ctx, cancel := context.WithTimeout(r.ctx, catchUpFor)
	defer cancel()
	defer r.caughtUp()
	for {
		var nothing metav1.PartialObjectMetadata
		err := r.cache.Get(ctx, absent, storage.GetOptions{ResourceVersion: version, IgnoreNotFound: true}, &nothing)
		if err == nil {
			return
		}
		select {
		case <-r.present:
			return
		case <-ctx.Done():
			klog.ErrorS(err, "a watch cache is behind the storage", "prefix", prefix, "for", catchUpFor)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (r *rewound) caughtUp() { r.once.Do(func() { close(r.present) }) }

// wait blocks reads of the cache until it has caught up.
func (r *rewound) wait(ctx context.Context) error {
	if !r.catching.Load() {
		return nil
	}
	select {
	case <-r.present:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

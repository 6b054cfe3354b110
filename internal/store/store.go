// Package store is Portal's client of etcd, in the process or outside: it opens it, keeps it small, and gives the API
// server storage in which an object and its claims are written in one transaction. It knows no resource by name.
package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	etcdfeature "k8s.io/apiserver/pkg/storage/feature"
	"k8s.io/utils/clock"
)

type keyValue = mvccpb.KeyValue

// Prefix is below what everything of Portal is kept in etcd.
const Prefix = "/registry"

const (
	// MaxTxnOps is how many operations a transaction may have in an etcd outside that is started as the documentation
	// says, with --max-txn-ops: a Service with 100 new node ports needs one for each, and etcd's own default of 128 is not
	// far from that.
	MaxTxnOps = 1024
	// embeddedTxnOps is more than one Service can need, with every port there is: what costs is the transaction, not the limit.
	embeddedTxnOps = 1 << 17
)

// Store is an open etcd.
type Store struct {
	client     *kubernetes.Client
	compactor  interface{ Stop() }
	compaction etcd3.Compactor
	embedded   *embedded
	revisions  *revisions
	space      *space
	past       past
	// background is what runs until Close.
	background sync.WaitGroup
	stop       context.CancelFunc
}

// Open connects to the etcd that the options name, or starts one in this process. An etcd at its quota is open too: it
// serves reads and deletions, and Writable says why it refuses the rest.
func Open(ctx context.Context, opts Options) (*Store, error) {
	s, err := Attach(ctx, opts)
	if err != nil {
		return nil, err
	}
	// Before anybody writes: an alarm from before a restart with a higher quota goes here.
	s.space.look(ctx, 0)
	s.past = findPast(ctx, s.client.Client)
	compactor := etcd3.NewCompactor(s.client.Client, opts.CompactionInterval, clock.RealClock{}, nil)
	s.compactor, s.compaction = compactor, compactor
	background, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.background.Go(func() { s.space.run(background) })
	return s, nil
}

// Attach opens an etcd and changes nothing by itself: for commands that look at it or repair it.
func Attach(ctx context.Context, opts Options) (*Store, error) {
	s := &Store{revisions: newRevisions()}
	var client *clientv3.Client
	var err error
	if len(opts.Servers) == 0 {
		if opts.QuotaBytes == 0 {
			opts.QuotaBytes = DefaultOptions().QuotaBytes
		}
		if s.embedded, err = startEmbedded(ctx, opts); err != nil {
			return nil, err
		}
		client = s.embedded.client
		if opts.Tracer != nil {
			client.KV = tracedKV{client.KV}
		}
		etcdfeature.DefaultFeatureSupportChecker.CheckClient(client.Ctx(), namedClient{client}, storage.RequestWatchProgress)
	} else if client, err = dial(ctx, opts); err != nil {
		return nil, err
	}
	upkeep := maintenance{client: client}
	if s.embedded != nil {
		server := s.embedded.etcd.Server
		upkeep.embedded, upkeep.quota, upkeep.backend, upkeep.disk, upkeep.applied = true, opts.QuotaBytes, server.Backend(), s.embedded.disk, server.AppliedIndex
	}
	s.space = newSpace(upkeep)
	client.KV = &observedKV{KV: etcd3.NewETCDLatencyTracker(client.KV), revisions: s.revisions, noSpace: s.space.noSpace}
	client.Watcher = &observedWatcher{Watcher: client.Watcher, revisions: s.revisions}
	s.client = &kubernetes.Client{Client: client}
	s.client.Kubernetes = &claimingKV{Interface: s.client, kv: client.KV, prefix: Prefix, space: s.space}
	return s, nil
}

// Close ends the compaction, then the connection, then the embedded etcd. The API server must have ended before.
func (s *Store) Close() {
	if s.stop != nil {
		s.stop()
		s.background.Wait()
		s.compactor.Stop()
	}
	s.space.making.close()
	_ = s.client.Close()
	if s.embedded != nil {
		s.embedded.stop()
	}
}

// History ends when etcd turns out to have been restored to an older revision: what was learnt from watches is void
// then, and they have to start over. The next call returns the new history.
func (s *Store) History() context.Context { return s.revisions.history() }

// Client is the etcd client itself, for what is not an API object.
func (s *Store) Client() *clientv3.Client { return s.client.Client }

// Failed is closed when the embedded etcd ended by itself; nil for an etcd outside.
func (s *Store) Failed() <-chan error {
	if s.embedded == nil {
		return nil
	}
	return s.embedded.etcd.Err()
}

// Check says whether etcd answers reads that need its quorum.
func (s *Store) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := s.client.Client.Get(ctx, Prefix+"/health"); err != nil && !s.space.defragmenting.Load() {
		return fmt.Errorf("etcd: %w", err)
	}
	return nil
}

// explainTxn recognizes the error of an etcd that allows too few operations in a transaction.
func explainTxn(err error, ops int) error {
	if errors.Is(err, rpctypes.ErrTooManyOps) || strings.Contains(err.Error(), "too many operations") {
		return &TooManyClaimsError{Ops: ops, Cause: err}
	}
	return err
}

// namedClient gives the embedded etcd's client, which has no endpoint, the one name that feature detection asks for.
type namedClient struct{ *clientv3.Client }

func (namedClient) Endpoints() []string { return []string{"embedded"} }

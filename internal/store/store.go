// Package store is Portal's door to etcd, in the process or outside: it opens it, keeps it small, and gives the API
// server storage in which an object and its claims are written in one transaction. It knows no resource by name.
package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// MaxTxnOps is how many operations a transaction may have: a Service with 100 ports needs one for each, and etcd's own
// default of 128 is not far from that. An etcd outside must be started with --max-txn-ops of at least this.
const MaxTxnOps = 1024

// Store is an open etcd.
type Store struct {
	client     *kubernetes.Client
	compactor  interface{ Stop() }
	compaction etcd3.Compactor
	embedded   *embedded
	progress   *progress
}

// Open connects to the etcd that the options name, or starts one in this process.
func Open(ctx context.Context, opts Options) (*Store, error) {
	s := &Store{}
	var client *clientv3.Client
	var err error
	if len(opts.Servers) == 0 {
		if s.embedded, err = startEmbedded(ctx, opts); err != nil {
			return nil, err
		}
		client = s.embedded.client
		etcdfeature.DefaultFeatureSupportChecker.CheckClient(client.Ctx(), namedClient{client}, storage.RequestWatchProgress)
	} else if client, err = dial(ctx, opts); err != nil {
		return nil, err
	}
	client.KV = etcd3.NewETCDLatencyTracker(client.KV)
	s.client = &kubernetes.Client{Client: client}
	s.client.Kubernetes = &claimingKV{Interface: s.client, kv: client.KV, prefix: Prefix}
	compactor := etcd3.NewCompactor(client, opts.CompactionInterval, clock.RealClock{}, nil)
	s.compactor, s.compaction = compactor, compactor
	s.progress = newProgress()
	return s, nil
}

// Close ends the compaction, then the connection, then the embedded etcd. The API server must have ended before.
func (s *Store) Close() {
	s.progress.close()
	s.compactor.Stop()
	_ = s.client.Close()
	if s.embedded != nil {
		s.embedded.stop()
	}
}

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
	if _, err := s.client.Client.Get(ctx, Prefix+"/health"); err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	return nil
}

// explainTxn says what to do about an etcd that allows fewer operations in a transaction than Portal needs.
func explainTxn(err error, ops int) error {
	if errors.Is(err, rpctypes.ErrTooManyOps) || strings.Contains(err.Error(), "too many operations") {
		return fmt.Errorf("etcd refuses a transaction of %d operations: start it with --max-txn-ops=%d (%w)", ops, MaxTxnOps, err)
	}
	return err
}

// namedClient gives the embedded etcd's client, which has no endpoint, the one name that feature detection asks for.
type namedClient struct{ *clientv3.Client }

func (namedClient) Endpoints() []string { return []string{"embedded"} }

package apiserver

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
	"portal/internal/store"
)

// interrupted is a client during whose reads somebody else writes.
type interrupted struct {
	clientv3.KV
	prefix string
	write  func()
}

func (i *interrupted) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	resp, err := i.KV.Get(ctx, key, opts...)
	if err == nil && key == i.prefix && i.write != nil {
		i.write()
		i.write = nil
	}
	return resp, err
}

var testRange = netip.MustParsePrefix("10.0.0.0/24")

func newTestTracker(t *testing.T) (*tracker, *interrupted) {
	t.Helper()
	opts := store.DefaultOptions()
	opts.Dir = t.TempDir()
	s, err := store.Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	allocator := alloc.New(30000, 30100, rand.New(rand.NewPCG(1, 2)), time.Now)
	allocator.SetRanges([]netip.Prefix{testRange})
	tracker := newTracker(s, allocator)
	kv := &interrupted{KV: tracker.client.KV}
	tracker.client.KV = kv
	return tracker, kv
}

func (t *tracker) claim(test *testing.T, address string) {
	test.Helper()
	if _, err := t.client.Put(context.Background(), store.Prefix+service.AddressPrefix+address, ""); err != nil {
		test.Fatal(err)
	}
}

// start runs the tracker until the test ends.
func (t *tracker) start(test *testing.T) {
	test.Helper()
	revision, err := t.load(test.Context())
	if err != nil {
		test.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { t.run(ctx, revision) })
	test.Cleanup(func() {
		stop()
		group.Wait()
	})
}

func (t *tracker) becomes(test *testing.T, want uint64) {
	test.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		used, _ := t.allocator.InUse(testRange)
		if used == want {
			return
		}
		if time.Now().After(deadline) {
			test.Fatalf("%d addresses are known to be claimed, want %d", used, want)
		}
	}
}

// Addresses are listed before ports: a claim on an address that is written between the two is not missed.
func TestClaimBetweenTheTwoReads(t *testing.T) {
	tracker, kv := newTestTracker(t)
	kv.prefix = store.Prefix + service.AddressPrefix
	kv.write = func() { tracker.claim(t, "10.0.0.5") }
	tracker.start(t)
	tracker.becomes(t, 1)
}

// A list that somebody asked for is older than what the watch says by the time it is used: it must not undo that.
func TestRefreshDoesNotUndoEvents(t *testing.T) {
	tracker, kv := newTestTracker(t)
	tracker.start(t)
	tracker.claim(t, "10.0.0.1")
	tracker.becomes(t, 1)
	kv.prefix = store.Prefix + service.PortPrefix // the last read of the list
	kv.write = func() {
		tracker.claim(t, "10.0.0.2")
		time.Sleep(200 * time.Millisecond) // for a watch that would still be there to tell
	}
	if err := tracker.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	tracker.becomes(t, 2)
}

package controllers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/klog/v2"
)

// An API server whose etcd was restored from a snapshot is back at an older revision. Whatever was read or written after
// that revision never happened: caches hold objects that don't exist, and a watch that resumes from a version of the
// future is silent until the server has come that far again. Nothing of that can be repaired piece by piece, so the
// controllers start over. Two signs are looked for: a read by quorum that is older than what an informer has
// (transport.go), and a Lease that is older than the one seen before (here).

// errRestored says that the API went back to an older revision.
var errRestored = errors.New("the API was restored to an older revision")

// wentBack is errRestored if a version is older than one seen before, and nil otherwise.
func wentBack(what, now, before string) error {
	order, err := resourceversion.CompareResourceVersion(now, before)
	if err != nil || order >= 0 {
		return nil
	}
	return fmt.Errorf("%w: %s is at resourceVersion %s after %s", errRestored, what, now, before)
}

// startOver runs a function again as long as it ends because the API was restored, or the Lease was lost.
func startOver(ctx context.Context, cfg *Config, run func() error) error {
	if ready := cfg.Ready; ready != nil {
		cfg.Ready = sync.OnceFunc(ready)
	}
	for {
		err := run()
		if !errors.Is(err, errRestored) && !errors.Is(err, errLost) || ctx.Err() != nil {
			return err
		}
		klog.FromContext(ctx).Info("starting over", "reason", err)
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// revision is the newest version of a Lease that was seen.
type revision struct {
	fail context.CancelCauseFunc
	mu   sync.Mutex
	seen string
}

func (r *revision) see(lease *coordinationv1.Lease, err error) (*coordinationv1.Lease, error) {
	if err != nil {
		return lease, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if back := wentBack("Lease "+lease.Namespace+"/"+lease.Name, lease.ResourceVersion, r.seen); back != nil {
		r.fail(back)
	}
	r.seen = lease.ResourceVersion
	return lease, nil
}

// revisionGetter is a client of Leases that notes their versions.
type revisionGetter struct {
	coordinationclient.LeasesGetter
	*revision
}

func (g revisionGetter) Leases(namespace string) coordinationclient.LeaseInterface {
	return revisionLeases{g.LeasesGetter.Leases(namespace), g.revision}
}

type revisionLeases struct {
	coordinationclient.LeaseInterface
	*revision
}

func (l revisionLeases) Get(ctx context.Context, name string, opts metav1.GetOptions) (*coordinationv1.Lease, error) {
	return l.see(l.LeaseInterface.Get(ctx, name, opts))
}

func (l revisionLeases) Create(ctx context.Context, lease *coordinationv1.Lease, opts metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return l.see(l.LeaseInterface.Create(ctx, lease, opts))
}

func (l revisionLeases) Update(ctx context.Context, lease *coordinationv1.Lease, opts metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return l.see(l.LeaseInterface.Update(ctx, lease, opts))
}

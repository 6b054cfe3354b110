package controllers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// Election is how one of several processes becomes the leader.
type Election struct {
	// Namespace and Name are those of the Lease that the leader holds.
	Namespace, Name string
	// Identity is this process, and no other one: two that share an identity would both lead. NewIdentity makes one.
	Identity string
	// Ended, if not nil, says that the process with an identity has certainly ended, so that nobody has to wait until
	// its Lease runs out.
	Ended func(identity string) bool
	// Lease is how long the others wait for a leader that doesn't renew it, Renew how long a leader tries to renew it
	// before it gives up, Retry the time between two tries.
	Lease, Renew, Retry time.Duration
}

// NewIdentity is one that no other process has: the host's name for people, and a random part because two machines may
// have the same name.
func NewIdentity() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("leader identity: %w", err)
	}
	return fmt.Sprintf("%s_%s", host, uuid.NewUUID()), nil
}

// DefaultElection has a standby take over within ten seconds.
func DefaultElection() Election {
	return Election{
		Namespace: metav1.NamespaceSystem, Name: "portal-controllers",
		Lease: 6 * time.Second, Renew: 4 * time.Second, Retry: time.Second,
	}
}

// Validate says what is wrong with the times.
func (e Election) Validate() error {
	if e.Lease <= e.Renew || e.Renew <= e.Retry*12/10 {
		return fmt.Errorf("--leader-elect-lease-duration %s, -renew-deadline %s, -retry-period %s: each must be clearly longer than the next", e.Lease, e.Renew, e.Retry)
	}
	return nil
}

// errLost says that the Lease could not be renewed in time, and another process may lead.
var errLost = errors.New("leadership lost: the Lease could not be renewed in time")

// Lead waits until it is elected, and runs the controllers until ctx ends. If the Lease is lost it starts over as a standby:
// nothing that was known under the Lease may be kept. A standby fills its caches while it waits, so that it can start work as
// soon as it is elected.
func Lead(ctx context.Context, cfg Config, selection Selection, e Election) error {
	return startOver(ctx, &cfg, func() error { return lead(ctx, cfg, selection, e) })
}

func lead(ctx context.Context, cfg Config, selection Selection, e Election) error {
	// The election outlives the work: the Lease is released after the last write, not before.
	electing, stopElecting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopElecting()
	work, stopWork := context.WithCancelCause(ctx)
	defer stopWork(nil)
	lock, err := e.lock(cfg.REST, stopWork)
	if err != nil {
		return err
	}
	elected, ended := make(chan struct{}), make(chan struct{})
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: releaseLast{lock, func() { stopWork(nil); <-ended }}, Name: e.Name, ReleaseOnCancel: true,
		LeaseDuration: e.Lease, RenewDeadline: e.Renew, RetryPeriod: e.Retry,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(leased context.Context) {
				context.AfterFunc(leased, func() { stopWork(nil) })
				klog.FromContext(ctx).V(1).Info("leading", "lease", e.Namespace+"/"+e.Name, "identity", lock.Identity())
				close(elected)
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return err
	}
	cfg.elected = elected
	ran := make(chan error, 1)
	go func() {
		ran <- run(work, cfg, selection)
		close(ended)
		stopElecting()
	}()
	elector.Run(electing)
	stopWork(nil)
	if err := <-ran; err != nil {
		return err
	}
	if ctx.Err() == nil {
		return errLost // nobody asked for the end
	}
	return nil
}

func (e Election) lock(config *rest.Config, fail context.CancelCauseFunc) (resourcelock.Interface, error) {
	config = rest.AddUserAgent(rest.CopyConfig(config), "leader-election")
	config.Timeout = e.Renew / 2 // one request without an answer must not cost the Lease
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	lock := &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: e.Namespace, Name: e.Name},
		Client:     revisionGetter{client.CoordinationV1(), &revision{fail: fail}},
		LockConfig: resourcelock.ResourceLockConfig{Identity: e.Identity},
	}
	if e.Ended == nil {
		return lock, nil
	}
	return takeover{lock, e.Ended}, nil
}

// releaseLast ends the work before the Lease is released, also when it is released because it could not be renewed: another
// process may lead from then on.
type releaseLast struct {
	resourcelock.Interface
	endWork func()
}

func (l releaseLast) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	if record.HolderIdentity == "" {
		l.endWork()
	}
	return l.Interface.Update(ctx, record)
}

// takeover shows the Lease of a process that has ended as released.
type takeover struct {
	resourcelock.Interface
	ended func(identity string) bool
}

func (t takeover) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := t.Interface.Get(ctx)
	if err == nil && record.HolderIdentity != t.Identity() && t.ended(record.HolderIdentity) {
		record.HolderIdentity = ""
	}
	return record, raw, err
}

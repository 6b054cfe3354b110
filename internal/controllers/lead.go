package controllers

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// Election is how one of several leads.
type Election struct {
	// Namespace and Name are those of the Lease that the leader holds; Identity is who we are.
	Namespace, Name, Identity string
	// Lease is how long the Lease of a leader that is gone keeps the others waiting, Renew how long a leader tries to
	// renew it before it gives up, Retry the time between two tries.
	Lease, Renew, Retry time.Duration
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

// ErrLost says that the Lease could not be renewed in time, and another one may lead.
var ErrLost = errors.New("another one leads: the Lease could not be renewed in time")

// Lead stands by until it may lead, and runs the controllers until ctx ends or the Lease is lost. To have lost it is
// ErrLost: nothing of what was believed under it may be kept. Who stands by follows the API already, so that it can go to
// work at once when it is called.
func Lead(ctx context.Context, cfg Config, selection Selection, e Election) error {
	lock, err := e.lock(cfg.REST)
	if err != nil {
		return err
	}
	// The election outlives the work: the Lease is given up after the last write, not before.
	electing, stopElecting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopElecting()
	work, stopWork := context.WithCancel(ctx)
	defer stopWork()
	leads := make(chan struct{})
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, Name: e.Name, ReleaseOnCancel: true,
		LeaseDuration: e.Lease, RenewDeadline: e.Renew, RetryPeriod: e.Retry,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(leased context.Context) {
				context.AfterFunc(leased, stopWork)
				klog.FromContext(ctx).V(1).Info("Leading", "lease", e.Namespace+"/"+e.Name, "identity", lock.Identity())
				close(leads)
			},
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return err
	}
	cfg.leads = leads
	ran := make(chan error, 1)
	go func() {
		ran <- Run(work, cfg, selection)
		stopElecting()
	}()
	elector.Run(electing)
	lost := electing.Err() == nil
	stopWork()
	if err := <-ran; err != nil {
		return err
	}
	if lost {
		return ErrLost
	}
	return nil
}

func (e Election) lock(config *rest.Config) (resourcelock.Interface, error) {
	config = rest.AddUserAgent(rest.CopyConfig(config), "leader-election")
	config.Timeout = e.Renew / 2 // one silent request must not cost the Lease
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return resourcelock.New(resourcelock.LeasesResourceLock, e.Namespace, e.Name, client.CoreV1(), client.CoordinationV1(),
		resourcelock.ResourceLockConfig{Identity: e.Identity})
}

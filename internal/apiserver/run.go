package apiserver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	genericserver "k8s.io/apiserver/pkg/server"

	"portal/internal/ensure"
)

// Hooks are what the caller does while the server runs.
type Hooks struct {
	// Ready is called once, when clients can come.
	Ready func(context.Context) error
	// Work runs from then on until its context ends, which is before the server stops answering.
	Work func(context.Context) error
}

// Run serves until ctx ends, drains, and closes the store.
func (s *Server) Run(ctx context.Context, hooks Hooks) error {
	defer s.store.Close()
	defer s.encryption.close()
	defer s.aggregator.Stop()
	revision, err := s.tracker.load(ctx)
	if err != nil {
		s.generic.Destroy()
		return err
	}
	// What the server does for itself goes on until its requests have drained.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var follow sync.WaitGroup
	follow.Go(func() { s.tracker.run(background, revision) })
	follow.Go(func() { reportAllocation(background, s.allocator) })
	follow.Go(func() { s.certs.run(background) })
	follow.Go(func() { s.closeOwnConnections(background) })
	follow.Go(func() { s.tokenKeys.run(background) })
	follow.Go(func() { s.encryption.run(background) })
	s.generic.AddPostStartHookOrDie("portal-bootstrap", func(hook genericserver.PostStartHookContext) error {
		return s.bootstrap(hook)
	})

	serve, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	go s.watchStore(serve, fail)
	follow.Go(func() { s.nodes.Run(background, s.guards.nodes.Pods) })
	members := make(chan struct{})
	// The endpoints lose this server while it still answers: the last write of its own goes through it.
	s.generic.AddPreShutdownHookOrDie("portal-membership", func() error {
		<-members
		return nil
	})
	go func() {
		defer close(members)
		s.afterReady(serve, fail, hooks)
	}()
	err = s.generic.PrepareRun().RunWithContext(serve)
	fail(nil)
	<-members
	stop()
	follow.Wait()
	if cause := context.Cause(serve); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// closeOwnConnections closes the connections of the server to itself when it listens no more. They have no requests then, but
// HTTP/2 would keep them, and the server waiting for them, for another second or two.
func (s *Server) closeOwnConnections(ctx context.Context) {
	select {
	case <-s.listener.closed:
	case <-ctx.Done():
		return
	}
	for ctx.Err() == nil {
		utilnet.CloseIdleConnectionsFor(s.transport)
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// watchStore ends the server when the etcd inside it fails: without it nothing can be answered.
func (s *Server) watchStore(ctx context.Context, fail context.CancelCauseFunc) {
	failed := s.store.Failed()
	if failed == nil {
		return
	}
	select {
	case err := <-failed:
		if err == nil {
			err = errors.New("it stopped")
		}
		fail(fmt.Errorf("the embedded etcd: %w", err))
	case <-ctx.Done():
	}
}

// afterReady waits for the server to answer, tells the caller, and as long as the server runs does the caller's work and
// keeps the server among the endpoints of the kubernetes Service.
func (s *Server) afterReady(ctx context.Context, fail context.CancelCauseFunc, hooks Hooks) {
	if err := s.waitReady(ctx); err != nil {
		return
	}
	if err := hooks.Ready(ctx); err != nil {
		fail(err)
		return
	}
	var group sync.WaitGroup
	members := newServerEndpoints(s)
	group.Go(func() { members.run(ctx) })
	group.Go(func() { s.loop.Run(ctx) })
	group.Go(func() { s.aggregator.Run(ctx) })
	group.Go(func() { ensure.New(s.reportSystem, endpointsOf(members)...).Run(ctx) })
	group.Go(func() { ensure.New(s.reportSystem, s.nodeReports()).Run(ctx) })
	group.Go(func() {
		if err := hooks.Work(ctx); err != nil && ctx.Err() == nil {
			fail(err)
		}
	})
	group.Wait()
}

func (s *Server) waitReady(ctx context.Context) error {
	client := s.client.Discovery().RESTClient()
	for {
		// A storage that refuses writes still serves reads and deletions.
		err := client.Get().AbsPath("/readyz").Param("exclude", storageCheck).Do(ctx).Error()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

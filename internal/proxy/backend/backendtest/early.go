package backendtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"portal/internal/plan/oracle"
	"portal/internal/proxy/backend"
)

// testEarly prepares Services before others are known: until then packets go as if there were no proxy, and from then on
// as all of it says. A mode that can't prepare has nothing to show.
func testEarly(t *testing.T, s *suite) {
	if _, can := s.backend.(backend.Early); !can {
		return
	}
	list := append(catalogue(), spec{id: 13, local: []int{0, 1}, affinity: time.Hour})
	full, empty := list[2], list[3]
	var probes []probe
	for _, x := range list {
		probes = append(probes, x.probes(s, 3)...)
	}
	// Where the mode doesn't refuse all that it should, waiting for that is left to testRoutes.
	ask := func(probes []probe) {
		t.Helper()
		s.askAll(t, slices.DeleteFunc(probes, func(p probe) bool {
			return s.PassesOtherPorts && s.judge(p, p.source()).Verdict == oracle.Reject
		}))
	}
	s.set(full, empty)
	if err := s.prepare(); errors.Is(err, errors.ErrUnsupported) {
		return
	} else if err != nil {
		t.Fatalf("where nothing is: %v", err)
	}
	s.unled(t, full, empty)

	// That process is killed, and another prepares more.
	s.halt(t)
	s.start(t)
	if err := s.prepare(); err != nil {
		t.Fatalf("where another has prepared: %v", err)
	}
	changed := spec{id: full.id, local: []int{1, 2}, external: true, balancer: true, nodePort: true}
	s.set(list...)
	s.set(changed)
	if err := s.prepare(); err != nil && !errors.Is(err, backend.ErrLater) {
		t.Fatalf("for the second time: %v", err)
	}
	s.unled(t, full, empty, list[0])

	// The rest comes with the end.
	s.set(spec{id: empty.id, local: []int{0, 2}, balancer: true, nodePort: true})
	s.plan.Delete(list[1].entry(s).Service.Key)
	s.apply(t)
	ask(append(changed.probes(s, 3), sample(probes, 7)...))
	if err := s.check(); err != nil {
		t.Errorf("the check after it: %v", err)
	}

	// Whatever another process can prepare now, what is at work stays so: it knows nothing of this Service yet.
	s.halt(t)
	s.start(t)
	s.plan.Delete(changed.entry(s).Service.Key)
	if err := s.prepare(); err != nil && !errors.Is(err, backend.ErrServing) {
		t.Errorf("where another is at work: %v", err)
	}
	s.set(changed)
	ask(sample(changed.probes(s, 3), 3))
	s.apply(t)
	ask(sample(changed.probes(s, 3), 3))
}

// prepare does what the loop does.
func (s *suite) prepare() error {
	err := s.node.do(func() error { return s.backend.(backend.Early).Prepare(context.Background(), s.plan) })
	switch {
	case err == nil:
		s.plan.Prepared()
	case !errors.Is(err, backend.ErrLater):
		s.plan.Forget()
	}
	return err
}

// unled demands that packets to Services are neither led anywhere nor refused, but by the node where it is asked itself.
func (s *suite) unled(t *testing.T, list ...spec) {
	t.Helper()
	var wg sync.WaitGroup
	for _, x := range list {
		for _, p := range sample(x.probes(s, 1), 4) {
			wg.Go(func() {
				got := p.from.try(p.p, p.src, p.to, s.silence())
				if got.what == answered || got.what == refused && !s.isNode(p.to.Addr()) {
					t.Errorf("%v: %s, while only prepared", p, got)
				}
			})
		}
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

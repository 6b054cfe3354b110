package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"portal/bench/report"
)

// The situations that a proxy is started in. Each ends when the last Service answers as the API says. In the two
// restarts rules of the run before are in place, so Services answer all the time; what shows that the proxy is in sync
// again is what changed while it was down.
const (
	clean   = "clean"   // a machine without rules
	restart = "restart" // rules in place; one Service has changed meanwhile, which shows when the proxy is in sync
	changed = "changed" // rules in place; 1 % of the Services have changed meanwhile
)

var situations = []string{clean, restart, changed}

// startName is the figure's name in the report.
var startName = map[string]string{
	clean:   "start to last Service, clean machine",
	restart: "start to last Service, restart with rules in place",
	changed: "start to last Service, restart with 1 % changed meanwhile",
}

// startCPUName is the name of what the start costs.
var startCPUName = map[string]string{
	clean:   "CPU of the start, clean machine",
	restart: "CPU of the start, restart with rules in place",
	changed: "CPU of the start, restart with 1 % changed meanwhile",
}

// startBudget is how long a situation is repeated for at most: one start of kube-proxy with many Services takes longer.
const startBudget = 15 * time.Second

var errTimeout = errors.New("was not in sync within the time limit")

// starts measures every situation, several times, and leaves a proxy running that was started in the last of them.
func (s *session) starts(ctx context.Context) (*report.Subject, error) {
	var p *report.Subject
	total := time.Duration(0) // of what was timed
	for round := 0; round == 0 || round < s.o.starts && total < startBudget; round++ {
		for _, situation := range s.o.situations {
			if p != nil {
				p.Stop()
			}
			var err error
			if p, err = s.start(ctx, situation); err != nil {
				return p, err
			}
			total += s.took[situation][round]
			time.Sleep(rest)
		}
	}
	for _, situation := range s.o.situations {
		s.at.Lower(s.subject, startName[situation], report.Quantile(s.took[situation], 0.5)/1000, "s")
		s.at.Lower(s.subject, startCPUName[situation], report.Quantile(s.cpu[situation], 0.5)/1000, "s")
	}
	return p, nil
}

// start sets up a situation, starts the proxy and waits until it is in sync. A returned proxy must be stopped, also if there
// is an error.
func (s *session) start(ctx context.Context, situation string) (p *report.Subject, err error) {
	var wants []want
	switch situation {
	case clean:
		if err := errors.Join(s.restoreAll(ctx), s.net.reset()); err != nil {
			return nil, err
		}
	case restart:
		wants, err = s.replaceSome(ctx, 1)
	case changed:
		wants, err = s.replaceSome(ctx, max(2, s.c.size()/100))
	}
	if err != nil {
		return nil, err
	}
	time.Sleep(rest)
	begin := time.Now()
	if p, err = startProxy(s.o, s.c, s.subject, s.mode, s.dir); err != nil {
		return nil, err
	}
	if situation == clean {
		err = s.waitAll(ctx, p)
	} else {
		err = s.waitReplaced(ctx, p, wants)
	}
	took := time.Since(begin)
	if err != nil {
		return p, fmt.Errorf("%s: %w\n%s", startName[situation], err, p.Tail())
	}
	used, err := p.Read()
	if err != nil {
		return p, err
	}
	s.took[situation], s.cpu[situation] = append(s.took[situation], took), append(s.cpu[situation], used.CPU)
	report.Logf("  %s: %.2f s, %.2f s CPU", situation, took.Seconds(), used.CPU.Seconds())
	// Not timed: every frontend must answer.
	if err := s.everythingAnswers(ctx); err != nil {
		return p, fmt.Errorf("%s: although it seemed in sync: %w\n%s", startName[situation], err, p.Tail())
	}
	return p, nil
}

// want is what a changed Service is to answer with.
type want struct {
	service  int
	endpoint string
}

// replaceSome replaces the endpoints of some Services, spread over all of them; the last of those that can be replaced is among
// them.
func (s *session) replaceSome(ctx context.Context, n int) ([]want, error) {
	all := s.c.replaceable
	out := make([]want, min(n, len(all)))
	err := report.Each(ctx, 8, len(out), func(k int) (err error) {
		i := all[len(all)-1-k*len(all)/len(out)]
		s.note(i)
		out[k].service = i
		out[k].endpoint, err = s.c.replace(ctx, i)
		return err
	})
	return out, err
}

// check returns an error if waiting must end.
func (s *session) check(ctx context.Context, p *report.Subject, deadline time.Time) error {
	select {
	case <-p.Done():
		return errors.New("the proxy has ended")
	case <-ctx.Done():
		return ctx.Err()
	default:
	}
	if time.Now().After(deadline) {
		return errTimeout
	}
	return nil
}

// waitAll waits until Services answer: the last, the first, and others spread over all of them. That the rest answers too is
// seen afterwards, because connections to thousands of Services would take time from the proxy.
func (s *session) waitAll(ctx context.Context, p *report.Subject) error {
	const samples = 50
	n := s.c.size()
	order := []int{n - 1, 0}
	for k := range samples {
		order = append(order, k*n/samples)
	}
	return s.waitFor(ctx, p, order)
}

// waitFor waits until some Services answer at each of their frontends: a proxy may write its rules for the two families one after
// the other.
func (s *session) waitFor(ctx context.Context, p *report.Subject, services []int) error {
	deadline := time.Now().Add(s.o.startTimeout)
	for _, i := range services {
		for _, to := range s.c.frontends[i] {
			for probe(to, 5*time.Millisecond) != nil {
				if err := s.check(ctx, p, deadline); err != nil {
					return fmt.Errorf("%s: %w", to, err)
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	return nil
}

// waitReplaced waits until every changed Service answers with its new endpoint only.
func (s *session) waitReplaced(ctx context.Context, p *report.Subject, wants []want) error {
	deadline := time.Now().Add(s.o.startTimeout)
	for inSync := false; !inSync; {
		inSync = true
		for _, w := range wants {
			for {
				got, _, err := fetch(s.c.vip(w.service), 100*time.Millisecond)
				if err == nil && got == w.endpoint {
					break
				}
				inSync = false
				if err := s.check(ctx, p, deadline); err != nil {
					return fmt.Errorf("%s answers with %s instead of %s: %w", s.c.vip(w.service), got, w.endpoint, err)
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	return nil
}

// everythingAnswers connects to every frontend of every Service once.
func (s *session) everythingAnswers(ctx context.Context) error {
	all := slices.Concat(s.c.frontends...)
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return report.Each(ctx, 8, len(all), func(k int) error { return answers(all[k]) })
}

func answers(to netip.AddrPort) error {
	if _, _, err := fetch(to, 5*time.Second); err != nil {
		return fmt.Errorf("%s does not answer: %w", to, err)
	}
	return nil
}

package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// server is the mode at work: a socket for each family, protocol and origin, whatever Services there are, and a loop that
// carries connections for each processor.
type server struct {
	Options
	directory
	memory *memory
	dial   *dialer

	flows *flows
	home  home

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	doors []door
	loops []*loop
	udp   []*datagrams
	ports map[intent.Family]*listening

	// unsure: the last Apply failed, so that what the kernel has is not known.
	unsure bool
	facts  *plan.Facts
}

// open listens in each family that the machine has.
func open(o Options) (*server, error) {
	s := &server{
		Options: o, directory: directory{known: map[plan.FrontendKey]*frontend{}}, memory: newMemory(o.Shun),
		ports: map[intent.Family]*listening{}, unsure: true,
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var err error
	if s.home, err = here(); err != nil {
		return nil, err
	}
	if s.flows, err = newFlows(); err != nil {
		return nil, err
	}
	s.dial = &dialer{o.Source, s.home}
	s.work.Go(s.runFlows)
	for _, f := range families {
		if err := s.listen(f); err != nil && !(f == intent.IPv6 && missing(err)) {
			return nil, errors.Join(err, s.Close())
		}
	}
	for range runtime.GOMAXPROCS(0) {
		l, err := newLoop(s)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.loops = append(s.loops, l)
	}
	for _, l := range s.loops {
		s.work.Go(l.run)
	}
	s.work.Go(s.sweep)
	return s, nil
}

// missing: the machine has no IPv6.
func missing(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL)
}

func (s *server) listen(f intent.Family) error {
	at := &listening{}
	for o := range plan.Origins {
		fd, port, err := listen(f)
		if err != nil {
			return err
		}
		s.doors = append(s.doors, door{fd, f, o})
		at.tcp[o] = port
		d, err := s.datagrams(f, o)
		if err != nil {
			return err
		}
		s.udp = append(s.udp, d)
		at.udp[o] = d.local.Port()
		s.work.Go(d.receive)
	}
	s.ports[f] = at
	return nil
}

// sweep lets go of what is over, now and then.
func (s *server) sweep() {
	t := time.NewTicker(5 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
			s.memory.forget()
			for _, d := range s.udp {
				d.forget()
			}
		}
	}
}

// Close hands new connections over to the kernel and ends all others, which are this process' own.
func (s *server) Close() error {
	var errs []error
	if !s.unsure {
		errs = append(errs, s.handOver())
	}
	s.cancel()
	for _, d := range s.udp {
		errs = append(errs, d.Close())
	}
	for _, l := range s.loops {
		l.call()
	}
	s.work.Wait()
	for _, l := range s.loops {
		l.close()
	}
	for _, d := range s.doors {
		errs = append(errs, unix.Close(d.fd))
	}
	s.home.close()
	return errors.Join(errs...)
}

func (s *server) handOver() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var text strings.Builder
	for _, f := range s.facts.Families {
		var list []*frontend
		for k, front := range s.known {
			if k.Family == f {
				list = append(list, front)
			}
		}
		text.WriteString(newTable(f, s.Source).handover(s.facts, list))
	}
	return nft(ctx, text.String())
}

// Apply tells the kernel which addresses are ours, and the sockets who answers there. Who answers is known before the
// first connection can come, and forgotten after the last.
func (s *server) Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	full := delta.Full || delta.Facts || s.unsure
	s.unsure = true
	var err error
	if full {
		err = s.replace(ctx, next)
	} else {
		err = s.update(ctx, delta)
	}
	if err != nil {
		return err
	}
	s.unsure = false
	s.flows.end(s.cut(next, full, delta))
	return nil
}

func (s *server) replace(ctx context.Context, next *plan.Snapshot) error {
	if s.Source == Preserve {
		for _, f := range next.Facts.Families {
			if err := openReturn(f); err != nil {
				return fmt.Errorf("routing answers to clients' addresses to this process: %w", err)
			}
		}
	}
	var inPlace, anew strings.Builder
	var all []*plan.Frontend
	for _, f := range families {
		t := newTable(f, s.Source)
		switch {
		case !slices.Contains(next.Facts.Families, f):
			inPlace.WriteString(t.remove())
			anew.WriteString(t.remove())
			continue
		case s.ports[f] == nil:
			return fmt.Errorf("this machine has no IPv%d", f)
		}
		come := map[element]bool{}
		for _, front := range next.Frontends {
			if front.Family == f {
				all = append(all, front)
				collect(come, t.elements(front))
			}
		}
		for a := range next.ClusterIPs {
			if intent.FamilyOf(a) == f {
				come[element{set: "cluster-ips", text: a.String()}] = true
			}
		}
		if s.facts != nil && slices.Contains(s.facts.Families, f) {
			inPlace.WriteString(t.empty(s.facts))
		} else {
			inPlace.WriteString(t.remove())
		}
		anew.WriteString(t.remove())
		text := t.base(next.Facts, s.ports[f]) + t.change(nil, come)
		inPlace.WriteString(text)
		anew.WriteString(text)
	}
	s.set(all)
	err := nft(ctx, inPlace.String())
	if err != nil && s.facts != nil { // what is there is not what we have made
		err = nft(ctx, anew.String())
	}
	if err != nil {
		return err
	}
	s.facts = next.Facts
	s.keep(func(k plan.FrontendKey) bool { return next.Frontends[k] != nil })
	s.flows.look(all, localAddrs())
	return nil
}

func (s *server) update(ctx context.Context, delta *plan.Delta) error {
	var text strings.Builder
	var fresh, opened []*plan.Frontend
	var gone []plan.FrontendKey
	for _, f := range s.facts.Families {
		t := newTable(f, s.Source)
		old, now := map[element]bool{}, map[element]bool{}
		for _, ch := range delta.Frontends {
			if ch.Family != f {
				continue
			}
			if ch.Old != nil {
				collect(old, t.elements(ch.Old))
			}
			if ch.New != nil {
				collect(now, t.elements(ch.New))
				fresh = append(fresh, ch.New)
				if ch.Old == nil || !forwards(ch.Old) {
					opened = append(opened, ch.New)
				}
			} else {
				gone = append(gone, ch.FrontendKey)
			}
		}
		t.addresses(old, delta.RemovedIPs)
		t.addresses(now, delta.AddedIPs)
		text.WriteString(t.change(without(old, now), without(now, old)))
	}
	s.set(fresh)
	if err := nft(ctx, text.String()); err != nil {
		return err
	}
	s.remove(gone)
	if len(opened) > 0 {
		s.flows.look(opened, localAddrs())
	}
	return nil
}

func (t *table) addresses(into map[element]bool, list []netip.Addr) {
	for _, a := range list {
		if intent.FamilyOf(a) == t.family {
			into[element{set: "cluster-ips", text: a.String()}] = true
		}
	}
}

func collect(into map[element]bool, list []element) {
	for _, e := range list {
		into[e] = true
	}
}

func without(a, b map[element]bool) map[element]bool {
	out := map[element]bool{}
	for e := range a {
		if !b[e] {
			out[e] = true
		}
	}
	return out
}

// Check looks whether packets are still led to our sockets.
func (s *server) Check(ctx context.Context) error {
	if s.unsure {
		return errors.New("what the kernel has is not known")
	}
	for _, f := range s.facts.Families {
		t := newTable(f, s.Source)
		for chain, want := range map[string]string{
			"take-in": "jump in-vips", "take-out": "jump out-vips", "in-outside": fmt.Sprintf(":%d", s.ports[f].tcp[plan.FromOutside]),
		} {
			out, err := exec.CommandContext(ctx, "nft", "list", "chain", t.ip, tableName, chain).Output()
			if err != nil || !strings.Contains(string(out), want) {
				return fmt.Errorf("the chain %s of the table %s %s is gone or was changed", chain, t.ip, tableName)
			}
		}
	}
	return nil
}

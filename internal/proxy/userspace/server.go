package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// server is the mode at work: a socket for each family, protocol and origin, whatever Services there are.
type server struct {
	Options
	directory
	memory *memory
	dial   *dialer
	pipes  pipes

	flows *flows
	home  home

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu    sync.Mutex
	open  map[*wire]struct{}
	doors []interface{ Close() error }
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
		pipes: newPipes(), open: map[*wire]struct{}{}, ports: map[intent.Family]*listening{}, unsure: true,
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var err error
	if s.home, err = here(); err != nil {
		return nil, err
	}
	if s.flows, err = newFlows(); err != nil {
		return nil, err
	}
	s.dial = &dialer{o.Source, o.ConnectTimeout, s.home}
	s.work.Go(s.runFlows)
	for _, f := range families {
		if err := s.listen(f); err != nil && !(f == intent.IPv6 && missing(err)) {
			return nil, errors.Join(err, s.Close())
		}
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
		l, port, err := listen(f)
		if err != nil {
			return err
		}
		s.doors = append(s.doors, l)
		at.tcp[o] = port
		s.work.Go(func() { s.accept(l, f, o) })
		d, err := s.datagrams(f, o)
		if err != nil {
			return err
		}
		s.doors = append(s.doors, d)
		s.udp = append(s.udp, d)
		at.udp[o] = d.local.Port()
		s.work.Go(d.receive)
	}
	s.ports[f] = at
	return nil
}

func (s *server) accept(l *wire, f intent.Family, o plan.Origin) {
	for {
		c, client, err := l.accept()
		switch {
		case err == nil:
			s.work.Go(func() { s.serve(c, client, f, o) })
		case errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EINTR):
		default:
			// Out of descriptors, most likely: give connections time to end.
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// serve carries one connection.
func (s *server) serve(c *wire, client netip.AddrPort, f intent.Family, o plan.Origin) {
	defer c.Close()
	if !s.enter(c) {
		return
	}
	defer s.leave(c)
	up := s.upstream(c, client, f, o)
	if up == nil {
		c.SetLinger(0) // a reset tells the client that nobody was there
		return
	}
	defer up.Close()
	if !s.enter(up) {
		return
	}
	defer s.leave(up)
	s.pipes.relay(c, up)
}

// upstream finds out where a connection was addressed to, and connects to an endpoint there.
func (s *server) upstream(c *wire, client netip.AddrPort, f intent.Family, o plan.Origin) *wire {
	to, err := originalTCP(c, f)
	if err != nil {
		return nil
	}
	front := s.find(plan.FrontendKey{Addr: to.Addr(), Family: f, Protocol: intent.TCP, Port: to.Port()})
	if front == nil || front.Routes[o].Verdict != plan.Forward {
		return nil
	}
	return s.reach(front, o, client, to)
}

// reach tries a frontend's endpoints one after another.
func (s *server) reach(front *frontend, o plan.Origin, client, to netip.AddrPort) *wire {
	for _, e := range s.memory.order(front, o, client.Addr()) {
		up, err := s.dial.tcp(front, o, e, client, to)
		if err == nil {
			s.memory.answered(front, client.Addr(), e.Addr)
			return up
		}
		if s.ctx.Err() != nil {
			return nil
		}
		s.memory.failed(e.Addr)
	}
	return nil
}

// enter counts a connection among those that Close ends; false: it is too late.
func (s *server) enter(c *wire) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return false
	}
	s.open[c] = struct{}{}
	return true
}

func (s *server) leave(c *wire) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
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
	s.mu.Lock()
	s.cancel()
	for _, d := range s.doors {
		errs = append(errs, d.Close())
	}
	for c := range s.open {
		c.Close()
	}
	s.mu.Unlock()
	s.work.Wait()
	s.pipes.close()
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
	s.cut(next, full, delta)
	return nil
}

func (s *server) replace(ctx context.Context, next *plan.Snapshot) error {
	var text strings.Builder
	var all []*plan.Frontend
	for _, f := range families {
		t := newTable(f, s.Source)
		switch {
		case !slices.Contains(next.Facts.Families, f):
			text.WriteString(t.remove())
			continue
		case s.ports[f] == nil:
			return fmt.Errorf("this machine has no IPv%d", f)
		}
		if s.Source == Preserve {
			if err := openReturn(f); err != nil {
				return fmt.Errorf("routing answers to clients' addresses to this process: %w", err)
			}
		}
		come := map[element]bool{}
		for _, front := range next.Frontends {
			if front.Family == f {
				all = append(all, front)
				for _, e := range t.elements(front) {
					come[e] = true
				}
			}
		}
		for a := range next.ClusterIPs {
			if intent.FamilyOf(a) == f {
				come[element{set: "cluster-ips", text: a.String()}] = true
			}
		}
		text.WriteString(t.base(next.Facts, s.ports[f]))
		text.WriteString(t.change(nil, come))
	}
	s.set(all)
	if err := nft(ctx, text.String()); err != nil {
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

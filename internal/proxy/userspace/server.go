package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
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

	acceptors []acceptor
	loops     []*loop
	starving  atomic.Int32 // links that have no descriptor for their endpoint
	// How many descriptors links and pipes may use, and how many sessions each UDP socket may have.
	linkFiles, pipeFiles files
	mostSessions         int
	udp                  []*datagrams
	ports                map[intent.Family]*listening

	// kernel guards what follows.
	kernel sync.Mutex
	socket *nf.Socket
	tables map[intent.Family]*table
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
	s.fitDescriptors()
	var err error
	if s.home, err = here(); err != nil {
		return nil, err
	}
	if s.flows, err = newFlows(); err != nil {
		return nil, err
	}
	if s.socket, err = nf.Dial(); err != nil {
		return nil, err
	}
	s.load()
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
		s.acceptors = append(s.acceptors, acceptor{fd, f, o})
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
			_ = s.save() // the next time, or when the process ends, it is tried again
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
		errs = append(errs, s.save(), s.handOver())
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
	for _, d := range s.acceptors {
		errs = append(errs, unix.Close(d.fd))
	}
	s.home.close()
	errs = append(errs, s.socket.Close())
	return errors.Join(errs...)
}

func (s *server) handOver() error {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	return s.socket.Sync(func(b *nf.Batch) error {
		for _, f := range s.facts.Families {
			var list []*frontend
			for k, front := range s.known {
				if k.Family == f {
					list = append(list, front)
				}
			}
			t := newTable(f, s.Source)
			present, err := s.socket.Read(t.at)
			if err != nil {
				return err
			}
			t.handover(b, s.facts, list, present)
		}
		return nil
	})
}

// Apply programs the kernel with the addresses that are redirected to us, and the directory with the endpoints behind them. A
// frontend is in the directory before its first connection can come, and until after the last.
func (s *server) Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	full := delta.Full || delta.Facts || s.unsure
	s.unsure = true
	var err error
	if full {
		err = s.replace(next)
	} else {
		err = s.update(delta)
	}
	if err != nil {
		return err
	}
	s.unsure = false
	s.flows.end(s.cut(next, full, delta))
	return nil
}

// replace makes the tables what the snapshot says; what is as it should be is not touched.
func (s *server) replace(next *plan.Snapshot) error {
	if s.Source == Preserve {
		for _, f := range next.Facts.Families {
			if err := openReturn(f); err != nil {
				return fmt.Errorf("routing answers to clients' addresses to this process: %w", err)
			}
		}
	}
	var all []*plan.Frontend
	for _, front := range next.Frontends {
		if slices.Contains(next.Facts.Families, front.Family) {
			all = append(all, front)
		}
	}
	s.set(all)
	var fresh map[intent.Family]*table
	err := s.socket.Sync(func(b *nf.Batch) error {
		fresh = map[intent.Family]*table{}
		for _, f := range families {
			t := newTable(f, s.Source)
			present, err := s.socket.Read(t.at)
			switch {
			case err != nil:
				return err
			case !slices.Contains(next.Facts.Families, f) && present != nil:
				b.DeleteTable(t.at)
				continue
			case !slices.Contains(next.Facts.Families, f):
				continue
			case s.ports[f] == nil:
				return fmt.Errorf("this machine has no IPv%d", f)
			}
			t.base(b, next.Facts, s.ports[f], present)
			come := map[element]bool{}
			for _, front := range all {
				if front.Family == f {
					collect(come, t.elements(front))
				}
			}
			t.addresses(come, slices.Collect(maps.Keys(next.ClusterIPs)))
			change(b, nil, come)
			b.Prune(t.at)
			fresh[f] = t
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing the table %s: %w", tableName, err)
	}
	s.tables, s.facts = fresh, next.Facts
	s.memory.setChanged() // the map may be new
	s.keep(func(k plan.FrontendKey) bool { return next.Frontends[k] != nil })
	s.flows.look(all, localAddrs())
	return nil
}

func (s *server) update(delta *plan.Delta) error {
	b := nf.NewBatch()
	var fresh, opened []*plan.Frontend
	var gone []plan.FrontendKey
	for f, t := range s.tables {
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
				if ch.Old == nil || !ch.Old.Forwards() {
					opened = append(opened, ch.New)
				}
			} else {
				gone = append(gone, ch.FrontendKey)
			}
		}
		t.addresses(old, delta.RemovedIPs)
		t.addresses(now, delta.AddedIPs)
		change(b, without(old, now), without(now, old))
	}
	s.set(fresh)
	if !b.Empty() {
		if err := s.socket.Commit(b); err != nil {
			return fmt.Errorf("changing the table %s: %w", tableName, err)
		}
	}
	s.remove(gone)
	if len(opened) > 0 {
		s.flows.look(opened, localAddrs())
	}
	return nil
}

func (t *table) addresses(into map[element]bool, list []netip.Addr) {
	for _, a := range list {
		if a.Is6() == t.Is6() {
			into[t.clusterIP(a)] = true
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

// Check costs one question while nobody else changes nftables, and otherwise reads our tables and compares all of them.
func (s *server) Check(context.Context) error {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	if s.unsure {
		return errors.New("what the kernel has is not known")
	}
	var list []*nf.Table
	for _, t := range s.tables {
		list = append(list, t.at)
	}
	return s.socket.Check(list...)
}

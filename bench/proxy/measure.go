package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/bench/report"
	"portal/internal/proxy/nf"
)

// The names of the figures that targets are about.
const (
	changeLatency   = "one endpoint changed, p50"
	changeGrowth    = "one endpoint changed, compared with the fewest Services"
	churnP99        = "20 changes/s: endpoint reached, p99"
	firstByte       = "new connection to its first byte, compared with a direct one"
	firstByteGrowth = "new connection to its first byte, compared with the fewest Services"
)

// session measures one proxy in one mode on a cluster.
type session struct {
	o       options
	net     *network
	c       *cluster
	subject string
	mode    string
	dir     string
	at      report.At
	took    map[string][]time.Duration // by situation, until the last Service answered
	cpu     map[string][]time.Duration

	mu       sync.Mutex
	replaced []int // Services whose endpoints were replaced
}

// measure takes every figure and leaves the cluster and the network as they were.
func (s *session) measure(ctx context.Context) (err error) {
	if s.dir, err = os.MkdirTemp("", "bench-proxy"); err != nil {
		return err
	}
	defer os.RemoveAll(s.dir)
	s.took, s.cpu = map[string][]time.Duration{}, map[string][]time.Duration{}
	p, err := s.starts(ctx)
	defer func() {
		if p != nil {
			p.Stop()
		}
		err = errors.Join(err, s.net.reset(), s.restoreAll(ctx))
	}()
	if err != nil {
		return err
	}
	if err := s.changes(ctx); err != nil {
		return fmt.Errorf("%w\n%s", err, p.Tail())
	}
	if err := s.firstBytes(); err != nil {
		return err
	}
	if s.o.churn > 0 {
		if err := s.churn(ctx, p); err != nil {
			return fmt.Errorf("%w\n%s", err, p.Tail())
		}
	}
	time.Sleep(s.o.settle)
	steady, err := p.Read()
	if err != nil {
		return err
	}
	s.at.Memory(s.subject, steady, p.Peak())
	return nil
}

// pause between two changes, long enough that none waits for the end of kube-proxy's minSyncPeriod, which is 1 s by
// default. Portal has no such period.
func (s *session) pause() time.Duration {
	if s.subject == kube {
		return 1100*time.Millisecond + rand.N(200*time.Millisecond)
	}
	return 150*time.Millisecond + rand.N(100*time.Millisecond)
}

// changes replaces the endpoints of Services, one after the other, and times each from before its write.
func (s *session) changes(ctx context.Context) error {
	var took, writes []time.Duration
	for k := range s.o.changes {
		time.Sleep(s.pause())
		all, write, err := s.replace(ctx, s.c.replaceable[(k*7919+11)%len(s.c.replaceable)], s.o.changeTimeout)
		if err != nil {
			return err
		}
		took, writes = append(took, all), append(writes, write)
	}
	s.at.Lower(s.subject, changeLatency, report.Quantile(took, 0.5), "ms")
	s.at.Lower(s.subject, "one endpoint changed, slowest", report.Quantile(took, 1), "ms")
	s.at.Lower(s.subject, "  of which the write to the API, p50", report.Quantile(writes, 0.5), "ms")
	report.Logf("  change %.2f ms, of which the write %.2f ms", report.Quantile(took, 0.5), report.Quantile(writes, 0.5))
	if s.mode != "iptables" {
		return nil
	}
	kernel, err := ruleAcceptance()
	if err == nil {
		s.at.Lower(s.subject, "  of which the kernel, for any one rule", kernel, "ms")
	}
	return err
}

// replace replaces the endpoints of a Service and returns how long it took until a connection reached the new one, and until
// the API had answered.
func (s *session) replace(ctx context.Context, i int, limit time.Duration) (took, write time.Duration, err error) {
	s.note(i)
	begin := time.Now()
	endpoint, err := s.c.replace(ctx, i)
	if err != nil {
		return 0, 0, err
	}
	write = time.Since(begin)
	for time.Since(begin) < limit {
		if got, _, err := fetch(s.c.vip(i), time.Second); err == nil && got == endpoint {
			return time.Since(begin), write, nil
		}
		// Within 5 % of the result, and without taking the processor from a slow proxy.
		time.Sleep(max(500*time.Microsecond, time.Since(begin)/20))
	}
	return 0, 0, fmt.Errorf("%s has not reached its new endpoint %s after %v", s.c.vip(i), endpoint, limit)
}

// note records that a Service's endpoints must be restored.
func (s *session) note(i int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replaced = append(s.replaced, i)
}

// restoreAll gives all Services their original endpoints back.
func (s *session) restoreAll(ctx context.Context) error {
	slices.Sort(s.replaced)
	replaced := slices.Compact(s.replaced)
	s.replaced = nil
	return report.Each(ctx, 8, len(replaced), func(k int) error { return s.c.restore(ctx, replaced[k]) })
}

const churnRate = 20

// churn changes endpoints at a steady rate: how soon connections follow, and what it costs the proxy.
func (s *session) churn(ctx context.Context, p *report.Subject) error {
	// With few Services, one would change again before connections have followed its last change.
	if s.c.size() < 10*churnRate {
		return nil
	}
	before, err := p.Read()
	if err != nil {
		return err
	}
	took := make([]time.Duration, int(s.o.churn.Seconds()*churnRate))
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	begin := time.Now()
	for k := range took {
		if wait := time.Until(begin.Add(time.Duration(k) * time.Second / churnRate)); wait > 0 {
			time.Sleep(wait)
		}
		wg.Go(func() {
			var err error
			if took[k], _, err = s.replace(ctx, s.c.replaceable[(k*104729+5)%len(s.c.replaceable)], s.o.changeTimeout); err != nil {
				once.Do(func() { first = err })
			}
		})
	}
	wg.Wait()
	if first != nil {
		return first
	}
	time.Sleep(rest) // what it does after the last change belongs to the cost
	after, err := p.Read()
	if err != nil {
		return err
	}
	s.at.Lower(s.subject, "20 changes/s: endpoint reached, p50", report.Quantile(took, 0.5), "ms")
	s.at.Lower(s.subject, churnP99, report.Quantile(took, 0.99), "ms")
	s.at.Lower(s.subject, "20 changes/s: CPU for each change", report.Milliseconds(after.CPU-before.CPU)/float64(len(took)), "ms")
	report.Logf("  20 changes/s: p99 %.1f ms, %.1f s CPU for %d", report.Quantile(took, 0.99), (after.CPU - before.CPU).Seconds(), len(took))
	return nil
}

// firstBytes times new connections until their first byte: to a few Services, to any Service, and to a backend from a
// machine without a proxy; in turns, because the machine is not equally busy all the time.
func (s *session) firstBytes() error {
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer here.Close()
	node, plain := newDialer(here), newDialer(s.net.plain)
	defer node.close()
	defer plain.close()
	n := s.o.conns
	backend := netip.AddrPortFrom(netip.MustParseAddr(podAddr(1)), uint16(podPorts[0]))
	spread := rand.Perm(s.c.size())
	few, some, direct := make([]time.Duration, n), make([]time.Duration, n), make([]time.Duration, n)
	for i := range n {
		for _, x := range []struct {
			from *dialer
			to   netip.AddrPort
			took *time.Duration
		}{{node, s.c.vip(i % 10), &few[i]}, {plain, backend, &direct[i]}, {node, s.c.vip(spread[i%len(spread)]), &some[i]}} {
			if *x.took, err = x.from.fetch(x.to); err != nil {
				return err
			}
		}
	}
	s.at.Lower(s.subject, "new connection to its first byte, p50", report.Quantile(few, 0.5), "ms")
	s.at.Lower(s.subject, "new connection to its first byte, p99", report.Quantile(few, 0.99), "ms")
	s.at.Lower(s.subject, "new connection to its first byte, any Service, p50", report.Quantile(some, 0.5), "ms")
	s.at.Lower(s.subject, firstByte, report.Quantile(few, 0.5)/report.Quantile(direct, 0.5), "×")
	return nil
}

// ruleAcceptance is how long the kernel alone takes to accept one more rule into the table as it is, in milliseconds: for
// any changed rule the kernel validates everything that packets can reach.
func ruleAcceptance() (float64, error) {
	conn, err := nf.Dial()
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	table, chain := &nf.Table{Family: unix.NFPROTO_IPV4, Name: "nat"}, "BENCH-ACCEPTANCE"
	b := nf.NewBatch()
	b.SharedChain(table, chain, nf.Hook{})
	if err := conn.Commit(b); err != nil {
		return 0, fmt.Errorf("a chain in the nat table: %w", err)
	}
	var all []time.Duration
	for range 15 {
		time.Sleep(150 * time.Millisecond) // as before each change: the processor's caches forget
		b := nf.NewBatch()
		b.SharedRule(table, chain, 0, false, nf.Return.Append)
		begin := time.Now()
		if err := conn.Commit(b); err != nil {
			return 0, fmt.Errorf("a rule in the nat table: %w", err)
		}
		all = append(all, time.Since(begin))
	}
	b = nf.NewBatch()
	b.DeleteSharedChainLast(table, chain)
	return report.Quantile(all, 0.5), conn.Commit(b)
}

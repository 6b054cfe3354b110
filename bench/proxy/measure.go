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

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netns"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// measure runs one proxy in one mode on the cluster as it is, and leaves both as they were.
func measure(ctx context.Context, o options, net *network, c *cluster, who, mode string) (*result, error) {
	dir, err := os.MkdirTemp("", "bench-proxy")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	out := &result{Who: who, Mode: mode, Services: c.services}
	var starts, syncs []time.Duration
	for c.services <= manyStartsTo && len(starts) < o.starts-1 {
		p, stop, err := out.start(ctx, o, net, c, dir)
		if p != nil {
			err = errors.Join(err, stop())
		}
		if err != nil || out.CutOff {
			return out, err
		}
		starts, syncs = append(starts, seconds(out.Start)), append(syncs, seconds(out.FullSync))
		time.Sleep(rest)
	}
	p, stop, err := out.start(ctx, o, net, c, dir)
	if p != nil {
		defer func() { err = errors.Join(err, stop()) }()
	}
	if err != nil || out.CutOff {
		return out, err
	}
	starts, syncs = append(starts, seconds(out.Start)), append(syncs, seconds(out.FullSync))
	out.Start, out.FullSync = quantile(starts, 0.5)/1000, quantile(syncs, 0.5)/1000

	m := &mover{c: c}
	defer func() { err = errors.Join(err, m.restore(ctx, o.endpoints)) }()
	changes, err := m.oneByOne(ctx, o.changes, o.patience)
	if err != nil {
		return out, fmt.Errorf("%w\n%s", err, p.Tail())
	}
	out.Change, out.ChangeP99 = quantile(changes, 0.5), quantile(changes, 0.99)
	if out.MemoryBusy, _, _, err = usage(p.Pid()); err != nil {
		return out, err
	}
	if mode == "iptables" {
		if out.Kernel, err = acceptance(); err != nil {
			return out, err
		}
	}
	if err := out.firstBytes(net, c, o.conns); err != nil {
		return out, err
	}
	if out.Memory, out.MemoryPeak, _, err = usage(p.Pid()); err != nil {
		return out, err
	}
	if o.churn > 0 {
		err = out.churn(ctx, o, m, p)
	}
	return out, err
}

// manyStartsTo is how many Services there may be for a start to be repeated: with more it takes long, and differs less.
const manyStartsTo = 1000

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// start starts the proxy and times how long it takes until all Services answer, and its first sync. The process is to be
// stopped, if there is one.
func (r *result) start(ctx context.Context, o options, net *network, c *cluster, dir string) (p *harness.Process, stop func() error, err error) {
	begin := time.Now()
	if p, err = startProxy(o, c, r.Who, r.Mode, dir); err != nil {
		return nil, nil, err
	}
	stop = func() error {
		_ = p.Stop(10 * time.Second)
		p.Kill()
		return net.reset()
	}
	if r.CutOff, err = waitAll(ctx, o, c, p); err != nil || r.CutOff {
		return p, stop, err
	}
	r.Start = time.Since(begin).Seconds()
	if r.Syncs, r.FullSync, err = firstSync(ctx, o); err != nil {
		err = fmt.Errorf("metrics: %w\n%s", err, p.Tail())
	}
	return p, stop, err
}

// firstSync waits until the proxy has counted its first sync: packets may flow before it is over.
func firstSync(ctx context.Context, o options) (n int, took float64, err error) {
	for end := time.Now().Add(o.cut); ; time.Sleep(100 * time.Millisecond) {
		n, d, err := syncs(o.patience)
		if n > 0 || err != nil || time.Now().After(end) || ctx.Err() != nil {
			return n, d.Seconds(), errors.Join(err, ctx.Err())
		}
	}
}

// waitAll waits until Services answer: the last one made, and some others; then until all do.
func waitAll(ctx context.Context, o options, c *cluster, p *harness.Process) (cutOff bool, err error) {
	end := time.Now().Add(o.cut)
	probes := []int{c.services - 1, 0, c.services / 2, c.services / 3}
	for len(probes) > 0 {
		select {
		case <-p.Done():
			return false, fmt.Errorf("it has ended:\n%s", p.Tail())
		case <-ctx.Done():
			return false, ctx.Err()
		default:
		}
		if time.Now().After(end) {
			return true, nil
		}
		if knock(c.vip(probes[0]), 5*time.Millisecond) != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		probes = probes[1:]
	}
	return false, nil
}

// acceptance is how long the kernel alone takes to accept one more rule into the table as it is, in milliseconds.
func acceptance() (float64, error) {
	conn, err := nftables.New()
	if err != nil {
		return 0, err
	}
	table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"}
	chain := conn.AddChain(&nftables.Chain{Name: "BENCH-ACCEPTANCE", Table: table})
	if err := conn.Flush(); err != nil {
		return 0, fmt.Errorf("a chain in the nat table: %w", err)
	}
	var all []time.Duration
	for range 15 {
		time.Sleep(150 * time.Millisecond) // as before each change: the processor's caches forget
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}})
		begin := time.Now()
		if err := conn.Flush(); err != nil {
			return 0, fmt.Errorf("a rule in the nat table: %w", err)
		}
		all = append(all, time.Since(begin))
	}
	conn.DelChain(chain)
	return quantile(all, 0.5), conn.Flush()
}

// mover changes endpoints and sees when connections follow.
type mover struct {
	c     *cluster
	mu    sync.Mutex
	moved []int
}

// oneByOne changes the endpoints of Services, one after the other, and returns how long each took from before its write.
func (m *mover) oneByOne(ctx context.Context, n int, patience time.Duration) ([]time.Duration, error) {
	var out []time.Duration
	for k := range n {
		// Long enough after the last change that nobody waits for the pause between two syncs to end.
		time.Sleep(150*time.Millisecond + rand.N(100*time.Millisecond))
		i := (k*7919 + 11) % m.c.services
		took, err := m.move(ctx, i, patience)
		if err != nil {
			return nil, err
		}
		out = append(out, took)
	}
	return out, nil
}

func (m *mover) move(ctx context.Context, i int, limit time.Duration) (time.Duration, error) {
	m.mu.Lock()
	m.moved = append(m.moved, i)
	m.mu.Unlock()
	begin := time.Now()
	want, err := m.c.move(ctx, i)
	if err != nil {
		return 0, err
	}
	for time.Since(begin) < limit {
		if got, _, err := ask(m.c.vip(i), time.Second); err == nil && got == want {
			return time.Since(begin), nil
		}
		time.Sleep(500 * time.Microsecond)
	}
	return 0, fmt.Errorf("%s has not reached its new endpoint %s after %v", m.c.vip(i), want, limit)
}

// restore gives the Services that were moved their endpoints back.
func (m *mover) restore(ctx context.Context, endpoints int) error {
	slices.Sort(m.moved)
	m.moved = slices.Compact(m.moved)
	return parallel(8, len(m.moved), func(k int) error {
		i := m.moved[k]
		var addrs []string
		for e := range endpoints {
			addrs = append(addrs, podAddr(i*endpoints+e+1))
		}
		_, err := m.c.client.DiscoveryV1().EndpointSlices(namespace).Update(ctx, slice(i, podPort, addrs), metav1.UpdateOptions{})
		return err
	})
}

const churnRate = 20

// churn changes endpoints at a steady rate and notes when connections follow, and what it costs the proxy.
func (r *result) churn(ctx context.Context, o options, m *mover, p *harness.Process) error {
	// Of few Services, one would change again before connections have followed its last change.
	if r.Who == kube || m.c.services < 10*churnRate {
		return nil
	}
	_, _, before, err := usage(p.Pid())
	if err != nil {
		return err
	}
	n := int(o.churn.Seconds() * churnRate)
	took := make([]time.Duration, n)
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	begin := time.Now()
	for k := range n {
		if wait := time.Until(begin.Add(time.Duration(k) * time.Second / churnRate)); wait > 0 {
			time.Sleep(wait)
		}
		wg.Go(func() {
			d, err := m.move(ctx, (k*104729+5)%m.c.services, 30*time.Second)
			if err != nil {
				once.Do(func() { first = err })
			}
			took[k] = d
		})
	}
	wg.Wait()
	if first != nil {
		return first
	}
	_, _, after, err := usage(p.Pid())
	r.Churn, r.ChurnP99 = quantile(took, 0.5), quantile(took, 0.99)
	r.ChurnCPU = (after - before).Seconds() / time.Since(begin).Seconds()
	return err
}

// firstBytes times new connections until their first byte: to a few Services, to any Service, and to a backend from a
// machine without a proxy; in turns, because the machine is not equally busy all the time.
func (r *result) firstBytes(net *network, c *cluster, n int) error {
	here, err := netns.Get()
	if err != nil {
		return err
	}
	defer here.Close()
	node, plain := newAsker(here), newAsker(net.plain)
	defer node.close()
	defer plain.close()
	backend := netip.AddrPortFrom(netip.MustParseAddr(podAddr(1)), podPort)
	spread := rand.Perm(c.services)
	few, some, direct := make([]time.Duration, n), make([]time.Duration, n), make([]time.Duration, n)
	for i := range n {
		for _, x := range []struct {
			from *asker
			to   netip.AddrPort
			took *time.Duration
		}{{node, c.vip(i % 10), &few[i]}, {plain, backend, &direct[i]}, {node, c.vip(spread[i%len(spread)]), &some[i]}} {
			if *x.took, err = x.from.ask(x.to); err != nil {
				return err
			}
		}
	}
	r.FirstByte, r.FirstByteP99, r.FirstByteAny = quantile(few, 0.5), quantile(few, 0.99), quantile(some, 0.5)
	r.Direct, r.DirectP99 = quantile(direct, 0.5), quantile(direct, 0.99)
	return nil
}

// quantile is in milliseconds.
func quantile(all []time.Duration, q float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]) / float64(time.Millisecond)
}

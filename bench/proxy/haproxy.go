package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/utils/ptr"

	"portal/bench/report"
	"portal/test/harness"
)

// The traffic of one round.
const (
	relayRounds = 5
	streams     = 4
	streamBytes = 256 << 20
	rateConns   = 4000
	rateClients = 4
)

// relay is the figures of one that relays connections itself, one of each for every round.
type relay struct {
	subject string
	// throughput is in MB a second over some streams, rate in connections a second.
	throughput, rate []float64
	// What each costs the relay itself, in milliseconds of processor time.
	perGB, perConnection []float64
}

// besideHAProxy measures Portal's userspace mode beside HAProxy in TCP mode with the same backends, and both beside
// direct connections. They take turns, because the machine is not equally busy all the time; Portal only runs when it is
// its turn, because its rules make the kernel track all connections.
func besideHAProxy(ctx context.Context, o options, net *network, r *report.Report) error {
	report.Logf("userspace mode beside HAProxy")
	dir, err := os.MkdirTemp("", "bench-proxy")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	c, err := newCluster(ctx, dir, uniform(2), 10)
	if err != nil {
		return err
	}
	defer c.stop()
	bulk := c.slices(1)[0]
	bulk.Ports[0].Port = ptr.To(int32(bulkPort))
	if err := c.update(ctx, bulk); err != nil {
		return err
	}
	haproxy, err := startHAProxy(ctx, dir)
	if err != nil {
		return err
	}
	defer haproxy.Kill()
	direct, peer, own := &relay{subject: "direct"}, &relay{subject: "haproxy"}, &relay{subject: portal}
	s := &session{o: o, net: net, c: c, subject: portal, mode: "userspace", dir: dir}
	for range relayRounds {
		if err := errors.Join(
			direct.measure(ctx, nil, endpoint(podAddr(1), podPorts[0]), endpoint(podAddr(2), bulkPort)),
			peer.measure(ctx, haproxy, endpoint("127.0.0.1", 9000), endpoint("127.0.0.1", 9001)),
			s.measureUserspace(ctx, own),
		); err != nil {
			return err
		}
	}
	at := r.At("userspace mode beside HAProxy in TCP mode", relayRounds, "rounds")
	for _, x := range []*relay{direct, peer, own} {
		at.Higher(x.subject, "throughput", report.Median(x.throughput), "MB/s")
		at.Higher(x.subject, "new connections", report.Median(x.rate), "a second")
		if x != direct {
			at.Lower(x.subject, "CPU for each GB", report.Median(x.perGB), "ms")
			at.Lower(x.subject, "CPU for each connection", report.Median(x.perConnection), "ms")
		}
	}
	// The two are compared by what they did in the same rounds.
	const throughput, rate = "throughput, share of HAProxy's in the same round", "new connections, share of HAProxy's in the same round"
	at.Higher(portal, throughput, report.Median(shares(own.throughput, peer.throughput)), "×")
	at.Higher(portal, rate, report.Median(shares(own.rate, peer.rate)), "×")
	at.WantWithin(portal, throughput, 1)
	at.WantWithin(portal, rate, 0.7)
	return nil
}

func shares(own, peer []float64) []float64 {
	out := make([]float64, len(own))
	for i := range own {
		out[i] = own[i] / peer[i]
	}
	return out
}

// measureUserspace starts Portal's proxy for one round.
func (s *session) measureUserspace(ctx context.Context, out *relay) (err error) {
	p, err := startProxy(s.o, s.c, portal, s.mode, s.dir)
	if err != nil {
		return err
	}
	defer func() {
		p.Stop()
		err = errors.Join(err, s.net.reset())
	}()
	// Service 1 sends nothing before it gets a request.
	if err := s.waitFor(ctx, p, []int{0, s.c.size() - 1}); err != nil {
		return fmt.Errorf("the userspace mode: %w\n%s", err, p.Tail())
	}
	if err := out.measure(ctx, p.Process, s.c.vip(0), s.c.vip(1)); err != nil {
		return fmt.Errorf("%w\n%s", err, p.Tail())
	}
	return nil
}

func endpoint(addr string, port int) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port))
}

func startHAProxy(ctx context.Context, dir string) (*harness.Process, error) {
	config := filepath.Join(dir, "haproxy.cfg")
	text := fmt.Sprintf(`global
  nbthread 2
  maxconn 4000
defaults
  mode tcp
  timeout connect 5s
  timeout client 1m
  timeout server 1m
listen short
  bind 127.0.0.1:9000
  server a %s:%d
  server b %s:%d
listen bulk
  bind 127.0.0.1:9001
  server a %s:%d
  server b %s:%d
`, podAddr(1), podPorts[0], podAddr(2), podPorts[0], podAddr(3), bulkPort, podAddr(4), bulkPort)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	p, err := harness.Start(dir, "haproxy", "haproxy", "-db", "-f", config)
	if err != nil {
		return nil, fmt.Errorf("%w (Debian's package haproxy has it)", err)
	}
	if err := report.Until(ctx, 10*time.Second, 50*time.Millisecond, func() error {
		_, _, err := fetch(endpoint("127.0.0.1", 9000), time.Second)
		return err
	}); err != nil {
		p.Kill()
		return nil, fmt.Errorf("haproxy does not answer: %w\n%s", err, p.Tail())
	}
	return p, nil
}

// measure makes one round.
func (r *relay) measure(ctx context.Context, p *harness.Process, short, bulk netip.AddrPort) error {
	spent := func() float64 {
		if p == nil {
			return 0
		}
		used, _ := report.Read(p.Pid())
		return report.Milliseconds(used.CPU)
	}
	begin, before := time.Now(), spent()
	if err := report.Each(ctx, streams, streams, func(int) error { return pull(bulk, streamBytes) }); err != nil {
		return fmt.Errorf("%s: %w", r.subject, err)
	}
	r.throughput = append(r.throughput, streams*streamBytes/1e6/time.Since(begin).Seconds())
	r.perGB = append(r.perGB, (spent()-before)/(streams*streamBytes/1e9))
	begin, before = time.Now(), spent()
	if err := report.Each(ctx, rateClients, rateConns, func(int) error {
		_, _, err := fetch(short, 5*time.Second)
		return err
	}); err != nil {
		return fmt.Errorf("%s: %w", r.subject, err)
	}
	r.rate = append(r.rate, rateConns/time.Since(begin).Seconds())
	r.perConnection = append(r.perConnection, (spent()-before)/rateConns)
	return nil
}

// pull asks for a number of bytes and receives them.
func pull(from netip.AddrPort, n int64) error {
	c, err := net.Dial("tcp4", from.String())
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(c, n); err != nil {
		return err
	}
	got, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 256<<10))
	if err == nil && got != n {
		err = fmt.Errorf("%d of %d bytes came", got, n)
	}
	return err
}

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
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// What moves through a proxy, in each of a few rounds: bounded, so that it ends.
const (
	relayRounds = 5
	streams     = 4
	streamBytes = 256 << 20
	rateConns   = 4000
	rateClients = 4
)

// relay is the figures of one that moves connections itself: medians of the rounds.
type relay struct {
	Who string `json:"who"`
	// Throughput is in MB a second over some streams, Rate in connections a second.
	Throughput float64 `json:"throughputMBps"`
	Rate       float64 `json:"connectionsPerSecond"`
	// What each costs the relay itself, in milliseconds of processor time.
	PerGB         float64 `json:"cpuMsPerGB"`
	PerConnection float64 `json:"cpuMsPerConnection"`

	rounds []relay
}

// besideHAProxy measures Portal's userspace mode beside HAProxy in TCP mode with the same backends, and both beside
// direct connections. They take turns, because the machine is not equally busy all the time; Portal is only there when it
// is its turn, because its rules make the kernel track all connections.
func besideHAProxy(ctx context.Context, o options, net *network, r *report) error {
	say("userspace mode beside HAProxy")
	dir, err := os.MkdirTemp("", "bench-proxy")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	c, err := newCluster(ctx, dir, 10, 2)
	if err != nil {
		return err
	}
	defer c.stop()
	bulk := slice(1, bulkPort, []string{podAddr(3), podAddr(4)})
	if _, err := c.client.DiscoveryV1().EndpointSlices(namespace).Update(ctx, bulk, metav1.UpdateOptions{}); err != nil {
		return err
	}
	haproxy, err := startHAProxy(dir)
	if err != nil {
		return err
	}
	defer haproxy.Kill()
	direct, peer, own := relay{Who: "direct"}, relay{Who: "haproxy"}, relay{Who: portal}
	for range relayRounds {
		if err := errors.Join(
			direct.measure(nil, endpoint(podAddr(1), podPort), endpoint(podAddr(3), bulkPort)),
			peer.measure(haproxy, endpoint("127.0.0.1", 9000), endpoint("127.0.0.1", 9001)),
			measureUserspace(ctx, o, net, c, dir, &own),
		); err != nil {
			return err
		}
	}
	for _, x := range []*relay{&direct, &peer, &own} {
		x.settle()
		r.Relays = append(r.Relays, *x)
		say("  %s", x)
	}
	return nil
}

// measureUserspace starts Portal's proxy for one round.
func measureUserspace(ctx context.Context, o options, net *network, c *cluster, dir string, out *relay) (err error) {
	p, err := startProxy(o, c, portal, "userspace", dir)
	if err != nil {
		return err
	}
	defer func() {
		_ = p.Stop(10 * time.Second)
		p.Kill()
		err = errors.Join(err, net.reset())
	}()
	if cutOff, err := waitAll(ctx, o, c, p); err != nil || cutOff {
		return errors.Join(err, fmt.Errorf("the userspace mode was not ready in time:\n%s", p.Tail()))
	}
	if err := out.measure(p, c.vip(0), c.vip(1)); err != nil {
		return fmt.Errorf("%w\n%s", err, p.Tail())
	}
	return nil
}

func endpoint(addr string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
}

func startHAProxy(dir string) (*harness.Process, error) {
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
`, podAddr(1), podPort, podAddr(2), podPort, podAddr(3), bulkPort, podAddr(4), bulkPort)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	p, err := harness.Start(dir, "haproxy", "haproxy", "-db", "-f", config)
	if err != nil {
		return nil, fmt.Errorf("%w (Debian's package haproxy has it)", err)
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, _, err := ask(endpoint("127.0.0.1", 9000), time.Second); err == nil {
			return p, nil
		}
	}
	p.Kill()
	return nil, fmt.Errorf("haproxy does not answer:\n%s", p.Tail())
}

// measure makes one round.
func (r *relay) measure(p *harness.Process, short, bulk netip.AddrPort) error {
	spent := func() (cpu time.Duration) {
		if p != nil {
			_, _, cpu, _ = usage(p.Pid())
		}
		return cpu
	}
	out, begin, before := relay{}, time.Now(), spent()
	if err := parallel(streams, streams, func(int) error { return pull(bulk, streamBytes) }); err != nil {
		return fmt.Errorf("%s: %w", r.Who, err)
	}
	out.Throughput = float64(streams*streamBytes) / 1e6 / time.Since(begin).Seconds()
	out.PerGB = float64((spent() - before).Milliseconds()) / (streams * streamBytes / 1e9)
	begin, before = time.Now(), spent()
	if err := parallel(rateClients, rateConns, func(int) error {
		_, _, err := ask(short, 5*time.Second)
		return err
	}); err != nil {
		return fmt.Errorf("%s: %w", r.Who, err)
	}
	out.Rate = rateConns / time.Since(begin).Seconds()
	out.PerConnection = float64((spent() - before).Milliseconds()) / rateConns
	r.rounds = append(r.rounds, out)
	return nil
}

func (r relay) throughput() float64 { return r.Throughput }
func (r relay) rate() float64       { return r.Rate }

// settle makes the figures of the rounds' medians.
func (r *relay) settle() {
	of := func(figure func(relay) float64) float64 {
		var all []float64
		for _, x := range r.rounds {
			all = append(all, figure(x))
		}
		return median(all)
	}
	r.Throughput, r.Rate = of(relay.throughput), of(relay.rate)
	r.PerGB, r.PerConnection = of(func(x relay) float64 { return x.PerGB }), of(func(x relay) float64 { return x.PerConnection })
}

// share compares two by what they did in the same rounds.
func (r *relay) share(of *relay, figure func(relay) float64) float64 {
	var all []float64
	for i, x := range r.rounds {
		all = append(all, figure(x)/figure(of.rounds[i]))
	}
	return median(all)
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

func (r *relay) String() string {
	return fmt.Sprintf("%-8s %6.0f MB/s (%.0f ms CPU a GB)   %6.0f connections/s (%.3f ms CPU each)", r.Who, r.Throughput, r.PerGB, r.Rate, r.PerConnection)
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

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
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// What moves through a proxy for its throughput: bounded, so that it ends.
const (
	streams     = 4
	streamBytes = 512 << 20
	rateConns   = 8000
	rateClients = 4
)

// relay is the figures of one that moves connections itself.
type relay struct {
	Who string `json:"who"`
	// Throughput is in MB a second over some streams, Rate in connections a second.
	Throughput float64 `json:"throughputMBps"`
	Rate       float64 `json:"connectionsPerSecond"`
	CPU        float64 `json:"cpuSeconds"`
}

// besideHAProxy measures Portal's userspace mode beside HAProxy in TCP mode with the same backends, and both beside
// direct connections.
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
	direct, err := measureRelay("direct", nil, endpoint(podAddr(1), podPort), endpoint(podAddr(3), bulkPort))
	if err != nil {
		return err
	}
	haproxy, err := startHAProxy(dir)
	if err != nil {
		return err
	}
	defer haproxy.Kill()
	peer, err := measureRelay("haproxy", haproxy, endpoint("127.0.0.1", 9000), endpoint("127.0.0.1", 9001))
	if err != nil {
		return err
	}
	haproxy.Kill()
	p, err := startProxy(o, c, portal, "userspace", dir)
	if err != nil {
		return err
	}
	defer func() {
		_ = p.Stop(10 * time.Second)
		p.Kill()
		err = errors.Join(err, net.reset())
	}()
	if _, err := waitAll(ctx, o, c, p); err != nil {
		return err
	}
	own, err := measureRelay(portal, p, c.vip(0), c.vip(1))
	if err != nil {
		return fmt.Errorf("%w\n%s", err, p.Tail())
	}
	r.Relays = []relay{direct, peer, own}
	for _, x := range r.Relays {
		say("  %-8s %6.0f MB/s   %6.0f connections/s   %.1f s CPU", x.Who, x.Throughput, x.Rate, x.CPU)
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

func measureRelay(who string, p *harness.Process, short, bulk netip.AddrPort) (out relay, err error) {
	out.Who = who
	begin := time.Now()
	if err := parallel(streams, streams, func(int) error { return pull(bulk, streamBytes) }); err != nil {
		return out, err
	}
	out.Throughput = float64(streams*streamBytes) / 1e6 / time.Since(begin).Seconds()
	begin = time.Now()
	var once sync.Once
	var first error
	err = parallel(rateClients, rateConns, func(int) error {
		_, _, err := ask(short, 5*time.Second)
		if err != nil {
			once.Do(func() { first = err })
		}
		return err
	})
	out.Rate = rateConns / time.Since(begin).Seconds()
	if p != nil {
		_, _, cpu, e := usage(p.Pid())
		out.CPU, err = cpu.Seconds(), errors.Join(err, e)
	}
	return out, errors.Join(err, first)
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

package userspace

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"portal/internal/intent"
	"portal/internal/plan"
)

// role is what a process of the benchmark does.
const role = "PORTAL_BENCH_ROLE"

var benchEndpoint = netip.MustParseAddrPort("10.0.0.1:8080")

// BenchmarkProxy measures connections and bytes through a Service, directly to its endpoint, and through HAProxy where it
// is installed. The client and the proxy are processes of their own, in a new network namespace as a whole.
func BenchmarkProxy(b *testing.B) {
	switch os.Getenv(role) {
	case "client":
		measure(b)
		return
	case "proxy":
		carry(b)
		return
	}
	if os.Geteuid() != 0 {
		b.Skip("network namespaces need root")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkProxy$", "-test.benchtime=1x")
	cmd.Env = append(os.Environ(), role+"=client")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	fields := strings.Fields(string(out))
	for i, f := range fields[1:] {
		var v float64
		if strings.HasSuffix(f, "-conn/s") || strings.HasSuffix(f, "-MB/s") || strings.HasSuffix(f, "-µs/conn") {
			if _, err := fmt.Sscan(fields[i], &v); err == nil {
				b.ReportMetric(v, f)
			}
		}
	}
}

const blob = 64 << 20

func measure(b *testing.B) {
	lo, err := netlink.LinkByName("lo")
	must(b, err)
	addr, _ := netlink.ParseAddr("10.0.0.1/8")
	must(b, netlink.AddrAdd(lo, addr))
	must(b, netlink.LinkSetUp(lo))
	_, all, _ := net.ParseCIDR("0.0.0.0/0")
	must(b, netlink.RouteAdd(&netlink.Route{Dst: all, LinkIndex: lo.Attrs().Index}))
	serveBlobs(b, benchEndpoint)
	proxy := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkProxy$", "-test.benchtime=1x")
	proxy.Env = append(os.Environ(), role+"=proxy")
	end, err := proxy.StdinPipe()
	must(b, err)
	must(b, proxy.Start())
	defer proxy.Wait()
	defer end.Close()
	waitFor(b, "10.96.0.1:80")

	targets := map[string]string{"direct": benchEndpoint.String(), "portal": "10.96.0.1:80"}
	pids := map[string]int{"direct": os.Getpid(), "portal": proxy.Process.Pid}
	if pid := haproxy(b, benchEndpoint); pid != 0 {
		targets["haproxy"], pids["haproxy"] = "10.0.0.1:9000", pid
	}
	for b.Loop() {
		for name, to := range targets {
			before := spent(b, pids[name])
			b.ReportMetric(connections(b, to), name+"-conn/s")
			b.ReportMetric(float64((spent(b, pids[name])-before).Microseconds())/benchConns, name+"-µs/conn")
			b.ReportMetric(throughput(b, to), name+"-MB/s")
		}
	}
}

// carry is the proxy, until its standard input ends.
func carry(b *testing.B) {
	facts := &plan.Facts{Families: []intent.Family{intent.IPv4}, Addrs: []netip.Addr{benchEndpoint.Addr()}}
	snap := plan.NewSnapshot(facts)
	key := intent.Key{Namespace: "default", Name: "web"}
	snap.Set(key, plan.For(&intent.Entry{
		Service: &intent.Service{Key: key, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}, Families: facts.Families, Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}}},
		Slices: []*intent.Slice{{Key: key, Service: "web", Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: intent.TCP, Port: 8080}},
			Endpoints: []intent.Endpoint{{Addr: benchEndpoint.Addr(), Condition: intent.Ready | intent.Serving}}}},
	}, facts))
	back, err := New(Options{}).Open(b.Context())
	must(b, err)
	defer back.Close()
	must(b, back.Apply(b.Context(), snap, snap.Delta()))
	io.Copy(io.Discard, os.Stdin)
}

// waitFor waits until somebody answers.
func waitFor(b *testing.B, to string) {
	for range 200 {
		if c, err := net.DialTimeout("tcp4", to, 100*time.Millisecond); err == nil {
			c.Close()
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	b.Fatalf("nobody answers at %s", to)
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// serveBlobs answers a byte: 'c' with a byte, 'b' with a blob.
func serveBlobs(b *testing.B, at netip.AddrPort) {
	l, err := net.Listen("tcp4", at.String())
	must(b, err)
	b.Cleanup(func() { l.Close() })
	data := make([]byte, blob)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				var q [1]byte
				if _, err := io.ReadFull(c, q[:]); err == nil && q[0] == 'b' {
					c.Write(data)
				} else if err == nil {
					c.Write(q[:])
				}
			}()
		}
	}()
}

// spent is the processor time of a process, which tells more than the clock on a busy machine.
func spent(b *testing.B, pid int) time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	must(b, err)
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')'):]))
	var user, system int64
	_, err = fmt.Sscan(fields[12]+" "+fields[13], &user, &system)
	must(b, err)
	return time.Duration(user+system) * 10 * time.Millisecond
}

const benchConns = 16 * 1000

// connections counts requests on a connection each, of 16 clients.
func connections(b *testing.B, to string) float64 {
	const clients, each = 16, benchConns / 16
	start := time.Now()
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for range each {
				c, err := net.Dial("tcp4", to)
				if err != nil {
					b.Error(err)
					return
				}
				c.Write([]byte("c"))
				if n, err := io.Copy(io.Discard, c); n != 1 {
					b.Errorf("%d bytes: %v", n, err)
				}
				c.(*net.TCPConn).SetLinger(0) // no TIME-WAIT: ports are few
				c.Close()
			}
		})
	}
	wg.Wait()
	return clients * each / time.Since(start).Seconds()
}

// throughput fetches blobs over 4 connections.
func throughput(b *testing.B, to string) float64 {
	const clients, each = 4, 4
	start := time.Now()
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			buf := make([]byte, 256<<10)
			for range each {
				c, err := net.Dial("tcp4", to)
				if err != nil {
					b.Error(err)
					return
				}
				c.Write([]byte("b"))
				sum := 0
				for {
					n, err := c.Read(buf)
					sum += n
					if err != nil {
						break
					}
				}
				if sum != blob {
					b.Errorf("%d bytes of %d", sum, blob)
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	return clients * each * blob / time.Since(start).Seconds() / 1e6
}

// haproxy runs the peer in its TCP mode, if it is there, and returns its process.
func haproxy(b *testing.B, endpoint netip.AddrPort) (pid int) {
	path, err := exec.LookPath("haproxy")
	if err != nil {
		return 0
	}
	config := filepath.Join(b.TempDir(), "haproxy.cfg")
	must(b, os.WriteFile(config, fmt.Appendf(nil, `global
  maxconn 2000
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen web
  bind 10.0.0.1:9000
  server one %s
`, endpoint), 0o600))
	cmd := exec.Command(path, "-db", "-f", config)
	must(b, cmd.Start())
	b.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	waitFor(b, "10.0.0.1:9000")
	return cmd.Process.Pid
}

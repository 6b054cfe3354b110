package top

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/nettest"
)

// inNamespace runs a test in a network namespace of its own, in which 10.96.0.1:80 leads to 10.0.0.1:8080, and nobody answers for
// 10.96.0.2:80. The namespace ends with the thread.
func inNamespace(t testing.TB, test func()) {
	t.Helper()
	nettest.InNamespace(t, func() {
		for _, words := range []string{
			"ip link set lo up", "ip addr add 10.0.0.1/32 dev lo", "ip route add 10.96.0.0/16 dev lo src 10.0.0.1", "ip route add local 10.1.0.0/16 dev lo",
			"nft add table ip t", "nft add chain ip t out { type nat hook output priority -100; }",
			"nft add rule ip t out ip daddr 10.96.0.1 tcp dport 80 dnat to 10.0.0.1:8080",
			"nft add rule ip t out ip daddr 10.96.0.1 udp dport 53 dnat to 10.0.0.1:5353",
			"nft add rule ip t out ip daddr 10.96.0.2 tcp dport 80 dnat to 10.0.0.1:9",
			"nft add rule ip t out tcp dport 30080 dnat to 10.0.0.1:8080",
		} {
			f := strings.Fields(words)
			if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v %s", words, err, out)
				return
			}
		}
		for name, value := range map[string]string{"acct": "1", "tcp_timeout_close": "1", "udp_timeout": "1"} {
			if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_"+name, []byte(value), 0); err != nil {
				t.Error(err)
				return
			}
		}
		test()
	})
}

// cluster has two Services; the endpoint of the second does not listen.
func cluster() *intent.Cluster {
	c := intent.NewCluster()
	add := func(name, ip string, web, dns uint16, nodePort uint16) {
		key := intent.Key{Namespace: "shop", Name: name}
		c.SetService(&intent.Service{
			Key: key, Type: intent.NodePort, ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)}, Families: []intent.Family{intent.IPv4},
			Ports: []intent.Port{{Name: "web", Protocol: intent.TCP, Port: 80, NodePort: nodePort}, {Name: "dns", Protocol: intent.UDP, Port: 53}},
		})
		c.SetSlice(&intent.Slice{
			Key: intent.Key{Namespace: "shop", Name: name + "-1"}, Service: name, Family: intent.IPv4,
			Ports:     []intent.EndpointPort{{Name: "web", Protocol: intent.TCP, Port: web}, {Name: "dns", Protocol: intent.UDP, Port: dns}},
			Endpoints: []intent.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1"), Condition: intent.Ready | intent.Serving}},
		})
	}
	add("web", "10.96.0.1", 8080, 5353, 30080)
	add("broken", "10.96.0.2", 9, 9, 0)
	return c
}

// start opens everything; the caller is in the namespace.
func start(t testing.TB, interval time.Duration) *Top {
	k, err := Open()
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
	t.Cleanup(k.Close)
	top := New(Options{Kernel: k, Cluster: cluster(), Local: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Interval: interval})
	t.Cleanup(top.Close)
	return top
}

// of finds a Service in a sample.
func (s *Sample) of(name, port string) (out Service) {
	for _, x := range s.Services {
		if x.Name == name && x.Port == port {
			return x
		}
	}
	return out
}

// TestCounts: connections are counted where they belong, while they are open and after they have ended.
func TestCounts(t *testing.T) {
	inNamespace(t, func() {
		l, err := net.Listen("tcp", "10.0.0.1:8080")
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
			}
		}()
		top := start(t, 100*time.Millisecond)
		if _, err := top.Next(t.Context()); err != nil {
			t.Error(err)
			return
		}
		var open []net.Conn
		const size = 100_000
		dial := func(to string) net.Conn {
			c, err := net.Dial("tcp", to)
			if err != nil {
				return nil
			}
			return c
		}
		for range 7 { // of which 3 stay open
			c := dial("10.96.0.1:80")
			if c == nil {
				t.Error("the Service does not answer")
				return
			}
			if _, err := c.Write(make([]byte, size)); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadFull(c, make([]byte, size)); err != nil {
				t.Error(err)
			}
			open = append(open, c)
		}
		for _, c := range open[3:] {
			_ = c.Close()
		}
		defer func() {
			for _, c := range open[:3] {
				_ = c.Close()
			}
		}()
		if c := dial("10.0.0.1:30080"); c != nil { // the node port
			defer c.Close()
		}
		for range 4 {
			if c := dial("10.96.0.2:80"); c != nil {
				t.Error("a port that nobody listens at answers")
			}
		}
		why := ""
		for end := time.Now().Add(time.Minute); ; {
			s, err := top.Next(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			web, broken := s.of("web", "web"), s.of("broken", "web")
			switch {
			case web.Counts.New != 8 || web.Counts.Open != 4:
				why = fmt.Sprintf("new %d, open %d; want 8 and 4", web.Counts.New, web.Counts.Open)
			case web.Counts.Bytes < 7*2*size || web.Counts.Bytes > 7*2*size*5/4:
				why = fmt.Sprintf("%d bytes, want a little more than %d", web.Counts.Bytes, 7*2*size)
			case len(web.Endpoints) != 1 || web.Endpoints[0].Address != netip.MustParseAddrPort("10.0.0.1:8080"):
				why = fmt.Sprintf("endpoints %v", web.Endpoints)
			case broken.Counts.New != 4 || broken.Counts.Resets != 4 || broken.Counts.Open != 0:
				why = fmt.Sprintf("of the broken one: %+v; want 4 new, 4 resets, none open", broken.Counts)
			case web.Counts.Resets != 0 || s.OneIn != 1 || len(s.Notes) > 0:
				why = fmt.Sprintf("resets %d, one in %d, notes %q", web.Counts.Resets, s.OneIn, s.Notes)
			default:
				return
			}
			if time.Now().After(end) {
				t.Error(why)
				return
			}
		}
	})
}

// TestSampling: one event in 8 stands for 8.
func TestSampling(t *testing.T) {
	inNamespace(t, func() {
		top := start(t, 100*time.Millisecond)
		if err := top.Kernel.Sample(8); err != nil {
			t.Error(err)
			return
		}
		top.oneIn, top.meter.oneIn = 8, 8
		top.update()
		const n = 4000
		if err := flood(n, 0); err != nil {
			t.Error(err)
			return
		}
		s, err := top.Next(t.Context())
		if err != nil {
			t.Error(err)
			return
		}
		// Half of it is 30 standard deviations away.
		if got := s.of("web", "dns").Counts.New; got < n/2 || got > n*3/2 {
			t.Errorf("%d were counted of %d", got, n)
		}
		if s.OneIn != 8 || !strings.Contains(strings.Join(s.Notes, " "), "1 of 8 connections") {
			t.Errorf("the sample does not say that it is one: one in %d, %q", s.OneIn, s.Notes)
		}
	})
}

// TestSettings: what is missing is said, with what to type.
func TestSettings(t *testing.T) {
	inNamespace(t, func() {
		for _, name := range []string{"acct", "events"} {
			if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_"+name, []byte("0"), 0); err != nil {
				t.Error(err)
				return
			}
		}
		s, err := start(t, 100*time.Millisecond).Next(t.Context())
		if err != nil {
			t.Error(err)
			return
		}
		notes := strings.Join(s.Notes, " ")
		if !strings.Contains(notes, "nf_conntrack_acct=1") || !strings.Contains(notes, "nf_conntrack_events=2") {
			t.Errorf("notes: %q", notes)
		}
	})
}

// FuzzEntry: what the kernel sends is read within its bounds.
func FuzzEntry(f *testing.F) {
	f.Add([]byte{8, 0, 1, 0, 1, 2, 3, 4})
	f.Fuzz(func(_ *testing.T, b []byte) {
		var e Entry
		e.parse(b)
		each(b, func(uint16, uint16, []byte) {})
	})
}

// flood makes n UDP flows to the Service, each from another address and port, at a rate a second; 0: as fast as it can.
func flood(n, rate int) error {
	began := time.Now()
	to := &unix.SockaddrInet4{Port: 53, Addr: [4]byte{10, 96, 0, 1}}
	for i := range n {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		from := &unix.SockaddrInet4{Addr: [4]byte{10, 1, byte(i >> 8), byte(i)}, Port: 1024 + i>>16}
		if err := unix.Bind(fd, from); err == nil {
			_ = unix.Sendto(fd, []byte("?"), unix.MSG_NOSIGNAL, to)
		}
		_ = unix.Close(fd)
		if rate > 0 && i%100 == 0 {
			time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / time.Duration(rate))))
		}
	}
	return nil
}

// floodArgs has the test's own program flood, in the namespace that it is started in: its time is not this process's.
const floodArgs = "PORTAL_TEST_FLOOD"

func TestMain(m *testing.M) {
	if rate, err := strconv.Atoi(os.Getenv(floodArgs)); err == nil {
		began := time.Now()
		for time.Since(began) < time.Hour {
			if err := flood(1<<20, rate); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
		return
	}
	os.Exit(m.Run())
}

// BenchmarkTop measures what counting costs at 20,000 new connections a second, in percent of a processor.
func BenchmarkTop(b *testing.B) {
	inNamespace(b, func() {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env, cmd.Stderr = append(os.Environ(), floodArgs+"=20000"), os.Stderr
		if err := cmd.Start(); err != nil {
			b.Error(err)
			return
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		top := start(b, 2*time.Second)
		var cpu, rate float64
		for range 4 { // until it has found out how much it can take
			if _, err := top.Next(b.Context()); err != nil {
				b.Error(err)
				return
			}
		}
		n := 0
		for b.Loop() {
			s, err := top.Next(b.Context())
			if err != nil {
				b.Error(err)
				return
			}
			n++
			cpu, rate = cpu+s.CPU, rate+s.of("web", "dns").Counts.NewRate
			b.Logf("%.0f new a second, %.1f %% of a processor, 1 in %d, %d tracked, notes %q", s.of("web", "dns").Counts.NewRate, 100*s.CPU, s.OneIn, s.of("web", "dns").Counts.Open, s.Notes)
		}
		b.ReportMetric(100*cpu/float64(n), "%cpu")
		b.ReportMetric(rate/float64(n), "conns/s")
	})
}

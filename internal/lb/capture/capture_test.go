package capture_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/capture"
	"portal/internal/nettest"
)

// machine is a network namespace of the test's own.
type machine struct{ *nettest.Namespace }

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{nettest.NewNamespace(t)}
	m.run(t, "ip", "link", "set", "lo", "up")
	return m
}

func (m *machine) run(t *testing.T, args ...string) string {
	t.Helper()
	var out []byte
	var err error
	m.Do(func() { out, err = exec.Command(args[0], args[1:]...).CombinedOutput() })
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// serve answers connections with a word and who asked, until the test ends or stop is called.
func (m *machine) serve(t *testing.T, address, word string, transparent bool) (stop func()) {
	t.Helper()
	config := net.ListenConfig{Control: func(network, _ string, c syscall.RawConn) (err error) {
		if !transparent {
			return nil
		}
		if e := c.Control(func(fd uintptr) {
			if network == "tcp6" {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
			}
		}); e != nil {
			return e
		}
		return err
	}}
	var l net.Listener
	var err error
	m.Do(func() { l, err = config.Listen(context.Background(), "tcp", address) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			fmt.Fprint(c, word, " ", host)
			c.Close()
		}
	}()
	return func() { l.Close() }
}

// ask makes a connection and returns what is answered, or the error in few words. It waits long for what should come.
func (m *machine) ask(address, want string) string {
	limit := 30 * time.Second
	if want == "nothing" {
		limit = 1500 * time.Millisecond
	}
	var out string
	m.Do(func() {
		c, err := net.DialTimeout("tcp", address, limit)
		switch {
		case err != nil && strings.Contains(err.Error(), "refused"):
			out = "refused"
			return
		case err != nil:
			out = "nothing"
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		data, err := io.ReadAll(c)
		if out = string(data); err != nil {
			out = "broken"
		}
	})
	return out
}

// world is a node between a client outside and a Pod, whose proxy leads the balancer's addresses to the Pod.
type world struct{ node, client, pod *machine }

const (
	vip4, vip6 = "192.0.2.10", "fd00:2::10"
	allowed    = "198.51.100.0/24"
)

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{newMachine(t), newMachine(t), newMachine(t)}
	for i, m := range []*machine{w.client, w.pod} {
		name := []string{"outside", "pod"}[i]
		w.node.run(t, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), m.Handle))
		four, six := []string{"198.51.100", "10.244.1"}[i], []string{"fd00:113", "fd00:244"}[i]
		w.node.run(t, "ip", "address", "add", four+".1/24", "dev", name)
		w.node.run(t, "ip", "address", "add", six+"::1/64", "dev", name, "nodad")
		w.node.run(t, "ip", "link", "set", name, "up")
		m.run(t, "ip", "address", "add", four+".2/24", "dev", "eth0")
		m.run(t, "ip", "address", "add", six+"::2/64", "dev", "eth0", "nodad")
		m.run(t, "ip", "link", "set", "eth0", "up")
		m.run(t, "ip", "route", "add", "default", "via", four+".1")
		m.run(t, "ip", "-6", "route", "add", "default", "via", six+"::1")
	}
	w.node.Do(func() {
		for _, path := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"} {
			if err := os.WriteFile(path, []byte("1"), 0); err != nil {
				t.Error(err)
			}
		}
	})
	// The node needs a way to the addresses, as to any other outside.
	w.node.run(t, "ip", "route", "add", "default", "via", "198.51.100.2")
	w.node.run(t, "ip", "-6", "route", "add", "default", "via", "fd00:113::2")
	for family, to := range map[string]string{"ip": "10.244.1.2", "ip6": "[fd00:244::2]"} {
		vip := map[string]string{"ip": vip4, "ip6": vip6}[family]
		for _, hook := range []string{"prerouting", "output"} {
			w.node.run(t, "nft", fmt.Sprintf("add table %[1]s proxy; add chain %[1]s proxy %[2]s { type nat hook %[2]s priority -100; }; add rule %[1]s proxy %[2]s %[1]s daddr %[3]s tcp dport 80 dnat to %[4]s:8080", family, hook, vip, to))
		}
	}
	w.pod.serve(t, ":8080", "pod", false)
	return w
}

func (w *world) sync(t *testing.T, c *capture.Capture, s capture.State) {
	t.Helper()
	w.node.Do(func() {
		if err := c.Sync(s); err != nil {
			t.Fatal(err)
		}
	})
}

func ports(strict bool) []capture.Port {
	return []capture.Port{{Address: netip.MustParseAddrPort(vip4 + ":80"), Strict: strict}, {Address: netip.MustParseAddrPort("[" + vip6 + "]:80"), Strict: strict}}
}

// expect asks from everywhere, in both families.
func (w *world) expect(t *testing.T, what, outside, pod, node string) {
	t.Helper()
	var asking sync.WaitGroup
	defer asking.Wait()
	for family, vip := range []string{vip4, vip6} {
		sources := map[string][2]string{
			"outside": {"198.51.100.2", "fd00:113::2"}, "pod": {"10.244.1.2", "fd00:244::2"}, "node": {"198.51.100.1", "fd00:113::1"},
		}
		for from, m := range map[string]*machine{"outside": w.client, "pod": w.pod, "node": w.node} {
			want := map[string]string{"outside": outside, "pod": pod, "node": node}[from]
			if want == "balancer" {
				want += " " + sources[from][family]
			}
			asking.Go(func() {
				got := m.ask(net.JoinHostPort(vip, "80"), want)
				if want == "pod" && strings.HasPrefix(got, "pod ") {
					got = "pod"
				}
				if got != want {
					t.Errorf("%s: from %s, %s answers %q, want %q", what, from, vip, got, want)
				}
			})
		}
	}
}

// TestCapture: while a socket listens, packets from everywhere come to it, and the proxy's rules don't see them; without a socket they go the proxy's way, or
// are refused if the port is strict.
func TestCapture(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := capture.New()
	defer c.Close()
	w.expect(t, "before", "pod", "nothing", "pod") // the Pod reaches itself by nobody's masquerading
	var stops []func()
	listen := func() {
		for _, vip := range []string{vip4, vip6} {
			stops = append(stops, w.node.serve(t, net.JoinHostPort(vip, "80"), "balancer", true))
		}
	}
	listen()
	w.sync(t, c, capture.State{Ports: ports(false)})
	w.expect(t, "captured", "balancer", "balancer", "balancer")

	for _, stop := range stops {
		stop()
	}
	w.expect(t, "nobody listens", "pod", "nothing", "refused")
	w.sync(t, c, capture.State{Ports: ports(true)})
	w.expect(t, "nobody listens at a strict port", "refused", "refused", "refused")
	listen()
	w.expect(t, "listening again", "balancer", "balancer", "balancer")

	// Others remove what they don't know.
	w.node.run(t, "nft", "delete table ip portal-lb; flush chain ip6 portal-lb arriving")
	w.node.run(t, "ip", "rule", "del", "priority", "101")
	w.node.run(t, "ip", "-6", "route", "flush", "table", "20561")
	w.sync(t, c, capture.State{Ports: ports(true)})
	w.expect(t, "repaired", "balancer", "balancer", "balancer")

	w.sync(t, c, capture.State{})
	w.expect(t, "released", "pod", "nothing", "pod")
	w.sync(t, c, capture.State{Ports: ports(true)})
	w.node.Do(func() {
		if err := capture.Remove(); err != nil {
			t.Fatal(err)
		}
	})
	left := w.node.run(t, "nft", "list", "tables") + w.node.run(t, "ip", "rule") + w.node.run(t, "ip", "-6", "rule") + w.node.run(t, "ip", "route", "show", "table", "all") + w.node.run(t, "ip", "-6", "route", "show", "table", "all")
	if strings.Contains(left, "portal-lb") || strings.Contains(left, "20561") {
		t.Errorf("left behind:\n%s", left)
	}
	w.expect(t, "removed", "pod", "nothing", "pod")
}

// TestFilters: packets from sources that are not allowed are dropped, in front of the balancing process and of the proxy, TCP and UDP.
func TestFilters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := capture.New()
	defer c.Close()
	filters := func(prefixes ...string) (out []capture.Filter) {
		var allowed []netip.Prefix
		for _, p := range prefixes {
			allowed = append(allowed, netip.MustParsePrefix(p))
		}
		for _, vip := range []string{vip4, vip6} {
			out = append(out, capture.Filter{Address: netip.MustParseAddr(vip), Protocol: unix.IPPROTO_TCP, Port: 80, Allowed: allowed})
		}
		return out
	}
	for _, vip := range []string{vip4, vip6} {
		w.node.serve(t, net.JoinHostPort(vip, "80"), "balancer", true)
	}
	w.sync(t, c, capture.State{Ports: ports(false), Filters: filters(allowed, "fd00:113::/64")})
	w.expect(t, "one network, captured", "balancer", "nothing", "balancer")
	w.sync(t, c, capture.State{Ports: ports(false), Filters: filters("10.244.0.0/16", "10.244.1.0/24", "fd00:244::/64")})
	w.expect(t, "another network, captured", "nothing", "balancer", "nothing")
	w.sync(t, c, capture.State{Ports: ports(false), Filters: filters()})
	w.expect(t, "nobody", "nothing", "nothing", "nothing")
	w.sync(t, c, capture.State{Filters: filters(allowed, "fd00:113::2/128")})
	w.expectOne(t, "one network, the proxy's way", w.client, "pod")
	w.sync(t, c, capture.State{Filters: filters("192.0.2.0/24", "fd00:2::/64")})
	w.expectOne(t, "another network, the proxy's way", w.client, "nothing")
}

func (w *world) expectOne(t *testing.T, what string, from *machine, want string) {
	t.Helper()
	for _, vip := range []string{vip4, vip6} {
		if got := from.ask(net.JoinHostPort(vip, "80"), want); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s answers %q, want %q", what, vip, got, want)
		}
	}
}

// TestNodePorts: a network load balancer's rules are there with their comments, and hold; the same state again changes nothing.
func TestNodePorts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := capture.New()
	defer c.Close()
	w.node.serve(t, ":30080", "node", false)
	state := func(clients ...string) capture.State {
		n := capture.NodePorts{Name: "web", Ports: []capture.NodePort{{Protocol: unix.IPPROTO_TCP, Port: 30080}}, HealthPort: 32000, Balancers: []netip.Addr{netip.MustParseAddr("10.244.1.2")}}
		for _, text := range clients {
			n.Clients = append(n.Clients, netip.MustParsePrefix(text))
		}
		return capture.State{NLB: []capture.NodePorts{n}}
	}
	w.sync(t, c, state())
	rules := w.node.run(t, "nft", "list", "table", "ip", "portal-lb")
	for _, want := range []string{
		`ip saddr 10.244.1.2 fib daddr type local tcp dport 32000 counter packets 0 bytes 0 accept comment "kubernetes.io/rule/nlb/health=web"`,
		`fib daddr type local tcp dport 30080 counter packets 0 bytes 0 accept comment "kubernetes.io/rule/nlb/client=web"`,
		`icmp type destination-unreachable icmp code frag-needed counter packets 0 bytes 0 accept comment "kubernetes.io/rule/nlb/mtu=web"`,
	} {
		if !strings.Contains(rules, want) {
			t.Errorf("no rule %s in\n%s", want, rules)
		}
	}
	if got := w.client.ask("198.51.100.1:30080", "node 198.51.100.2"); got != "node 198.51.100.2" {
		t.Errorf("for everybody: %q", got)
	}
	counted := w.node.run(t, "nft", "list", "table", "ip", "portal-lb")
	w.sync(t, c, state())
	if again := w.node.run(t, "nft", "list", "table", "ip", "portal-lb"); again != counted {
		t.Errorf("the same state changed\n%s\nto\n%s", counted, again)
	}
	// A family without a range of its own is closed, as with a cloud's security groups; without any ranges both are open.
	for _, tc := range []struct {
		name      string
		clients   []string
		four, six bool
	}{
		{"no ranges", nil, true, true},
		{"others' ranges", []string{"203.0.113.0/24"}, false, false},
		{"the client's range", []string{"198.51.100.2/32"}, true, false},
		{"everybody of IPv4", []string{"0.0.0.0/0"}, true, false},
		{"everybody of IPv6", []string{"::/0"}, false, true},
		{"everybody of both", []string{"0.0.0.0/0", "::/0"}, true, true},
		{"everybody of IPv6, and others of IPv4", []string{"203.0.113.0/24", "::/0"}, false, true},
	} {
		w.sync(t, c, state(tc.clients...))
		for at, open := range map[string]bool{"198.51.100.1:30080": tc.four, "[fd00:113::1]:30080": tc.six} {
			want := "nothing"
			if open {
				want = "node "
			}
			if got := w.client.ask(at, want); !strings.HasPrefix(got, want) {
				t.Errorf("%s: %s answers %q, want %q", tc.name, at, got, want)
			}
		}
	}
}

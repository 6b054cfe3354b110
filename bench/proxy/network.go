package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/proxy/virtual"
)

// The node is the namespace that this process is in. Behind it, in a namespace of their own, are the Pods: every address
// of their ranges is answered there by one listener for each port, which replies with the address that was dialled.
const (
	nodeAddr  = "10.64.0.1"
	podsAddr  = "10.64.0.2"
	podRange  = "10.128.0.0/9"
	nodeAddr6 = "fd00:64::1"
	podsAddr6 = "fd00:64::2"
	podRange6 = "fd00:80::/32"
	// bulkPort sends as much as the client wants.
	bulkPort = 9080

	// A machine that has the same way to the Pods as the node, and no proxy.
	plainAddr     = "10.65.0.1"
	podsPlainAddr = "10.65.0.2"
)

// podPorts are what a Service's ports lead to.
var podPorts = []int{8080, 8081, 8082, 8083}

type network struct {
	pods, plain netns.NsHandle
	listeners   []net.Listener
}

func buildNetwork() (*network, error) {
	n := &network{}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, err
	}
	if n.pods, err = newNamespace(); err != nil {
		return nil, err
	}
	if err := n.link("pods", "node"); err != nil {
		return nil, err
	}
	if err := errors.Join(address("pods", nodeAddr+"/24"), address("pods", nodeAddr6+"/64")); err != nil {
		return nil, err
	}
	if err := n.inPods(func() error {
		return errors.Join(
			address("lo", ""), address("node", podsAddr+"/24"), address("node", podsAddr6+"/64"),
			ip("route add local "+podRange+" dev lo"), ip("-6 route add local "+podRange6+" dev lo"),
			ip("route add default via "+nodeAddr), ip("-6 route add default via "+nodeAddr6),
			n.listen())
	}); err != nil {
		return nil, err
	}
	if err := n.addPlain(); err != nil {
		return nil, err
	}
	return n, errors.Join(
		ip("route add "+podRange+" via "+podsAddr), ip("-6 route add "+podRange6+" via "+podsAddr6),
		// A packet to a Service needs some route before the rules see it.
		ip("route add default via "+podsAddr), ip("-6 route add default via "+podsAddr6),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644),
		os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0o644))
}

func ip(args string) error {
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %s", args, out)
	}
	return nil
}

func newNamespace() (netns.NsHandle, error) {
	type made struct {
		h   netns.NsHandle
		err error
	}
	done := make(chan made)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		h, err := netns.New()
		done <- made{h, err}
	}()
	m := <-done
	return m.h, m.err
}

// link creates a veth pair between this thread's namespace and the Pods'.
func (n *network) link(name, there string) error {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: there, PeerNamespace: netlink.NsFd(n.pods)}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth: %w", err)
	}
	return nil
}

// addPlain sets up the machine without a proxy.
func (n *network) addPlain() (err error) {
	if n.plain, err = newNamespace(); err != nil {
		return err
	}
	if err := in(n.plain, func() error {
		if err := n.link("pods", "plain"); err != nil {
			return err
		}
		return errors.Join(address("pods", plainAddr+"/24"), ip("route add "+podRange+" via "+podsPlainAddr))
	}); err != nil {
		return err
	}
	return n.inPods(func() error { return address("plain", podsPlainAddr+"/24") })
}

// inPods runs do on a thread in the Pods' namespace.
func (n *network) inPods(do func() error) error { return in(n.pods, do) }

// in runs do on a thread of its own in a namespace.
func in(ns netns.NsHandle, do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- err
			return
		}
		done <- do()
	}()
	return <-done
}

// dialer connects from one network namespace, on a thread of its own. All timed connections are made by dialers, so the cost of
// switching threads is in all of them.
type dialer struct {
	to  chan netip.AddrPort
	got chan timed
}

type timed struct {
	took time.Duration
	err  error
}

func newDialer(ns netns.NsHandle) *dialer {
	a := &dialer{to: make(chan netip.AddrPort), got: make(chan timed)}
	go func() {
		err := in(ns, func() error {
			for to := range a.to {
				_, took, err := fetch(to, 5*time.Second)
				a.got <- timed{took, err}
			}
			return nil
		})
		for range a.to {
			a.got <- timed{err: err}
		}
	}()
	return a
}

func (a *dialer) fetch(to netip.AddrPort) (time.Duration, error) {
	a.to <- to
	got := <-a.got
	return got.took, got.err
}

func (a *dialer) close() { close(a.to) }

func address(link, prefix string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	if prefix != "" {
		a, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		a.Flags |= unix.IFA_F_NODAD // an IPv6 address is there at once, not after a second
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %s: %w", prefix, err)
		}
	}
	return netlink.LinkSetUp(l)
}

// listen starts the listeners of all Pods.
func (n *network) listen() error {
	serving := map[int]func(net.Conn){bulkPort: serveBulk}
	for _, port := range podPorts {
		serving[port] = serveAddress
	}
	for port, serve := range serving {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		n.listeners = append(n.listeners, l)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go serve(c)
			}
		}()
	}
	return nil
}

func serveAddress(c net.Conn) {
	defer c.Close()
	host, _, _ := net.SplitHostPort(c.LocalAddr().String())
	fmt.Fprintln(c, host)
}

// serveBulk sends the number of bytes that a line asks for.
func serveBulk(c net.Conn) {
	defer c.Close()
	var want int64
	if _, err := fmt.Fscanln(bufio.NewReader(c), &want); err != nil {
		return
	}
	block := make([]byte, 256<<10)
	for want > 0 {
		n, err := c.Write(block[:min(int64(len(block)), want)])
		if err != nil {
			return
		}
		want -= int64(n)
	}
}

// fetch connects and returns the address of the Pod that answered, and how long that took.
func fetch(to netip.AddrPort, limit time.Duration) (string, time.Duration, error) {
	return fetchFrom(0, to, limit)
}

// probe connects to a Service that may not be programmed yet. Conntrack remembers such a connection for two minutes and
// would keep a later one from the same port from being translated, so probes come from ports that nothing else here uses.
func probe(to netip.AddrPort, limit time.Duration) error {
	const first, last = 10000, 30000
	_, _, err := fetchFrom(first+int(probes.Add(1))%(last-first), to, limit)
	return err
}

var probes atomic.Int64

func fetchFrom(port int, to netip.AddrPort, limit time.Duration) (string, time.Duration, error) {
	begin := time.Now()
	from := net.Dialer{Timeout: limit, LocalAddr: &net.TCPAddr{Port: port}}
	c, err := from.Dial("tcp", to.String())
	if err != nil {
		return "", 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(begin.Add(limit)); err != nil {
		return "", 0, err
	}
	var buf [64]byte
	k, err := c.Read(buf[:])
	if err != nil {
		return "", 0, err
	}
	return strings.TrimSpace(string(buf[:k])), time.Since(begin), nil
}

// reset removes everything that any proxy has left in this namespace.
func (n *network) reset() error {
	for _, args := range [][]string{
		{"nft", "flush", "ruleset"},
		// Only the tables that are there: listing a table creates it, and the kernel would track all connections from then on.
		{"sh", "-c", "for i in ip ip6; do for t in $(cat /proc/net/${i}_tables_names); do ${i}tables-legacy -t $t -F && ${i}tables-legacy -t $t -X; done; done"},
		{"conntrack", "-F"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %s", strings.Join(args, " "), out)
		}
	}
	return resetIPVS()
}

// resetIPVS does nothing on a kernel without IPVS.
func resetIPVS() error {
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		return nil
	}
	table, err := virtual.Dial()
	if err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	defer table.Close()
	if err := table.Flush(); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	for _, name := range []string{"kube-ipvs0", "portal-ipvs0"} {
		if l, err := netlink.LinkByName(name); err == nil {
			if err := netlink.LinkDel(l); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	if out, err := exec.Command("ipset", "destroy").CombinedOutput(); err != nil {
		return fmt.Errorf("ipset destroy: %s", out)
	}
	return nil
}

func (n *network) close() {
	for _, l := range n.listeners {
		l.Close()
	}
	n.pods.Close()
}

package l2

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// responder is one without sockets, on two links of one segment, that announces addresses.
func responder(addrs ...netip.Addr) *Responder {
	links := []*link{{index: 1, name: "first", mac: own}, {index: 2, name: "second", mac: MAC{2, 0, 0, 0, 1, 1}}}
	r := &Responder{Options: Options{Log: slog.New(slog.DiscardHandler)}, all: links, links: links, announce: map[netip.Addr]*announced{}, wake: make(chan struct{}, 1)}
	for _, a := range addrs {
		r.announce[a] = &announced{links: links}
	}
	return r
}

// TestContested: what another machine announces is contested; what came from another link of this machine is not, chosen or not.
func TestContested(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, c := range []struct {
		what string
		from MAC
		want int
	}{{"this link", own, 0}, {"the other link", MAC{2, 0, 0, 0, 1, 1}, 0}, {"a link that is not chosen", MAC{2, 0, 0, 0, 1, 2}, 0}, {"another machine", other, 3}} {
		var got []netip.Addr
		r := responder(v4, v6)
		r.all = append(r.all, &link{index: 3, name: "third", mac: MAC{2, 0, 0, 0, 1, 2}})
		r.Contested = func(a netip.Addr) bool { got = append(got, a); return false }
		for _, p := range AnnounceARP(v4, c.from) {
			r.handleARP(p.Append(nil), 1, c.from)
		}
		r.handleNDP(AnnounceNDP(v6, c.from, netip.MustParseAddr("fe80::1")).Append(nil), 1, c.from)
		if _, _, contests := r.Counts(); len(got) != c.want || contests != uint64(c.want) {
			t.Errorf("from %s: contested %v, counted %d, want %d", c.what, got, contests, c.want)
		}
	}
}

// TestWithoutIPv6: on a kernel without IPv6 there are no groups to join and leave, and IPv4 addresses come and go as ever.
func TestWithoutIPv6(t *testing.T) {
	r := responder(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))
	r.groups.join(netip.MustParseAddr("2001:db8::1"), r.links, r.Log)
	r.Set([]netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")})
	if got := r.Addresses(); len(got) != 1 || got[0] != netip.MustParseAddr("192.0.2.2") {
		t.Errorf("announcing %v", got)
	}
}

// TestOutdated: links are listed when they changed, once for many changes, seldom without, and never while nothing is announced.
func TestOutdated(t *testing.T) {
	r := responder()
	listed := time.Now()
	expect := func(what string, after time.Duration, want bool) {
		t.Helper()
		if got := r.outdated(listed.Add(after)); got != want {
			t.Errorf("%s: to be listed: %v, want %v", what, got, want)
		}
	}
	r.listed, r.due = listed, listed.Add(relistMax)
	r.changed()
	expect("nothing announced", time.Hour, false)
	r.announce[netip.MustParseAddr("192.0.2.1")] = &announced{}
	expect("changed just after", relistMin-1, false)
	expect("changed", relistMin, true)
	r.due = listed.Add(relistMax)
	expect("unchanged", relistMax-1, false)
	expect("unchanged for long", relistMax, true)
	// A listing that began before a change says nothing of it.
	r.refresh()
	r.changed()
	if r.due != r.listed.Add(relistMin) {
		t.Errorf("a change is looked at after %s", r.due.Sub(r.listed))
	}
}

// signals is a log that says when something was logged.
type signals chan struct{}

func (s signals) Write(b []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(b), nil
}

// TestFollow: an address moves to an interface that comes to be of its network, by notice of the kernel. The responder's threads need a network
// namespace that is the process's: the test runs itself in one.
func TestFollow(t *testing.T) {
	const inside = "PORTAL_TEST_IN_NAMESPACE"
	if os.Getenv(inside) == "" {
		if os.Geteuid() != 0 {
			t.Skip("a network namespace needs root")
		}
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestFollow$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestFollow") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	a := netip.MustParseAddr("192.168.1.200")
	logged := make(signals, 1)
	r, err := New(Options{Log: slog.New(slog.NewTextHandler(logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	r.Set([]netip.Addr{a})
	announcedOn := func(want string) {
		t.Helper()
		for limit := time.After(relistMax / 2); ; {
			r.mu.Lock()
			got := names(r.announce[a].links)
			r.mu.Unlock()
			if got == want {
				return
			}
			select {
			case <-logged:
			case <-limit:
				t.Fatalf("announced on %q, want %q", got, want)
			}
		}
	}
	announcedOn("")
	node := &netlink.Veth{LinkAttrs: named("node"), PeerName: "switch"}
	add(t, node, "192.168.1.10/24")
	announcedOn("node")
	if err := netlink.LinkDel(node); err != nil {
		t.Fatal(err)
	}
	announcedOn("")
}

package engine

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"portal/internal/lb/config"
	"portal/internal/nettest"
)

func TestClientOf(t *testing.T) {
	for from, want := range map[string]string{
		"192.0.2.1":         "192.0.2.1",
		"2001:db8:0:1::1":   "2001:db8:0:1::",
		"2001:db8:0:1:2::3": "2001:db8:0:1::",
		"2001:db8:0:2::1":   "2001:db8:0:2::",
		"fe80::1%eth0":      "fe80::1%eth0",
		"fe80::2":           "fe80::2",
		"fd00:244:1::7":     "fd00:244:1::",
		"::1":               "::",
	} {
		if got := clientOf(netip.MustParseAddr(from)); got != netip.MustParseAddr(want) {
			t.Errorf("%s counts for %s, want %s", from, got, want)
		}
	}
}

// TestLimitOfNetwork: all addresses of one network of 64 bits are one client, who can't take the places of others by changing its address.
func TestLimitOfNetwork(t *testing.T) {
	nettest.InNamespace(t, func() {
		const here = "2001:db8:0:9::1"
		for _, args := range [][]string{
			{"link", "set", "lo", "up"}, {"addr", "add", here + "/128", "dev", "lo", "nodad"}, {"addr", "add", "2001:db8:0:2::1/128", "dev", "lo", "nodad"},
			{"addr", "add", "2001:db8:0:1::1/128", "dev", "lo", "nodad"}, {"addr", "add", "2001:db8:0:1::2/128", "dev", "lo", "nodad"}, {"addr", "add", "2001:db8:0:1::3/128", "dev", "lo", "nodad"},
		} {
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				t.Fatalf("ip %v: %s %v", args, out, err)
			}
		}
		at := netip.AddrPortFrom(netip.MustParseAddr(here), 80)
		for _, a := range []string{here, "2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:1::3", "2001:db8:0:2::1"} {
			eventually(t, "the kernel, which adds routes to new addresses a little later, has that to "+a, func() bool {
				c, err := net.Dial("udp", net.JoinHostPort(a, "80"))
				return err == nil && c.Close() == nil
			})
		}
		e := newEngine(t, Options{Web: func(ctx context.Context, c net.Conn, _ *ConnInfo, ended func()) {
			defer ended()
			_, _ = io.WriteString(c, "x")
			<-ctx.Done()
		}})
		apply(t, e, config.Config{Listeners: []config.Listener{{Name: "l", Address: at, Protocol: config.HTTP, Limits: config.Limits{ClientConnections: 2}}}})
		admitted := func(from string) {
			t.Helper()
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: patience}
			c, err := d.Dial("tcp", at.String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			_ = c.SetDeadline(time.Now().Add(patience))
			want(t, c, "x")
		}
		admitted("2001:db8:0:1::1")
		admitted("2001:db8:0:1::2")
		wantRefused(t, at, "2001:db8:0:1::3")
		admitted("2001:db8:0:2::1")
	})
}

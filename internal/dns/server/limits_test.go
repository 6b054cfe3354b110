package server

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// Clients can't use up the file descriptors.
func TestLimitsFitDescriptors(t *testing.T) {
	o := Options{Listen: []netip.AddrPort{loopback, loopback}}
	o.defaults()
	for files, want := range map[int][2]int{1 << 20: {2000, 2000}, 4000: {1000, 1000}, 256: {64, 64}, 1: {1, 1}} {
		c := o
		c.MaxTCPConns, c.MaxWaiting = 2000, 2000
		if c.fitDescriptors(files); c.MaxTCPConns != want[0] || c.MaxWaiting != want[1] {
			t.Errorf("%d files: %d connections, %d waiting; want %v", files, c.MaxTCPConns, c.MaxWaiting, want)
		}
	}
}

// Beside an API server it takes its share, and no more.
func TestLimitsFitAShare(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	share := max(2, int(min(limit.Cur, 1<<30)/256))
	files := int(min(limit.Cur, 1<<30)) / share // some 256
	o := Options{Listen: []netip.AddrPort{loopback, loopback}, FileShare: share}
	if o.defaults(); len(o.Listen)*o.MaxTCPConns+o.MaxWaiting > files*3/4 || o.MaxTCPConns < 1 || o.MaxWaiting < 1 {
		t.Errorf("%d connections on each of %d addresses and %d queries that wait, of %d files", o.MaxTCPConns, len(o.Listen), o.MaxWaiting, files)
	}
}

// A second server on the same address is refused before it takes queries from the first.
func TestAddressInUse(t *testing.T) {
	s, addr := started(t, small(), Options{})
	other := Options{Listen: s.Addrs(), Zone: zone.Options{Zones: []string{"other.local"}, Pods: zone.PodsInsecure}}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := New(intent.NewCluster(), other); !errors.Is(err, unix.EADDRINUSE) {
					t.Errorf("a second server: %v", err)
				}
			}
		}
	})
	for range 200 {
		if m := ask(t, addr, "udp", "web.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 1 {
			t.Errorf("%v", m)
		}
	}
	close(stop)
	wg.Wait()
}

// Connections above the limit are closed, of every protocol.
func TestConnectionLimit(t *testing.T) {
	config, _ := selfSigned(t)
	s, _ := started(t, small(), Options{TLS: config, ListenTLS: []netip.AddrPort{loopback}, ListenHTTPS: []netip.AddrPort{loopback}, MaxTCPConns: 3})
	for name, addr := range map[string]string{"TCP": s.streams[0].l.Addr().String(), "TLS": s.streams[1].l.Addr().String(), "HTTPS": s.https[0].l.Addr().String()} {
		var conns []net.Conn
		for range 3 {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conns = append(conns, c)
		}
		over, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		over.SetReadDeadline(time.Now().Add(3 * time.Second))
		if _, err := over.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: a connection too many stays open: %v", name, err)
		}
		over.Close()
		conns[0].Close()
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			_, err = c.Read(make([]byte, 1))
			c.Close()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s: no connection after one was closed", name)
			}
		}
	}
}

func TestWaitlist(t *testing.T) {
	w := newWaitlist(4)
	var gone []string
	enter := func(from, name string) *waiter {
		self, _ := w.enter(netip.MustParseAddr(from), func() { gone = append(gone, name) })
		return self
	}
	enter("10.0.0.1", "a1")
	enter("10.0.0.1", "a2")
	b1 := enter("fd00::1", "b1")
	enter("fd00::2", "b2") // of the same client
	enter("10.0.0.1", "a3")
	enter("10.0.0.3", "c1")
	if got := strings.Join(gone, " "); got != "a1 b1" && got != "a1 a2" {
		t.Errorf("evicted: %s", got)
	}
	w.leave(b1)
	w.leave(b1) // or evicted before
	if n := w.total; n < 3 || n > 4 {
		t.Errorf("%d wait", n)
	}
	for range 100 {
		enter("10.0.0.9", "flood")
	}
	if w.total != 4 || len(w.clients) < 2 {
		t.Errorf("a flood displaced the others: %d waiting, %d clients", w.total, len(w.clients))
	}
}

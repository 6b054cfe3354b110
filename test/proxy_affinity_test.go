package test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"portal/internal/intent"
)

// TestAffinity follows 64 clients of a Service that they come back to: each stays with its endpoint while the time-out
// has not passed since its last visit, through restarts and kills of the proxy; when an endpoint goes, its clients move
// and no others; after the time-out the choice is new.
func TestAffinity(t *testing.T) {
	rootOnly(t)
	const timeout = 6 * time.Second
	l := newProxyLab(t, "nftables")
	pods := l.MorePods(t, 8)
	made := l.create(t, labService("sticky", func(s *corev1.ServiceSpec) {
		s.SessionAffinity = corev1.ServiceAffinityClientIP
		s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(timeout / time.Second))}}
	}), labSlice("sticky", intent.IPv4, pods, nil))
	l.start(t)
	l.settled(t, 30*time.Second)

	to := netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), 80)
	clients := l.Clients(t, 64)
	visit := func() map[netip.Addr]netip.AddrPort {
		t.Helper()
		out := map[netip.Addr]netip.AddrPort{}
		for _, c := range clients {
			who, err := l.Outside.Ask(intent.TCP, c, to, vigilPatience)
			if err != nil {
				t.Fatalf("client %s: %v", c, err)
			}
			out[c] = who
		}
		return out
	}
	home := visit()
	last := time.Now()
	stay := func(when string) {
		t.Helper()
		now := visit()
		if time.Since(last) > timeout {
			t.Logf("%s: %s have passed since the last visit, on a machine this slow nothing can be said", when, time.Since(last))
			home = now
		}
		last = time.Now()
		for c, who := range now {
			if who != home[c] {
				t.Errorf("%s: client %s moved from %s to %s", when, c, home[c], who)
			}
		}
	}
	stay("at once")
	for range 3 {
		time.Sleep(timeout * 2 / 5)
		stay("before the time-out")
	}
	l.stop(t)
	stay("without a proxy")
	l.start(t)
	l.settled(t, 30*time.Second)
	stay("after a restart")
	for range 5 {
		l.kill(t)
		l.start(t)
		l.settled(t, 30*time.Second)
		stay("after kill -9")
	}

	gone := netip.AddrPortFrom(pods[3], 8080)
	l.endpoints(t, "sticky", append(append([]netip.Addr{}, pods[:3]...), pods[4:]...)...)
	l.settled(t, soon)
	now, moved := visit(), 0
	for c, who := range now {
		switch {
		case who == gone:
			t.Errorf("client %s went to %s, which is gone", c, who)
		case home[c] == gone:
			moved++
		case who != home[c]:
			t.Errorf("client %s moved from %s to %s, though its endpoint is still there", c, home[c], who)
		}
	}
	home, last = now, time.Now()
	stay("after an endpoint went")
	t.Logf("%d of %d clients moved when their endpoint went", moved, len(clients))
	if moved == 0 {
		t.Errorf("nobody was with %s", gone)
	}

	time.Sleep(timeout + timeout/4)
	again := 0
	for c, who := range visit() {
		if who != home[c] {
			again++
		}
	}
	// Of 64 clients, 9 are expected to choose the same of 7 again.
	if again < len(clients)/2 {
		t.Errorf("after the time-out, only %d of %d clients are somewhere else", again, len(clients))
	}
	t.Logf("after the time-out, %d of %d clients are somewhere else", again, len(clients))
}

// TestUserspaceAffinity: in the userspace mode, whose affinity is in its process, clients stay with their endpoints through a
// restart and through a kill. Endpoints are chosen in turn, so that a proxy that knew nobody would give clients who come in
// another order other ones.
func TestUserspaceAffinity(t *testing.T) {
	rootOnly(t)
	l := newProxyLab(t, "userspace")
	made := l.create(t, labService("sticky", func(s *corev1.ServiceSpec) { s.SessionAffinity = corev1.ServiceAffinityClientIP }),
		labSlice("sticky", intent.IPv4, l.MorePods(t, 8), nil))
	l.start(t)
	l.synced(t)

	to := netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), 80)
	home := map[netip.Addr]netip.AddrPort{}
	visit := func(when string, clients []netip.Addr) {
		t.Helper()
		for _, c := range clients {
			who, err := l.Outside.Ask(intent.TCP, c, to, vigilPatience)
			if err != nil {
				t.Fatalf("%s: client %s: %v", when, c, err)
			}
			if before, known := home[c]; known && who != before {
				t.Errorf("%s: client %s moved from %s to %s", when, c, before, who)
			}
			home[c] = who
		}
	}
	all := l.Clients(t, 48)
	clients, more := all[:24], all[24:]
	visit("at first", clients)
	l.stop(t) // which saves those who have only just come
	l.start(t)
	l.synced(t)
	slices.Reverse(clients)
	visit("after a restart", clients)

	visit("at first", more)
	eventually(t, time.Minute, "all clients are saved", func() string {
		saved := l.run(t, "nft", "list", "map", "ip", "portal-userspace", "affinity")
		for _, c := range more {
			if !strings.Contains(saved, c.String()+" ") {
				return fmt.Sprintf("%s is not in %s", c, saved)
			}
		}
		return ""
	})
	l.kill(t)
	l.start(t)
	l.synced(t)
	slices.Reverse(more)
	visit("after kill -9", slices.Concat(more, clients))
}

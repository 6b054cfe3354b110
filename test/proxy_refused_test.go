package test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"portal/internal/intent"
	"portal/internal/proxy"
)

// own takes the proxy's table of a family away and makes another of its name that only its maker may change. It goes when
// it is released.
func (l *proxyLab) own(t *testing.T, family string) (release func()) {
	t.Helper()
	nft := exec.Command("nft", "-i")
	in, err := nft.StdinPipe()
	if err == nil {
		err = l.Node.Do(nft.Start)
	}
	if err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(func() {
		_ = in.Close()
		_ = nft.Wait()
	})
	t.Cleanup(release)
	// In one transaction: the proxy would have its table back before the other one is there.
	fmt.Fprintf(in, "delete table %s portal; add table %s portal { flags owner; }\n", family, family)
	eventually(t, 5*time.Second, "somebody else owns the table", func() string {
		if text := l.run(t, "nft", "list", "ruleset", family); !strings.Contains(text, "flags owner") {
			return text
		}
		return ""
	})
	return release
}

// TestFaultsRefused lets the kernel refuse whole transactions: somebody else owns a table of our name. What does not
// change is served all the while; the trouble is visible; and when it ends, all is as it should be.
func TestFaultsRefused(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	l := newProxyLab(t, "nftables")
	var targets []target
	for _, w := range l.steady(t) {
		if w.to.Addr().Is4() { // the other family is what they take away
			targets = append(targets, w)
		}
	}
	far := l.FarPods(intent.IPv4)
	made := l.create(t, labService("moves", nil), labSlice("moves", intent.IPv4, far[:1], nil))
	l.start(t)
	l.settled(t, 30*time.Second)
	v := l.vigil(t, targets)

	release := l.own(t, "ip6")
	// A change of both families can't be applied any more.
	l.endpoints(t, "moves", far[1])
	six := labSlice("steady-web", intent.IPv6, l.FarPods(intent.IPv6), nil)
	l.update(t, six)
	var st *proxy.State
	eventually(t, 10*time.Second, "the failure is visible", func() string {
		if st = l.state(); st == nil || st.Failures < 3 || st.LastError == "" {
			return l.proxy.Tail()
		}
		return ""
	})
	if !strings.Contains(st.LastError, "not permitted") {
		t.Errorf("the error says %q", st.LastError)
	}
	if n := l.metric(t, "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"); n == 0 {
		t.Error("the metrics say nothing of it")
	}
	if !strings.Contains(l.proxy.Tail(), "sync failed, retrying") {
		t.Errorf("the log says nothing of it:\n%s", l.proxy.Tail())
	}
	failures := st.Failures
	time.Sleep(4 * time.Second)
	if st = l.state(); st == nil || st.Failures-failures > 10 {
		t.Errorf("more than 10 tries in 4 s are no back-off: %+v", st)
	}
	if *faultAway >= time.Minute { // a change may wait for so long before the node counts as ill
		eventually(t, 90*time.Second, "/healthz sees it", func() string {
			if code, body, _ := l.get("/healthz"); code != 503 {
				return string(body)
			}
			return ""
		})
	}

	release()
	released := time.Now()
	snap, _ := l.settled(t, 60*time.Second)
	t.Logf("right again %s after the refusals had ended", time.Since(released).Round(time.Millisecond))
	v.end(t)
	l.Judge(t, snap)
	to := netip.AddrPortFrom(netip.MustParseAddr(made.Spec.ClusterIP), 80)
	if who, err := l.Client.Ask(intent.TCP, netip.Addr{}, to, vigilPatience); err != nil || who.Addr() != far[1] {
		t.Errorf("%s answers for the one that moved: %v", who, err)
	}
	if code, body, err := l.get("/healthz"); err != nil || code != 200 {
		t.Errorf("in the end, /healthz answers %d %s %v", code, body, err)
	}
}

package test

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	"portal/internal/intent"
	"portal/test/harness"
)

const (
	// soon is how long a change may take to arrive.
	soon = 5 * time.Second
	// afterOutage is how long it may take once the API is back: the longest backoff, and a little.
	afterOutage = 35 * time.Second
)

// TestFaultsAPIAway takes the API server away in every way there is, for long, while Services are in use. They are served
// as last known; what was changed meanwhile arrives as soon as the API is back.
func TestFaultsAPIAway(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	for _, way := range []struct {
		name       string
		away, back func(*testing.T, *proxyLab)
	}{
		{"stopped", signals(syscall.SIGSTOP), signals(syscall.SIGCONT)},
		{"killed", func(_ *testing.T, l *proxyLab) { l.api.Kill() }, restart},
		{"unreachable", func(_ *testing.T, l *proxyLab) { l.relay.Cut() }, func(_ *testing.T, l *proxyLab) { l.relay.Mend() }},
	} {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			l := newProxyLab(t, "nftables")
			targets := l.steady(t)
			l.create(t, labService("old", nil), labSlice("old", intent.IPv4, l.FarPods(intent.IPv4), nil))
			l.create(t, labService("moves", nil), labSlice("moves", intent.IPv4, l.FarPods(intent.IPv4)[:1], nil))
			l.start(t)
			l.settled(t, 30*time.Second)
			v := l.vigil(t, targets)
			way.away(t, l)
			if way.name == "unreachable" {
				l.change(t) // it is there for others
			}
			time.Sleep(*faultAway)
			if st := l.state(); st == nil || st.Services == 0 {
				t.Errorf("while the API is away, the proxy says %+v", st)
			}
			if code, body, err := l.get("/livez"); err != nil || code != 200 {
				t.Errorf("while the API is away, /livez answers %d %s %v", code, body, err)
			}
			way.back(t, l)
			back := time.Now()
			if way.name != "unreachable" {
				l.change(t)
			}
			snap, _ := l.settled(t, afterOutage)
			t.Logf("after %s, changes had arrived %s after the API was back", *faultAway, time.Since(back).Round(time.Millisecond))
			v.end(t)
			l.Judge(t, snap)
		})
	}
}

func signals(s syscall.Signal) func(*testing.T, *proxyLab) {
	return func(t *testing.T, l *proxyLab) {
		if err := syscall.Kill(l.api.Pid(), s); err != nil {
			t.Fatal(err)
		}
	}
}

// restart runs the API server again where it was, with what it had.
func restart(t *testing.T, l *proxyLab) {
	_, port, _ := strings.Cut(strings.TrimPrefix(l.api.URL, "https://"), ":")
	number, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	l.api, err = harness.StartPortalAt(filepath.Dir(l.api.Log), number, l.apiArgs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.api.Kill)
}

// change deletes a Service, creates others and moves one.
func (l *proxyLab) change(t *testing.T) {
	t.Helper()
	far := l.FarPods(intent.IPv4)
	l.endpoints(t, "moves", far[1])
	for i := range 3 {
		name := fmt.Sprintf("new-%d", i)
		l.create(t, labService(name, nil), labSlice(name, intent.IPv4, []netip.Addr{far[i]}, nil))
	}
	for _, name := range []string{"old", "new-0"} {
		if err := l.client.CoreV1().Services(labNamespace).Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// following has a proxy follow an API with Services that stay as they are, which it returns, and such as will change.
func (l *proxyLab) following(t *testing.T) []target {
	t.Helper()
	targets := l.steady(t)
	far := l.FarPods(intent.IPv4)
	l.create(t, labService("old", nil), labSlice("old", intent.IPv4, far, nil))
	l.create(t, labService("moves", nil), labSlice("moves", intent.IPv4, far[:1], nil))
	l.start(t)
	l.settled(t, 30*time.Second)
	return targets
}

// TestFaultsRelist cuts the watch, changes Services until what happened first has been compacted, and restarts the API server, which then
// does not know it any more: it answers 410 Gone, and everything is listed anew. Nobody else notices.
func TestFaultsRelist(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	l := newProxyLab(t, "nftables", "--controllers", "none", "--etcd-compaction-interval", "500ms")
	targets := l.following(t)
	v := l.vigil(t, targets)
	for range 5 { // the watch is cut, and goes on
		l.relay.Cut()
		l.relay.Mend()
		time.Sleep(50 * time.Millisecond)
	}
	l.relay.Cut()
	list, err := l.client.CoreV1().Services("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	seen := list.ResourceVersion
	l.change(t)
	eventually(t, 5*time.Second, "what happened first is compacted", func() string {
		if _, err := l.client.CoreV1().Services("").List(context.Background(), metav1.ListOptions{
			ResourceVersion: seen, ResourceVersionMatch: metav1.ResourceVersionMatchExact,
		}); !apierrors.IsResourceExpired(err) {
			return fmt.Sprint("version ", seen, " can be listed: ", err)
		}
		return ""
	})
	l.api.Kill()
	restart(t, l)
	l.relay.Mend()
	snap, took := l.settled(t, afterOutage)
	t.Logf("relisted after %s", took.Round(time.Millisecond))
	// The proxy had seen no more than this when the watch was cut.
	if !expired(t, l, seen) {
		t.Error("the API server does not say 410 Gone: this tests nothing")
	}
	v.end(t)
	l.Judge(t, snap)
	if st := l.state(); st.FullSyncs != 1 {
		t.Errorf("%d full syncs: a relist should change what differs only", st.FullSyncs)
	}
}

// expired says whether the API server can't go on from a version any more.
func expired(t *testing.T, l *proxyLab, version string) bool {
	t.Helper()
	w, err := l.client.CoreV1().Services("").Watch(context.Background(), metav1.ListOptions{ResourceVersion: version})
	if err != nil {
		return apierrors.IsResourceExpired(err) || apierrors.IsGone(err)
	}
	defer w.Stop()
	event := <-w.ResultChan()
	return event.Type == apiwatch.Error && apierrors.IsResourceExpired(apierrors.FromObject(event.Object))
}

// TestFaultsRestartWhileAway kills and restarts a proxy that can't reach the API: it knows nothing then, and leaves what
// is programmed alone.
func TestFaultsRestartWhileAway(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	l := newProxyLab(t, "nftables")
	targets := l.following(t)
	before := l.tables(t)
	v := l.vigil(t, targets)
	l.relay.Cut()
	for range 3 {
		l.kill(t)
		l.start(t)
		time.Sleep(time.Second)
	}
	eventually(t, 5*time.Second, "the proxy says what it lacks", func() string {
		if st := l.state(); st == nil || st.Complete || st.Mode != "nftables" {
			return fmt.Sprintf("%+v", st)
		}
		return ""
	})
	l.stop(t)
	l.start(t)
	if now := l.tables(t); now != before {
		t.Errorf("the kernel had\n%s\nand has\n%s", before, now)
	}
	l.change(t)
	l.relay.Mend()
	snap, _ := l.settled(t, afterOutage)
	v.end(t)
	l.Judge(t, snap)
}

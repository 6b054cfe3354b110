package nftables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
	"portal/internal/proxy/nf/nftest"
)

// hostNamespace is where the tests were started: nothing may be written there.
var hostNamespace, _ = os.Readlink("/proc/self/ns/net")

// inNamespace moves the test into a network namespace of its own. The thread is never given back.
func inNamespace(t testing.TB) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); errors.Is(err, unix.EPERM) && os.Geteuid() != 0 {
		t.Skip("a network namespace needs root")
	} else if err != nil {
		t.Fatal(err)
	}
}

var facts = &plan.Facts{
	Node: "a", Families: []intent.Family{intent.IPv4, intent.IPv6},
	Pods:      plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}},
	NodePorts: plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr("172.31.0.11")}},
}

// service is a Service with an address of its own and endpoints.
func service(i int, ips ...string) *intent.Entry {
	key := intent.Key{Namespace: "default", Name: fmt.Sprintf("svc-%d", i)}
	e := &intent.Entry{Service: &intent.Service{
		Key: key, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
		Ports: []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}},
	}}
	slice := &intent.Slice{
		Key: key, Service: key.Name, Family: intent.IPv4, Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: 8080}},
	}
	for _, ip := range ips {
		slice.Endpoints = append(slice.Endpoints, intent.Endpoint{Addr: netip.MustParseAddr(ip), Condition: intent.Ready | intent.Serving})
	}
	e.Slices = []*intent.Slice{slice}
	return e
}

// plans puts a Service into a snapshot.
func plans(s *plan.Snapshot, e *intent.Entry) { s.Set(e.Service.Key, plan.For(e, s.Facts)) }

func opened(t testing.TB) *tables {
	t.Helper()
	// A subtest runs on another thread than the test.
	if here, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || here == hostNamespace {
		t.Fatalf("not in a namespace of its own (%v)", err)
	}
	be, err := New(Options{}).Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = be.Close() })
	return be.(*tables)
}

// apply tells the backend what has changed, and acknowledges what wasn't refused.
func apply(be *tables, s *plan.Snapshot) error {
	err := be.Apply(context.Background(), s, s.Delta())
	var r *backend.Refused
	switch {
	case err == nil:
		s.Acknowledge()
	case errors.As(err, &r):
		var keys []plan.FrontendKey
		for k := range r.Frontends {
			keys = append(keys, k)
		}
		s.Acknowledge(keys...)
	}
	return err
}

// The nft tool must be able to list what we write, in text and in JSON: others use it for their own tables.
func TestToolLists(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	e := service(1, "10.244.1.1", "10.244.1.2", "10.244.1.3")
	e.Service.Affinity = 1e9
	e.Service.Type, e.Service.Ports[0].NodePort = intent.LoadBalancer, 30001
	e.Service.Ingress = []intent.Ingress{{Addr: netip.MustParseAddr("203.0.113.1")}}
	e.Service.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	plans(s, e)
	plans(s, service(2))
	plans(s, service(3, "10.244.1.1"))
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"list", "ruleset"}, {"-j", "list", "ruleset"}, {"-a", "list", "ruleset"}} {
		if out, err := exec.Command("nft", args...).CombinedOutput(); err != nil {
			t.Errorf("nft %v: %v\n%s", args, err, out)
		}
	}
}

// Another process that writes everything anew keeps the sets and chains, so that packets on their way through them are not
// lost; what has another form or is not needed goes.
func TestTakesOverInPlace(t *testing.T) {
	inNamespace(t)
	s := plan.NewSnapshot(facts)
	for i := 1; i < 4; i++ {
		e := service(i, "10.244.1.1", "10.244.1.2", "10.244.1.3")
		e.Service.Affinity = time.Duration(i-1) * time.Second
		plans(s, e)
	}
	handles := func() map[string]string {
		out, err := exec.Command("nft", "-a", "list", "table", "ip", tableName).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		found := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^\t(map|set|chain) (\S+) \{ # handle (\d+)$`).FindAllStringSubmatch(string(out), -1) {
			found[m[1]+" "+m[2]] = m[3]
		}
		return found
	}
	if err := apply(opened(t), s); err != nil {
		t.Fatal(err)
	}
	before := handles()
	if len(before) < 15 {
		t.Fatalf("only %v", before)
	}
	for _, strange := range []string{
		"add chain ip portal strange", "add set ip portal stranger { type ipv4_addr; }", "delete chain ip portal nobody",
		"add chain ip portal nobody { type nat hook postrouting priority 77; }",
	} {
		if out, err := exec.Command("nft", strings.Fields(strange)...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %s", strange, out)
		}
	}
	strange := handles()
	be := opened(t)
	s.Forget()
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	verify(t, be, s)
	after := handles()
	if after["chain nobody"] == strange["chain nobody"] {
		t.Error("a chain with another hook was kept")
	}
	delete(before, "chain nobody")
	delete(after, "chain nobody")
	if !maps.Equal(before, after) {
		t.Errorf("sets and chains were made anew or left:\n%v\n%v", before, after)
	}
}

func TestProbeAndCleanupLeaveNothing(t *testing.T) {
	inNamespace(t)
	ctx := context.Background()
	m := New(Options{})
	if err := m.Cleanup(ctx); err != nil {
		t.Errorf("cleaning up where there is nothing: %v", err)
	}
	if err := m.Probe(ctx, facts.Families); err != nil {
		t.Fatal(err)
	}
	be, s := opened(t), plan.NewSnapshot(facts)
	plans(s, service(1, "10.244.1.1"))
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	if err := m.Cleanup(ctx); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("left: %s (%v)", out, err)
	}
}

// Whatever somebody does to our table is seen, at the latest when the next change meets it.
func TestDrift(t *testing.T) {
	inNamespace(t)
	for _, harm := range []string{
		"flush map ip portal services", "flush map ip portal backends", "flush set ip portal cluster-ips",
		"flush chain ip portal prerouting",
		"flush chain ip portal to-2-2m-2m", "delete table ip portal", "flush ruleset", "delete table ip6 portal",
		"insert rule ip portal output accept",
		"delete element ip portal services { 10.96.0.1 . tcp . 80 }", "delete element ip portal cluster-ips { 10.96.0.1 }",
		"add element ip portal cluster-ips { 10.96.0.99 }", "add element ip portal node-ips { 192.0.2.1 }",
	} {
		be, s := opened(t), plan.NewSnapshot(facts)
		plans(s, service(1, "10.244.1.1", "10.244.1.2"))
		if err := apply(be, s); err != nil {
			t.Fatal(err)
		}
		if err := be.Check(context.Background()); err != nil {
			t.Fatalf("before %q: %v", harm, err)
		}
		if out, err := exec.Command("nft", harm).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", harm, err, out)
		}
		if be.Check(context.Background()) == nil {
			t.Errorf("%q went unseen", harm)
		}
		s.Forget()
		if err := apply(be, s); err != nil {
			t.Fatalf("after %q: %v", harm, err)
		}
		verify(t, be, s)
		if err := be.Check(context.Background()); err != nil {
			t.Errorf("after the repair of %q: %v", harm, err)
		}
	}
}

// A change that meets a table other than expected writes everything anew.
func TestChangeAfterDrift(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	plans(s, service(1, "10.244.1.1", "10.244.1.2"))
	plans(s, service(2, "10.244.1.1"))
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("nft", "flush map ip portal backends").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	plans(s, service(1, "10.244.1.1", "10.244.1.3"))
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	verify(t, be, s)
}

// mentions refuses every message that mentions one of some addresses.
func mentions(addrs map[string]bool) func(nf.Message) unix.Errno {
	return func(m nf.Message) unix.Errno {
		for a := range addrs {
			if bytes.Contains(m.Body, netip.MustParseAddr(a).AsSlice()) {
				return unix.ENOSPC
			}
		}
		return 0
	}
}

// What the kernel refuses is named; everything else is applied, whether all at once or as a change.
func TestRefused(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	bad := map[string]bool{"10.244.9.9": true}
	nftest.On(be.socket).Refuse = mentions(bad)
	expect := func(when string, names ...int) {
		t.Helper()
		err := apply(be, s)
		want := map[plan.FrontendKey]bool{}
		for _, i := range names {
			want[s.Services[service(i).Service.Key].Frontends[0].FrontendKey] = true
		}
		got := map[plan.FrontendKey]bool{}
		var refused *backend.Refused
		if errors.As(err, &refused) {
			for k := range refused.Frontends {
				got[k] = true
			}
		} else if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if !maps.Equal(got, want) {
			t.Fatalf("%s: refused %v, expected %v", when, got, want)
		}
		verify(t, be, s, names...)
	}
	for i := range 20 {
		plans(s, service(i, "10.244.1.1", "10.244.1.2"))
	}
	plans(s, service(5, "10.244.9.9"))
	expect("at first", 5)
	plans(s, service(6, "10.244.1.7"))
	expect("with a change beside it", 5)
	plans(s, service(7, "10.244.9.9", "10.244.1.1"))
	plans(s, service(8, "10.244.1.8"))
	if err := apply(be, s); err == nil {
		t.Fatal("nothing was refused")
	}
	plans(s, service(5, "10.244.1.5"))
	plans(s, service(7, "10.244.1.5"))
	expect("when the cause is gone")
	delete(bad, "10.244.9.9")
	plans(s, service(5, "10.244.9.9"))
	expect("when the kernel has changed its mind")
}

// A full sync over tables that are as they should be, as at a restart of the proxy, sends no transaction at all; over others it
// touches only the elements that differ. Before Linux 6.17 a look-up that meets a commit may miss an element that is deleted and
// added again.
func TestFullSyncTouchesOnlyTheDifference(t *testing.T) {
	inNamespace(t)
	s := plan.NewSnapshot(facts)
	for i := range 50 {
		e := service(i, "10.244.1.1", "10.244.1.2", "10.244.1.3")
		e.Service.Affinity = time.Duration(i%2) * time.Second
		if i%5 == 0 {
			e.Service.Type, e.Service.Ports[0].NodePort = intent.LoadBalancer, uint16(30000+i)
			e.Service.Ingress = []intent.Ingress{{Addr: netip.MustParseAddr(fmt.Sprintf("203.0.113.%d", i))}}
			e.Service.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
		}
		plans(s, e)
	}
	if err := apply(opened(t), s); err != nil {
		t.Fatal(err)
	}
	be := opened(t)
	faults := nftest.On(be.socket)
	s.Forget()
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	if faults.Transactions != 0 {
		t.Errorf("a full sync over right tables sent %d bytes", len(faults.Sent))
	}
	if err := be.Check(context.Background()); err != nil {
		t.Error(err)
	}

	// One Service changed while the proxy was away, and somebody added an element.
	plans(s, service(7, "10.244.1.1", "10.244.1.9", "10.244.1.3"))
	if out, err := exec.Command("nft", "add element ip portal cluster-ips { 10.96.9.9 }").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	be = opened(t)
	faults = nftest.On(be.socket)
	s.Forget()
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	verify(t, be, s)
	for m := range nf.Messages(faults.Sent) {
		switch m.Type & 0xff {
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			if m.Type>>8 == unix.NFNL_SUBSYS_NFTABLES && !bytes.Contains(m.Body, []byte{10, 244, 1}) && !bytes.Contains(m.Body, []byte{10, 96}) && len(m.Body) > 200 {
				t.Errorf("elements of something else were touched: %x", m.Body)
			}
		case unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELSET, unix.NFT_MSG_DELTABLE:
			if m.Type>>8 == unix.NFNL_SUBSYS_NFTABLES {
				t.Errorf("message of type %#x", m.Type)
			}
		}
	}
	if len(faults.Sent) > 2000 {
		t.Errorf("one Service and one element are %d bytes", len(faults.Sent))
	}
}

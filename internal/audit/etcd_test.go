package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/component-base/metrics/legacyregistry"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/apiserver/registry/service"
	"portal/internal/store"
)

// world is an etcd with Services in it, written as the API server writes them, and an Auditor.
type world struct {
	t    require
	etcd *clientv3.Client
	*Auditor
}

// require is what of a test both testing and rapid have.
type require interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

func codec(version schema.GroupVersion) runtime.Codec {
	encoder := scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), version)
	return runtime.NewCodec(encoder, scheme.Codecs.UniversalDeserializer())
}

func newWorld(t *testing.T, change ...func(*Options)) *world {
	t.Helper()
	options := store.DefaultOptions()
	options.Dir = t.TempDir()
	opened, err := store.Open(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(opened.Close)
	opts := Options{
		KV: opened.Client(), NodePorts: testNodePorts,
		Core: codec(corev1.SchemeGroupVersion), Networking: codec(networkingv1.SchemeGroupVersion),
	}
	for _, c := range change {
		c(&opts)
	}
	w := &world{t: t, etcd: opened.Client(), Auditor: New(opts)}
	w.reset()
	return w
}

// reset leaves nothing but the cluster's ranges.
func (w *world) reset() {
	_, err := w.etcd.Delete(context.Background(), store.Prefix+"/", clientv3.WithPrefix())
	w.must(err)
	w.put(rangePrefix+"kubernetes", w.encode(&networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{testRanges[0].String(), testRanges[1].String()}},
	}))
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) encode(object runtime.Object) string {
	gvk, _, err := scheme.Scheme.ObjectKinds(object)
	w.must(err)
	data, err := runtime.Encode(codec(gvk[0].GroupVersion()), object)
	w.must(err)
	return string(data)
}

func (w *world) put(key, value string) {
	_, err := w.etcd.Put(context.Background(), key, value)
	w.must(err)
}

func (w *world) remove(key string) {
	_, err := w.etcd.Delete(context.Background(), key)
	w.must(err)
}

func (w *world) get(key string) string {
	resp, err := w.etcd.Get(context.Background(), key)
	w.must(err)
	if len(resp.Kvs) == 0 {
		w.t.Fatalf("there is no %s", key)
	}
	return string(resp.Kvs[0].Value)
}

// store writes Services and their claims.
func (w *world) store(services ...*corev1.Service) {
	claims := service.Claimer(codec(networkingv1.SchemeGroupVersion))
	for _, svc := range services {
		ops := []clientv3.Op{clientv3.OpPut(servicePrefix+svc.Namespace+"/"+svc.Name, w.encode(svc))}
		for _, claim := range claims(svc) {
			value, err := claim.Encode()
			w.must(err)
			ops = append(ops, clientv3.OpPut(store.Prefix+claim.Key, string(value)))
		}
		_, err := w.etcd.Txn(context.Background()).Then(ops...).Commit()
		w.must(err)
	}
}

func (w *world) audit(repair bool) Report {
	w.t.Helper()
	report, err := w.Audit(context.Background(), repair)
	w.must(err)
	return report
}

// claims are whose every address and port is.
func (w *world) claims() map[string]string {
	s, err := w.read(context.Background())
	w.must(err)
	out := map[string]string{}
	for _, c := range s.Claims {
		out[c.Key] = fmt.Sprint(c.Owner, c.Parent, c.Managed, c.Labelled, c.Flaw)
	}
	return out
}

func stored(name string, ports []int32, ips ...string) *corev1.Service {
	namespace, short, _ := strings.Cut(name, "/")
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: short, UID: types.UID("uid-" + name)},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ips[0], ClusterIPs: ips},
	}
	for _, p := range ports {
		svc.Spec.Type = corev1.ServiceTypeNodePort
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Port: 80, NodePort: p})
	}
	return svc
}

func TestReadsEverythingAtOneRevision(t *testing.T) {
	w := newWorld(t)
	const many = pageSize + 3
	for i := range many {
		w.store(stored(fmt.Sprintf("ns/s%04d", i), nil, fmt.Sprintf("10.96.%d.%d", i/200, i%200+1)))
	}
	// A Service is deleted, with its claim, after the first page was read.
	moving := &meddling{KV: w.etcd, after: 1, meddle: func() {
		w.remove(servicePrefix + "ns/s0502")
		w.remove(addressPrefix + "10.96.2.103")
	}}
	w.opts.KV = moving
	report := w.audit(false)
	if report.Services != many || report.Addresses != many || len(report.Findings) > 0 {
		t.Errorf("read %d Services and %d addresses with findings %v, want %d of both and none", report.Services, report.Addresses, lines(report.Findings), many)
	}
	if report := w.audit(false); report.Services != many-1 || report.Addresses != many-1 || len(report.Findings) > 0 {
		t.Errorf("afterwards read %d Services and %d addresses with findings %v, want %d of both and none",
			report.Services, report.Addresses, lines(report.Findings), many-1)
	}
}

// meddling is an etcd in which somebody writes between two requests.
type meddling struct {
	clientv3.KV
	after  int
	meddle func()
}

func (m *meddling) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	resp, err := m.KV.Get(ctx, key, opts...)
	if m.after--; m.after == 0 {
		m.meddle()
	}
	return resp, err
}

// What is stored in the place of an object need not be one.
func TestReadsWhateverIsThere(t *testing.T) {
	w := newWorld(t)
	gateway := service.NewIPAddress(stored("a/b", nil, "10.96.0.9"), addr("10.96.0.9").Addr)
	gateway.Labels = nil
	gateway.Spec.ParentRef = &networkingv1.ParentReference{Group: "gateway.networking.k8s.io", Resource: "gateways", Namespace: "shop", Name: "edge"}
	w.put(addressPrefix+"10.96.0.9", w.encode(gateway))
	w.put(addressPrefix+"10.96.0.8", "\x00\xff garbage")
	w.put(addressPrefix+"10.96.0.7", w.encode(gateway)) // another's name in it
	w.put(addressPrefix+"::ffff:10.96.0.6", w.encode(gateway))
	w.put(addressPrefix+"10.96.0.5", w.encode(stored("a/b", nil, "10.96.0.5")))
	w.put(portPrefix+"30001", `{"namespace":"a"}`)
	w.put(portPrefix+"030002", `{"namespace":"a","name":"b","uid":"c"}`)
	w.put(portPrefix+"70000", `{"namespace":"a","name":"b","uid":"c"}`)
	w.put(servicePrefix+"shop/copy", w.encode(stored("shop/original", nil, "10.96.0.4")))
	w.put(servicePrefix+"shop/odd", w.encode(stored("shop/odd", nil, "10.96.0")))
	w.put(servicePrefix+"shop/none", w.encode(stored("shop/none", nil, "None")))
	w.put(rangePrefix+"more", w.encode(&networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.97.0.0"}}}))
	want := []string{
		"IPAddressUnreadable  /registry/ipaddresses/::ffff:10.96.0.6 by hand",
		"PortClaimUnreadable  /registry/nodeports/030002 repairable",
		"PortClaimUnreadable  /registry/nodeports/70000 repairable",
		"ServiceCIDRUnreadable  /registry/servicecidrs/more by hand",
		"IPAddressUnreadable  10.96.0.5 by hand",
		"IPAddressUnreadable  10.96.0.7 by hand",
		"IPAddressUnreadable  10.96.0.8 by hand",
		"PortClaimUnreadable  port 30001 repairable",
		"ServiceUnreadable shop/copy  by hand",
		"ClusterIPNotValid shop/odd 10.96.0 by hand",
	}
	if got := lines(w.audit(false).Findings); !slices.Equal(got, want) {
		t.Errorf("found\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
	left := slices.DeleteFunc(want, func(line string) bool { return strings.HasSuffix(line, "repairable") })
	if got := lines(w.audit(true).Findings); !slices.Equal(got, left) {
		t.Errorf("after the repair there are\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(left, "\n\t"))
	}
}

func TestRepairKeepsTheObject(t *testing.T) {
	w := newWorld(t)
	web := stored("shop/web", nil, "10.96.0.10")
	w.store(web)
	key := addressPrefix + "10.96.0.10"
	claim, err := decode[*networkingv1.IPAddress](w.opts.Networking, []byte(w.get(key)))
	w.must(err)
	claim.Labels["team"] = "shop"
	claim.Spec.ParentRef.Name = "ghost"
	w.put(key, w.encode(claim))
	if report := w.audit(true); len(report.Findings) > 0 || len(report.Repairs) != 1 || report.Repairs[0].Outcome != Repaired {
		t.Fatalf("not repaired: %+v", report)
	}
	after, err := decode[*networkingv1.IPAddress](w.opts.Networking, []byte(w.get(key)))
	w.must(err)
	if after.UID != claim.UID || !after.CreationTimestamp.Equal(&claim.CreationTimestamp) || after.Labels["team"] != "shop" {
		t.Errorf("the object was made anew: %+v", after.ObjectMeta)
	}
	if after.Spec.ParentRef.Name != "web" || after.Generation != claim.Generation+1 {
		t.Errorf("got parent %v at generation %d", after.Spec.ParentRef, after.Generation)
	}
}

// A write between the audit and its repair makes the repair do nothing.
func TestRepairGivesWay(t *testing.T) {
	web := stored("shop/web", []int32{30010}, "10.96.0.10")
	owner, err := json.Marshal(service.Owner{Namespace: "shop", Name: "web", UID: string(web.UID)})
	if err != nil {
		t.Fatal(err)
	}
	serviceKey := servicePrefix + "shop/web"
	for _, c := range []struct {
		name         string
		spoil, after func(w *world)
	}{
		{"the missing claim was written",
			func(w *world) { w.remove(portPrefix + "30010") },
			func(w *world) { w.put(portPrefix+"30010", string(owner)) }},
		{"the Service without a claim was changed",
			func(w *world) { w.remove(portPrefix + "30010") },
			func(w *world) { w.put(serviceKey, w.encode(stored("shop/web", nil, "10.96.0.10"))) }},
		{"the wrong claim was put right",
			func(w *world) { w.put(portPrefix+"30010", `{"namespace":"shop","name":"ghost","uid":"x"}`) },
			func(w *world) { w.put(portPrefix+"30010", string(owner)) }},
		{"the wrong address was put right",
			func(w *world) {
				w.put(addressPrefix+"10.96.0.10", w.encode(service.NewIPAddress(stored("shop/ghost", nil, ""), addr("10.96.0.10").Addr)))
			},
			func(w *world) {
				w.put(addressPrefix+"10.96.0.10", w.encode(service.NewIPAddress(web, addr("10.96.0.10").Addr)))
			}},
		{"the Service of an orphan was put back",
			func(w *world) { w.remove(serviceKey); w.remove(addressPrefix + "10.96.0.10") },
			func(w *world) { w.store(web) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.store(web)
			c.spoil(w)
			var before map[string]string
			opts := w.opts
			// Four prefixes are read before anything is written.
			opts.KV = &meddling{KV: w.etcd, after: 4, meddle: func() {
				c.after(w)
				before = w.claims()
			}}
			meddled := New(opts)
			report, err := meddled.Audit(t.Context(), true)
			w.must(err)
			if len(report.Repairs) != 1 || report.Repairs[0].Outcome != Changed {
				t.Errorf("repairs: %+v, want one that was given up", report.Repairs)
			}
			if after := w.claims(); !maps.Equal(before, after) {
				t.Errorf("the repair wrote all the same:\n%v\nbecame\n%v", before, after)
			}
		})
	}
}

func TestHandler(t *testing.T) {
	w := newWorld(t)
	w.store(stored("shop/web", []int32{30010}, "10.96.0.10"))
	ask := func(method string) (int, Report, string) {
		answer := httptest.NewRecorder()
		w.Handler().ServeHTTP(answer, httptest.NewRequest(method, Path, nil))
		var report Report
		if err := json.Unmarshal(answer.Body.Bytes(), &report); err != nil {
			t.Fatalf("%s: %v in %s", method, err, answer.Body)
		}
		return answer.Code, report, answer.Body.String()
	}
	code, report, body := ask(http.MethodGet)
	if code != 200 || report.Services != 1 || report.Addresses != 1 || report.Ports != 1 || report.Revision == 0 || !strings.Contains(body, `"findings":[]`) {
		t.Errorf("GET of a clean one: %d %s", code, body)
	}
	w.remove(portPrefix + "30010")
	if code, report, body = ask(http.MethodGet); code != 200 || len(report.Findings) != 1 || !report.Findings[0].Repairable {
		t.Errorf("GET of a broken one: %d %s", code, body)
	}
	if _, report, body = ask(http.MethodGet); len(report.Findings) != 1 {
		t.Errorf("GET repaired it: %s", body)
	}
	if found, _ := metric(t, "portal_audit_findings PortNotAllocated"); found != 1 {
		t.Errorf("portal_audit_findings is %v, want 1", found)
	}
	const repaired = "portal_audit_repairs_total PortNotAllocated repaired"
	before, _ := metric(t, repaired)
	code, report, body = ask(http.MethodPost)
	if code != 200 || len(report.Findings) != 0 || len(report.Repairs) != 1 || report.Repairs[0].Problem != PortNotAllocated || report.Repairs[0].Outcome != Repaired {
		t.Errorf("POST: %d %s", code, body)
	}
	if code, _, body = ask(http.MethodDelete); code != 405 || !strings.Contains(body, `"kind":"Status"`) {
		t.Errorf("DELETE: %d %s", code, body)
	}
	if left, there := metric(t, "portal_audit_findings PortNotAllocated"); left != 0 || !there {
		t.Errorf("portal_audit_findings is %v (there: %v), want 0", left, there)
	}
	if repairs, _ := metric(t, repaired); repairs != before+1 {
		t.Errorf("%s went from %v to %v by one repair", repaired, before, repairs)
	}
	if got, _ := metric(t, "portal_audit_last_run_timestamp_seconds"); time.Since(time.Unix(int64(got), 0)) > time.Minute {
		t.Errorf("the last audit is said to have been at %v", got)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	answer := httptest.NewRecorder()
	w.Handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, Path, nil).WithContext(canceled))
	if answer.Code != 503 {
		t.Errorf("without etcd: %d %s", answer.Code, answer.Body)
	}
}

// metric is the value of a series, written as its name and its labels' values.
func metric(t *testing.T, series string) (value float64, there bool) {
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.Metric {
			name := family.GetName()
			for _, label := range m.Label {
				name += " " + label.GetValue()
			}
			if name == series {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue(), true
			}
		}
	}
	return 0, false
}

// In the background: shortly after the start, then at the interval; Events say what was found and done.
func TestRun(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	client := fake.NewClientset()
	w := newWorld(t, func(o *Options) { o.Clock, o.Client, o.Interval = clock, client, time.Hour })
	w.store(stored("shop/web", nil, "10.96.0.10"))
	w.remove(addressPrefix + "10.96.0.10")
	ghost := service.NewIPAddress(stored("shop/ghost", nil, ""), addr("10.96.9.9").Addr)
	w.put(addressPrefix+"10.96.9.9", w.encode(ghost))

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	event := func(reason, kind, namespace, name string) func() bool {
		return func() bool {
			list, err := client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
			w.must(err)
			return slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
				o := e.InvolvedObject
				return e.Reason == reason && o.Kind == kind && o.Namespace == namespace && o.Name == name && e.Type == corev1.EventTypeWarning
			})
		}
	}
	eventually(t, "waiting for the first audit", clock.HasWaiters)
	if len(w.audit(false).Findings) != 2 {
		t.Fatal("repaired before the server has settled")
	}
	clock.Step(settle)
	eventually(t, "told of the Service", event("ClusterIPNotAllocated", "Service", "shop", "web"))
	eventually(t, "told of the address", event("IPAddressNotAllocated", "IPAddress", "", "10.96.9.9"))
	if found := w.audit(false).Findings; len(found) > 0 {
		t.Errorf("not repaired: %v", lines(found))
	}
	// Again after an interval.
	w.remove(addressPrefix + "10.96.0.10")
	eventually(t, "waiting for the second audit", clock.HasWaiters)
	clock.Step(time.Hour)
	eventually(t, "repaired", func() bool { return len(w.audit(false).Findings) == 0 })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not %s", what)
		}
	}
}

// Two servers in one process must not quarrel over the metrics.
func TestNewTwice(t *testing.T) {
	New(Options{})
	New(Options{})
}

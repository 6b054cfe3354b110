package audit

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
)

// Services stored with their claims are sound; one claim removed, added or rewritten is found, and nothing else; the
// repair brings back what was there.
func TestAnyBreakIsFoundAndRepaired(t *testing.T) {
	w := newWorld(t)
	rapid.Check(t, func(t *rapid.T) {
		w.t = t
		w.reset()
		w.store(anyServices(t)...)
		before := w.claims()
		if report := w.audit(true); len(report.Findings)+len(report.Repairs) > 0 {
			t.Fatalf("sound Services, but found %v", lines(report.Findings))
		}
		want := anyBreak(t, w)
		report := w.audit(false)
		if got := lines(report.Findings); !slices.Equal(got, []string{want}) {
			t.Fatalf("found %q, want %q", got, want)
		}
		report = w.audit(true)
		if len(report.Findings) != 0 || len(report.Repairs) != 1 || report.Repairs[0].Outcome != Repaired {
			t.Fatalf("repairs %+v left %v", report.Repairs, lines(report.Findings))
		}
		if after := w.claims(); !maps.Equal(before, after) {
			t.Fatalf("the repair left\n%v\nwant\n%v", after, before)
		}
	})
}

// anyServices have all types, with addresses and ports of their own.
func anyServices(t *rapid.T) []*corev1.Service {
	// The last ones are left for claims without a Service.
	addresses := rapid.Permutation(sequence(200)).Draw(t, "addresses")
	ports := rapid.Permutation(sequence(200)).Draw(t, "ports")
	nextPort := func() int32 {
		p := 30000 + int32(ports[0])
		ports = ports[1:]
		return p
	}
	var out []*corev1.Service
	for i := range rapid.IntRange(0, 12).Draw(t, "Services") {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: rapid.SampledFrom([]string{"shop", "ops"}).Draw(t, "namespace"), Name: fmt.Sprintf("s%d", i),
			UID: types.UID(fmt.Sprintf("uid-%d", i)),
		}}
		svc.Spec.Type = rapid.SampledFrom([]corev1.ServiceType{
			corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName,
		}).Draw(t, "type")
		switch rapid.SampledFrom([]string{"IPv4", "IPv6", "both", "none"}).Draw(t, "families") {
		case "IPv4":
			svc.Spec.ClusterIPs = []string{fmt.Sprintf("10.96.0.%d", addresses[0])}
		case "IPv6":
			svc.Spec.ClusterIPs = []string{fmt.Sprintf("fd00:96::%x", addresses[0])}
		case "both":
			svc.Spec.ClusterIPs = []string{fmt.Sprintf("fd00:96::%x", addresses[0]), fmt.Sprintf("10.96.0.%d", addresses[0])}
		case "none":
			svc.Spec.ClusterIPs = []string{corev1.ClusterIPNone}
		}
		addresses = addresses[1:]
		svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
		for range rapid.IntRange(0, 4).Draw(t, "ports") {
			p := nextPort()
			svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Protocol: "TCP", NodePort: p}, corev1.ServicePort{Protocol: "UDP", NodePort: p})
		}
		if rapid.Bool().Draw(t, "local") {
			svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			svc.Spec.HealthCheckNodePort = nextPort()
		}
		out = append(out, svc)
	}
	return out
}

func sequence(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i + 1
	}
	return out
}

// anyBreak spoils one claim and says what should be found.
func anyBreak(t *rapid.T, w *world) string {
	s, err := w.read(t.Context())
	w.must(err)
	ghost := service.Owner{Namespace: "shop", Name: "ghost", UID: "uid-ghost"}
	kinds := []string{"orphan address", "orphan port"}
	if len(s.Claims) > 0 {
		kinds = append(kinds, "remove", "garbage", "another owner")
	}
	kind := rapid.SampledFrom(kinds).Draw(t, "break")
	switch kind {
	case "orphan address":
		on := addr("10.96.200.1")
		w.put(keyOf(on), w.encode(addressOf(on, ghost)))
		return "IPAddressNotAllocated shop/ghost 10.96.200.1 repairable"
	case "orphan port":
		w.put(portPrefix+"32000", portOf(w, ghost))
		return "PortClaimOrphaned shop/ghost port 32000 repairable"
	}
	claim := rapid.SampledFrom(s.Claims).Draw(t, "claim")
	word := wordsFor(claim.On)
	finding := func(p Problem) string {
		return fmt.Sprintf("%s %s %s repairable", p, nameOf(claim.Owner), textOf(claim.On))
	}
	switch kind {
	case "remove":
		w.remove(claim.Key)
		return finding(word.missing)
	case "garbage":
		w.put(claim.Key, rapid.SampledFrom([]string{"", "{", "\x00", "k8s\x00garbage"}).Draw(t, "garbage"))
		return finding(word.unreadable)
	}
	other := rapid.SampledFrom([]service.Owner{
		ghost,
		{Namespace: "other", Name: claim.Owner.Name, UID: claim.Owner.UID},
		{Namespace: claim.Owner.Namespace, Name: claim.Owner.Name, UID: "uid-before"},
	}).Draw(t, "owner")
	if claim.isPort() {
		w.put(claim.Key, portOf(w, other))
		return finding(word.wrong)
	}
	object := addressOf(claim.On, other)
	if other.Name == claim.Owner.Name && other.Namespace == claim.Owner.Namespace {
		object.Labels = map[string]string{networkingv1.LabelIPAddressFamily: "IPv5"} // an IPAddress names no UID
	}
	w.put(claim.Key, w.encode(object))
	return finding(word.wrong)
}

func addressOf(on alloc.Claim, owner service.Owner) *networkingv1.IPAddress {
	return service.NewIPAddress(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: owner.Namespace, Name: owner.Name}}, on.Addr)
}

func portOf(w *world, owner service.Owner) string {
	data, err := json.Marshal(owner)
	w.must(err)
	return string(data)
}

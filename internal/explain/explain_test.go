package explain

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/nodereport"
)

// healthy adds Services of all sorts in which nothing is wrong.
func (w *world) healthy(services int) {
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		labels := map[string]string{"app": name, "tier": "web"}
		w.pod("shop", name+"-1", labels)
		w.pod("shop", name+"-2", labels)
		s := w.service("shop", name, map[string]string{"app": name}, 80)
		a, b := &w.Pods[len(w.Pods)-2], &w.Pods[len(w.Pods)-1]
		switch i % 12 {
		case 1:
			s.Spec.Ports[0].TargetPort = intstr.FromString("http")
		case 2: // headless, with the Pods' own port
			s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.Ports[0].Port = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}, 9376
		case 3:
			s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, int32(30000+i)
		case 4:
			s.Spec.Type, s.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}
			s.Spec.LoadBalancerSourceRanges = []string{"198.51.100.0/24"}
		case 5:
			s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "www.example.com"}
			continue
		case 6: // somebody else's endpoints
			s.Spec.Selector = nil
			w.slice(s, "203.0.113.8")
			continue
		case 7: // a Pod that has just come, and is in no slice yet
			b.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-time.Second))
			w.behind(s, a)
			continue
		case 8: // a rollout
			b.Status.Conditions[0].Status = corev1.ConditionFalse
			b.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-10 * time.Second))
			a.DeletionTimestamp = nil
		case 9: // a Job's Pod has the labels too
			b.Status.Phase, b.Status.Conditions[0].Status = corev1.PodSucceeded, corev1.ConditionFalse
			w.behind(s, a)
			continue
		case 10:
			s.Spec.ExternalIPs = []string{fmt.Sprintf("198.51.100.%d", i%250)}
			s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
		case 11: // peers that look for each other before they are ready
			s.Spec.PublishNotReadyAddresses = true
			s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
			for _, p := range []*corev1.Pod{a, b} {
				p.Spec.Containers[0].Ports[0].Protocol = corev1.ProtocolUDP
				w.listening(p, nodereport.Socket{Protocol: "UDP", Address: netip.IPv4Unspecified(), Port: 9376})
			}
		}
		w.behind(s, a, b)
	}
}

// TestHealthy: a cluster of 200 Services in which nothing is wrong yields nothing, asked about all and about each node's address.
func TestHealthy(t *testing.T) {
	w := newWorld(t)
	w.healthy(200)
	entry := w.service("kube-system", "portal-ingress", nil, 80) // that of Ingresses has no endpoints
	entry.Spec.Type, entry.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}}
	v := Look(w.Evidence)
	for _, f := range All(v) {
		if f.Severity > Notice {
			t.Errorf("[%s] %s", f.Code, f.Verdict)
		}
	}
	a, err := Ask(v, Question{})
	if err != nil || !a.Healthy || a.Verdict != "nothing is wrong with 202 Services and 3 nodes" {
		t.Errorf("%+v, %v", a, err)
	}
	for _, q := range []Question{
		{"service", "shop", "s0"}, {"service", "shop", "s2"}, {"service", "shop", "s6"}, {"pod", "shop", "s0-1"}, {"name", "shop", "s0"}, {"name", "default", "s0.shop"},
		{"name", "default", "s0.shop.svc"}, {"name", "default", "S0.shop.svc.cluster.local."}, {"name", "default", "www.example.com"},
		{Kind: "address", Name: "10.96.0.3:80"}, {Kind: "address", Name: "192.0.2.1"}, {Kind: "address", Name: "192.0.2.1:30003"}, {Kind: "address", Name: "10.244.1.2:9376"},
	} {
		if a, err := Ask(v, q); err != nil || !a.Healthy {
			t.Errorf("%v: %s, %v", q, a.Verdict, err)
		}
	}
}

// TestBlind: nothing follows from what may not be read.
func TestBlind(t *testing.T) {
	w := newWorld(t)
	w.healthy(24)
	w.Pods, w.Slices, w.Nodes, w.Leases, w.IPAddresses, w.ServiceCIDRs = nil, nil, nil, nil, nil, nil
	clear(w.Reports)
	for _, r := range []string{"pods", "endpointslices", "nodes", "leases", "ipaddresses", "servicecidrs"} {
		w.Unseen[r] = "forbidden"
	}
	a, err := Ask(Look(w.Evidence), Question{})
	if err != nil || !a.Healthy || len(a.Unseen) != 6 {
		t.Errorf("%+v, %v", a, err)
	}
	var out bytes.Buffer
	if err := Print(&out, a, false); err != nil || !strings.Contains(out.String(), "Could not see:\n  endpointslices: forbidden\n") {
		t.Errorf("printed %q, %v", &out, err)
	}
}

// TestFold: what follows from a cause is folded into it, and only about the same object.
func TestFold(t *testing.T) {
	one, other := Ref{"Service", "a", "one"}, Ref{"Service", "a", "other"}
	out := fold([]Finding{
		{Code: "pods-unready", Object: one, Severity: Broken},
		{Code: "pods-unready", Object: other, Severity: Broken},
		{Code: "node-not-ready", Object: Ref{"Node", "", "n"}, Affects: []Ref{one}, Severity: Degraded},
	})
	if len(out) != 2 || out[0].Object != other || out[1].Code != "node-not-ready" || out[1].Severity != Broken || fmt.Sprint(out[1].Explains) != "[pods-unready]" {
		t.Errorf("%+v", out)
	}
}

func TestNear(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"web", "wbe", true}, {"web", "webb", true}, {"web", "Web", true}, {"web", "api", false}, {"web", "web", false}, {"backend", "bakcned", true}, {"a", "", false},
		{"frontend", "backend", false},
	} {
		if near(c.a, c.b) != c.want {
			t.Errorf("near(%q, %q) is %t", c.a, c.b, !c.want)
		}
	}
}

// TestPrint is what people see.
func TestPrint(t *testing.T) {
	w := newWorld(t)
	w.selecting(map[string]string{"app": "wbe"})
	a, err := Ask(Look(w.Evidence), web)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Print(&out, a, false); err != nil {
		t.Fatal(err)
	}
	want := `Service shop/web selects no Pod: spec.selector asks for app=wbe, and 2 Pods have app=web
  broken, certain [selector-typo]
  where: Service shop/web, spec.selector
  seen:  spec.selector is app=wbe
  seen:  Pod web-1: app=web
  type:  kubectl patch service web --type=merge -p '{"spec":{"selector":{"app":"web"}}}' -n shop
`
	if out.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", &out, want)
	}
}

// TestQuestions: wrong ones are errors that say what would be right.
func TestQuestions(t *testing.T) {
	v := Look(newWorld(t).Evidence)
	for _, q := range []Question{{Kind: "address", Name: "10.96.0.300"}, {Kind: "name", Name: "a..b"}, {Kind: "node", Name: "x"}} {
		if _, err := Ask(v, q); err == nil || !strings.Contains(err.Error(), "must be") {
			t.Errorf("%v: %v", q, err)
		}
	}
}

// BenchmarkAll is what looking at 10,000 Services costs, healthy and with one in ten broken.
func BenchmarkAll(b *testing.B) {
	for name, broken := range map[string]bool{"healthy": false, "broken": true} {
		b.Run(name, func(b *testing.B) {
			w := newWorld(b)
			w.healthy(10_000)
			if broken {
				for i := range w.Services {
					if i%10 == 3 && len(w.Services[i].Spec.Selector) > 0 {
						w.Services[i].Spec.Selector = map[string]string{"app": w.Services[i].Name + "x"}
					}
				}
			}
			for b.Loop() {
				All(Look(w.Evidence))
			}
		})
	}
}

package test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/lab"
	"portal/internal/lb/announce"
	"portal/internal/lb/controller"
	"portal/test/harness"
)

// The addresses that a lab's balancers have: of the network of its nodes, so that the router asks for them by ARP and neighbour discovery.
const (
	lbPool  = "192.168.100.240-192.168.100.242,fd00:100::f0-fd00:100::f2"
	lbLimit = 60 * time.Second
)

// exposed is a Deployment and a Service of type LoadBalancer in front of it.
func exposed(name, spec string, replicas int) string {
	return serviceManifest(name, "LoadBalancer", name, "ipFamilyPolicy: PreferDualStack\n"+spec) + workload{name: name, replicas: replicas, pod: spread(name)}.String()
}

// ingressOf waits until a Service has an address of each family that it should have, and returns them.
func ingressOf(t *testing.T, l *lab.Lab, name string, want int) (out []netip.Addr) {
	t.Helper()
	took := eventually(t, lbLimit, "the address of "+name, func() string {
		out = nil
		for _, in := range serviceOf(t, l, name).Status.LoadBalancer.Ingress {
			if in.IPMode == nil || *in.IPMode != corev1.LoadBalancerIPModeVIP {
				t.Fatalf("ipMode: %v", in.IPMode)
			}
			out = append(out, netip.MustParseAddr(in.IP))
		}
		if len(out) != want {
			return fmt.Sprint(out)
		}
		return ""
	})
	t.Logf("%s had %v after %v", name, out, took.Round(time.Millisecond))
	return out
}

// fromOutside asks a Service at an address, path included, once.
func fromOutside(l *lab.Lab, t *testing.T, a netip.Addr, path string) (string, error) {
	return l.Client.Exec(t.Context(), "curl", "-sS", "--max-time", "2", "http://"+net.JoinHostPort(a.String(), "80")+path)
}

// answers waits until the client outside gets an answer, and returns it.
func answers(t *testing.T, l *lab.Lab, a netip.Addr, path string) (out string) {
	t.Helper()
	eventually(t, lbLimit, "an answer at "+a.String(), func() string {
		var err error
		if out, err = fromOutside(l, t, a, path); err != nil {
			return err.Error()
		}
		return ""
	})
	return strings.TrimSpace(out)
}

// macs are the nodes' link addresses.
func macs(t *testing.T, l *lab.Lab) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, name := range l.NodeNames() {
		out[strings.TrimSpace(on(t, l.Node(name), "cat", "/sys/class/net/eth0/address"))] = name
	}
	return out
}

// neighbour is the node that the router sends packets to an address to, or what it knows instead.
func neighbour(t *testing.T, l *lab.Lab, nodes map[string]string, a netip.Addr) string {
	t.Helper()
	fields := strings.Fields(on(t, l.Router, "ip", "neigh", "show", a.String()))
	if i := slices.Index(fields, "lladdr"); i >= 0 && i+1 < len(fields) {
		return nodes[fields[i+1]]
	}
	return strings.Join(fields, " ")
}

// eventWith waits for an Event of a Service with a reason and a part of its message.
func eventWith(t *testing.T, l *lab.Lab, name, reason, part string) {
	t.Helper()
	eventually(t, lbLimit, "the Event "+reason+" of "+name, func() string {
		list, err := l.API.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.kind=Service,involvedObject.name=" + name})
		if err != nil {
			return err.Error()
		}
		var seen []string
		for _, e := range list.Items {
			if e.Reason == reason && strings.Contains(e.Message, part) {
				return ""
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return strings.Join(seen, "\n")
	})
}

// TestLabLoadBalancer: in a lab of three nodes a Service of type LoadBalancer has an address of each family, by which a client outside reaches it;
// one node answers for it, another one when that is lost; and what is deleted leaves its address to others.
func TestLabLoadBalancer(t *testing.T) {
	l := startLab(t, lab.Options{Nodes: 3, BalancerPools: []string{lbPool}})
	nodes := macs(t, l)
	labKubectl(t, l, exposed("web", "", 3), "apply")
	addrs := ingressOf(t, l, "web", 2)
	eventWith(t, l, "web", controller.Ensuring, "")
	eventWith(t, l, "web", controller.Ensured, addrs[0].String())
	if svc := serviceOf(t, l, "web"); !slices.Contains(svc.Finalizers, controller.Finalizer) {
		t.Errorf("the finalizers are %v", svc.Finalizers)
	}
	deployed(t, l, "web", 2*time.Minute)
	owners := map[netip.Addr]string{}
	for _, a := range addrs {
		if pod := answers(t, l, a, "/"); !strings.HasPrefix(pod, "web-") {
			t.Errorf("%s answers %q", a, pod)
		}
		owners[a] = neighbour(t, l, nodes, a)
		if l.Node(owners[a]) == nil {
			t.Fatalf("no node answers for %s: %q", a, owners[a])
		}
	}
	t.Run("traced", func(t *testing.T) {
		for _, a := range addrs {
			tracedAt(t, l, a, owners[a])
		}
	})
	t.Run("local", func(t *testing.T) { localPolicy(t, l, nodes) })
	t.Run("excluded", func(t *testing.T) { excludedNode(t, l, nodes, addrs[0]) })
	t.Run("dig", func(t *testing.T) { digThroughBalancer(t, l) })
	t.Run("exhausted", func(t *testing.T) { exhausted(t, l) })
	t.Run("type", func(t *testing.T) { typeChange(t, l) })
	t.Run("annotations", func(t *testing.T) { misAnnotated(t, l) })
	t.Run("shared", func(t *testing.T) { sharedAddress(t, l) })
	t.Run("away", func(t *testing.T) { serverAway(t, l, nodes, addrs) })
	t.Run("restarted", func(t *testing.T) { restarted(t, l, nodes, addrs[0]) })
	t.Run("stopped", func(t *testing.T) { cleanStop(t, l, nodes, addrs[0]) })
	t.Run("killed", func(t *testing.T) { killedOwner(t, l, nodes, addrs) })
}

// localPolicy: with externalTrafficPolicy Local only the node with the Pod answers, and the Pod sees the client's address.
func localPolicy(t *testing.T, l *lab.Lab, nodes map[string]string) {
	labKubectl(t, l, exposed("local", "externalTrafficPolicy: Local", 1), "apply")
	addrs := ingressOf(t, l, "local", 2)
	deployed(t, l, "local", 2*time.Minute)
	for i, client := range []string{"203.0.113.10", "fd00:113::a"} {
		if got := answers(t, l, addrs[i], "/client"); got != client {
			t.Errorf("the Pod sees %s, want %s", got, client)
		}
	}
	pod := backendsOf(t, l, "local")[0]
	if got := neighbour(t, l, nodes, addrs[0]); got != pod.Spec.NodeName {
		t.Errorf("%s answers, the Pod is on %s", got, pod.Spec.NodeName)
	}
	// The address follows the Pod.
	other := l.NodeNames()[(slices.Index(l.NodeNames(), pod.Spec.NodeName)+1)%3]
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeName":%q}}}}`, other)
	if _, err := l.API.AppsV1().Deployments("default").Patch(t.Context(), "local", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	deployed(t, l, "local", 2*time.Minute)
	eventually(t, lbLimit, "the address on "+other, func() string {
		if got := neighbour(t, l, nodes, addrs[0]); got != other {
			return got
		}
		return ""
	})
	answers(t, l, addrs[0], "/")
	labKubectl(t, l, "", "delete", "service,deployment", "local", "--timeout=60s")
}

// excludedNode: a node that is labelled gives its address to another one.
func excludedNode(t *testing.T, l *lab.Lab, nodes map[string]string, a netip.Addr) {
	before := neighbour(t, l, nodes, a)
	labKubectl(t, l, "", "label", "node", before, corev1.LabelNodeExcludeBalancers+"=")
	eventually(t, lbLimit, "another owner", func() string {
		if got := neighbour(t, l, nodes, a); got == before || l.Node(got) == nil {
			return got
		}
		return ""
	})
	answers(t, l, a, "/")
	tracedAt(t, l, a, neighbour(t, l, nodes, a))
	// Somebody who believes that it is still there is corrected.
	if out, exit := labTrace(t, l, a, "--via", before); exit != 1 || !strings.Contains(out, "DIFFERENT: node "+before+" saw nothing of the packet") {
		t.Errorf("traced via %s, which does not have %s: exit status %d\n%s", before, a, exit, out)
	}
	labKubectl(t, l, "", "label", "node", before, corev1.LabelNodeExcludeBalancers+"-")
}

// tracedAt: a trace looks at the node that has the address, and sees the packet there.
func tracedAt(t *testing.T, l *lab.Lab, a netip.Addr, owner string) {
	t.Helper()
	eventually(t, lbLimit, "a trace that looks at "+owner, func() string { // endpoints that come meanwhile are a difference
		out, exit := labTrace(t, l, a)
		if exit != 0 || !strings.Contains(out, "conntrack on node "+owner+": to ") || !strings.Contains(out, "did what was worked out") {
			return fmt.Sprintf("%s has %s; the trace's exit status is %d:\n%s", owner, a, exit, out)
		}
		return ""
	})
}

// labTrace sends a packet from outside to port 80 of an address, and returns what the program says.
func labTrace(t *testing.T, l *lab.Lab, a netip.Addr, more ...string) (string, int) {
	t.Helper()
	args := []string{"trace", "--lab", l.Name, "--kubeconfig", l.Kubeconfig, "--live", "--patience", "30s", "--from", "client", "--to", netip.AddrPortFrom(a, 80).String()}
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append(args, more...)...)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return out, exit.ExitCode()
	case err != nil:
		t.Fatal(err)
	}
	return out, 0
}

// exhausted: who finds no address free gets an Event, and then the next one that is freed.
func exhausted(t *testing.T, l *lab.Lab) {
	for _, name := range []string{"more1", "more2", "late"} {
		labKubectl(t, l, "", "create", "service", "loadbalancer", name, "--tcp=80")
		if name != "late" {
			ingressOf(t, l, name, 1)
		}
	}
	eventWith(t, l, "late", controller.Failed, "all addresses of pool default are in use")
	if svc := serviceOf(t, l, "late"); len(svc.Finalizers) > 0 {
		t.Errorf("without an address it has the finalizers %v", svc.Finalizers)
	}
	freed := ingressOf(t, l, "more1", 1)[0]
	labKubectl(t, l, "", "delete", "service", "more1", "--timeout=60s")
	if got := ingressOf(t, l, "late", 1)[0]; got != freed {
		t.Errorf("%s was freed, and %s given", freed, got)
	}
	eventWith(t, l, "more1", controller.Deleted, freed.String())
	if _, err := l.API.CoreV1().Services("default").Get(t.Context(), "more1", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the finalizer was not removed: %v", err)
	}
	labKubectl(t, l, "", "delete", "service", "late", "--timeout=60s")
}

// typeChange: a Service that becomes a ClusterIP loses address and finalizer, and gets them again; another class is left alone.
func typeChange(t *testing.T, l *lab.Lab) {
	labKubectl(t, l, "", "patch", "service", "more2", "-p", `{"spec":{"type":"ClusterIP"}}`)
	eventually(t, lbLimit, "the end of the balancer", func() string {
		svc := serviceOf(t, l, "more2")
		if len(svc.Status.LoadBalancer.Ingress) > 0 || len(svc.Finalizers) > 0 || strings.Contains(claims(t, l), "more2") {
			return fmt.Sprint(svc.Status, svc.Finalizers, claims(t, l))
		}
		return ""
	})
	labKubectl(t, l, "", "patch", "service", "more2", "-p", `{"spec":{"type":"LoadBalancer","loadBalancerClass":"example.com/other"}}`)
	labKubectl(t, l, "", "create", "service", "loadbalancer", "after", "--tcp=80")
	ingressOf(t, l, "after", 1) // so the other one has been looked at
	if svc := serviceOf(t, l, "more2"); len(svc.Status.LoadBalancer.Ingress)+len(svc.Finalizers) > 0 {
		t.Errorf("a Service of another class was given %v", svc.Status)
	}
	labKubectl(t, l, "", "delete", "service", "after", "more2", "--timeout=60s")
}

func claims(t *testing.T, l *lab.Lab) string {
	t.Helper()
	m, err := l.API.CoreV1().ConfigMaps("kube-system").Get(t.Context(), controller.ClaimsName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m.Data[controller.ClaimsKey]
}

// misAnnotated: what can't be done is said, an address that is in no pool is replaced, and a pool of the ConfigMap is found by its name.
func misAnnotated(t *testing.T, l *lab.Lab) {
	labKubectl(t, l, `
apiVersion: v1
kind: ConfigMap
metadata: {name: portal-lb, namespace: kube-system}
data:
  pools: |
    - {name: subnet-xxxxx, addresses: [192.168.100.250], internal: true}
---
apiVersion: v1
kind: Service
metadata:
  name: words
  annotations:
    service.beta.kubernetes.io/aws-load-balancer-backend-protocol: (https|http|ssl|tcp)
    service.beta.kubernetes.io/aws-load-balancer-conection-idle-timeout: "60"
spec: {type: LoadBalancer, loadBalancerIP: 78.11.24.19, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: inside, annotations: {service.kubernetes.io/qcloud-loadbalancer-internal-subnetid: subnet-xxxxx}}
spec: {type: LoadBalancer, ports: [{port: 80}]}
`, "apply")
	ingressOf(t, l, "words", 1)
	eventWith(t, l, "words", controller.AddressIgnored, "spec.loadBalancerIP: 78.11.24.19")
	eventWith(t, l, "words", "InvalidAnnotation", "https, http, ssl or tcp")
	eventWith(t, l, "words", "UnknownAnnotation", "conection-idle-timeout")
	if got := ingressOf(t, l, "inside", 1)[0].String(); got != "192.168.100.250" {
		t.Errorf("inside has %s", got)
	}
	labKubectl(t, l, "", "delete", "service", "words", "inside", "--timeout=60s")
}

// sharedAddress: two Services with one key have one address and their own ports; who is not in the source ranges gets no answer.
func sharedAddress(t *testing.T, l *lab.Lab) {
	for port, ranges := range map[string]string{"8081": "203.0.113.0/24", "8082": "198.51.100.0/24"} {
		labKubectl(t, l, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: shared-%[1]s, annotations: {portal.dev/load-balancer-share: one}}
spec: {type: LoadBalancer, selector: {app: web}, ports: [{port: %[1]s, targetPort: 9376}], loadBalancerSourceRanges: [%[2]s]}
`, port, ranges), "apply")
	}
	a, b := ingressOf(t, l, "shared-8081", 1)[0], ingressOf(t, l, "shared-8082", 1)[0]
	if a != b {
		t.Fatalf("one has %s, the other %s", a, b)
	}
	try := func(port string) error {
		_, err := l.Client.Exec(t.Context(), "curl", "-sS", "--max-time", "2", "http://"+net.JoinHostPort(a.String(), port)+"/")
		return err
	}
	eventually(t, lbLimit, "an answer at the shared address", func() string {
		if err := try("8081"); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := try("8082"); err == nil {
		t.Error("a client that is not in the source ranges gets an answer")
	}
	labKubectl(t, l, "", "patch", "service", "shared-8082", "-p", `{"spec":{"loadBalancerSourceRanges":["203.0.113.0/24"]}}`)
	eventually(t, lbLimit, "an answer at the other port, once it is allowed", func() string {
		if err := try("8082"); err != nil {
			return err.Error()
		}
		return ""
	})
	labKubectl(t, l, "", "delete", "service", "shared-8081", "shared-8082", "--timeout=60s")
}

// serverAway: while the API is away, for longer than any Lease of an owner lasts, addresses go on to be answered for by who did so; when it is back,
// nobody has taken them.
func serverAway(t *testing.T, l *lab.Lab, nodes map[string]string, addrs []netip.Addr) {
	before := map[netip.Addr]string{}
	for _, a := range addrs {
		answers(t, l, a, "/")
		before[a] = neighbour(t, l, nodes, a)
	}
	if err := l.Server.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(3 * announce.DefaultTimes.Lease); time.Now().Before(end); {
		for _, a := range addrs {
			// So that it has to be asked for again.
			on(t, l.Router, "ip", "neigh", "flush", "to", a.String())
			answers(t, l, a, "/")
			if got := neighbour(t, l, nodes, a); got != before[a] {
				t.Fatalf("%s moved from %s to %s while nobody could decide that", a, before[a], got)
			}
		}
	}
	if err := l.Server.Start(); err != nil {
		t.Fatal(err)
	}
	longest := longestPause(t.Context())
	eventually(t, lbLimit, "renewed Leases", func() string {
		for _, node := range before {
			lease, err := l.API.CoordinationV1().Leases("kube-system").Get(t.Context(), announce.LeasePrefix+node, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if age := time.Since(lease.Spec.RenewTime.Time); age > announce.DefaultTimes.Lease {
				return fmt.Sprint(node, " renewed ", age, " ago")
			}
		}
		return ""
	})
	for _, a := range addrs {
		on(t, l.Router, "ip", "neigh", "flush", "to", a.String())
		answers(t, l, a, "/")
		// A machine that does not run for as long as a Lease lasts has lost its addresses.
		if got := neighbour(t, l, nodes, a); got != before[a] && longest() < announce.DefaultTimes.Lease/4 {
			t.Errorf("%s moved from %s to %s when the API came back", a, before[a], got)
		}
	}
}

package service

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

const (
	v4 = corev1.IPv4Protocol
	v6 = corev1.IPv6Protocol
)

// What a new Service asks for, in order, and what it gets on a cluster of the families has.
func TestAllocateCreate(t *testing.T) {
	both := []corev1.IPFamily{v4, v6}
	for _, c := range []struct {
		name   string
		has    []corev1.IPFamily
		given  string
		asked  string
		want   string
		causes string
	}{
		{
			name: "one address of the default family", has: both, given: `{ports: [{port: 80}]}`, asked: "IPv4",
			want: `{clusterIP: 10.96.0.2, clusterIPs: [10.96.0.2], ipFamilies: [IPv4], ipFamilyPolicy: SingleStack}`,
		},
		{
			name: "IPv6 where that is the default", has: []corev1.IPFamily{v6, v4}, given: `{ports: [{port: 80}]}`, asked: "IPv6",
			want: `{clusterIPs: ["fd00:96::1"], ipFamilies: [IPv6]}`,
		},
		{
			name: "one family named", has: both, given: `{ipFamilies: [IPv6]}`, asked: "IPv6",
			want: `{clusterIP: "fd00:96::1", ipFamilies: [IPv6], ipFamilyPolicy: SingleStack}`,
		},
		{
			name: "two preferred, two there", has: both, given: `{ipFamilyPolicy: PreferDualStack}`, asked: "IPv4 IPv6",
			want: `{clusterIPs: [10.96.0.2, "fd00:96::1"], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: PreferDualStack}`,
		},
		{
			name: "two preferred, one there", has: []corev1.IPFamily{v4}, given: `{ipFamilyPolicy: PreferDualStack}`, asked: "IPv4",
			want: `{clusterIPs: [10.96.0.2], ipFamilies: [IPv4], ipFamilyPolicy: PreferDualStack}`,
		},
		{
			name: "two required, one there", has: []corev1.IPFamily{v4}, given: `{ipFamilyPolicy: RequireDualStack}`,
			causes: "spec.ipFamilyPolicy Invalid",
		},
		{
			name: "the order of families is the user's", has: both, given: `{ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv6]}`,
			asked: "IPv6 IPv4", want: `{clusterIPs: ["fd00:96::1", 10.96.0.2], ipFamilies: [IPv6, IPv4]}`,
		},
		{name: "a family that isn't there", has: []corev1.IPFamily{v4}, given: `{ipFamilies: [IPv6]}`, causes: "spec.ipFamilies[0] Invalid"},
		{
			name: "an address whose family isn't there", has: []corev1.IPFamily{v4}, given: `{clusterIP: "fd00:96::9"}`,
			causes: "spec.clusterIPs[0] Invalid",
		},
		{
			name: "two of all under SingleStack", has: both,
			given:  `{ipFamilyPolicy: SingleStack, ipFamilies: [IPv4, IPv6], clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, "fd00:96::9"]}`,
			causes: "spec.ipFamilyPolicy Invalid; spec.ipFamilyPolicy Invalid",
		},
		{
			name: "an address asked for says its family", has: both, given: `{clusterIP: "fd00:96::9"}`, asked: "fd00:96::9",
			want: `{clusterIPs: ["fd00:96::9"], ipFamilies: [IPv6], ipFamilyPolicy: SingleStack}`,
		},
		{
			name: "its spelling stays", has: both, given: `{clusterIP: "FD00:96:0::0009"}`, asked: "FD00:96:0::0009",
			want: `{clusterIPs: ["FD00:96:0::0009"]}`,
		},
		{
			name: "one asked for, one chosen", has: both, given: `{clusterIP: "fd00:96::9", ipFamilyPolicy: PreferDualStack}`,
			asked: "fd00:96::9 IPv4", want: `{clusterIPs: ["fd00:96::9", 10.96.0.2], ipFamilies: [IPv6, IPv4]}`,
		},
		{name: "out of the range", has: both, given: `{clusterIP: 10.97.0.1}`, asked: "10.97.0.1", causes: "spec.clusterIPs Invalid"},
		{name: "taken", has: both, given: `{clusterIP: 10.96.0.1}`, asked: "10.96.0.1", causes: "spec.clusterIPs Invalid"},
		{
			name: "clusterIPs alone is not enough", has: both, given: `{clusterIPs: [10.96.0.9]}`,
			causes: "spec.clusterIPs Invalid",
		},
		{name: "a claim needs an owner", has: both, given: `{metadata: {name: ""}}`, causes: "spec.clusterIPs Invalid"},
		{name: "an owner that a path can name", has: both, given: `{metadata: {name: a/b}}`, causes: "spec.clusterIPs Invalid"},
		{
			name: "headless with a selector", has: both, given: `{clusterIP: None, selector: {a: b}}`,
			want: `{clusterIPs: [None], ipFamilies: [IPv4], ipFamilyPolicy: SingleStack}`,
		},
		{
			name: "headless without one may get endpoints of any family", has: []corev1.IPFamily{v4}, given: `{clusterIP: None}`,
			want: `{clusterIPs: [None], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack}`,
		},
		{
			name: "an external name asks for nothing", has: both,
			given: `{type: ExternalName, externalName: a.b, ports: [{port: 80, nodePort: 30080}]}`,
			want:  `{clusterIP: null, ipFamilies: null, ipFamilyPolicy: null, ports: [{nodePort: 30080, port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{name: "no ranges at all", has: []corev1.IPFamily{}, given: `{ports: [{port: 80}]}`, causes: "spec.clusterIPs Invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := newCluster(v4)
			cl.has = c.has
			choice, svc := cl.choice(), service(t, c.given)
			wantCauses(t, causes(Allocate(svc, nil, choice)), c.causes)
			if got := strings.Join(choice.asked, " "); got != c.asked {
				t.Errorf("asked for %q, want %q", got, c.asked)
			}
			if c.want != "" {
				wantSpec(t, svc, c.want)
			}
		})
	}
}

func TestAllocateNodePorts(t *testing.T) {
	for _, c := range []struct{ name, given, asked, want, causes string }{
		{
			name: "each port gets one", given: `{type: NodePort, ports: [{name: a, port: 80}, {name: b, port: 81}]}`,
			asked: "IPv4 port port", want: "32767 32766",
		},
		{
			name: "protocols share a number", given: `{type: NodePort, ports: [{name: a, port: 53}, {name: b, port: 53, protocol: UDP}]}`,
			asked: "IPv4 port", want: "32767 32767",
		},
		{
			name: "the number that a later one asked for", asked: "IPv4 30053", want: "30053 30053",
			given: `{type: NodePort, ports: [{name: a, port: 53}, {name: b, port: 53, protocol: UDP, nodePort: 30053}]}`,
		},
		{
			name: "protocols with numbers of their own", asked: "IPv4 30053 30054", want: "30053 30054",
			given: `{type: NodePort, ports: [{name: a, port: 53, nodePort: 30053}, {name: b, port: 53, protocol: UDP, nodePort: 30054}]}`,
		},
		{
			name: "what is asked for comes before what is chosen", asked: "IPv4 32767 port", want: "32766 32767",
			given: `{type: NodePort, ports: [{name: a, port: 80}, {name: b, port: 81, nodePort: 32767}]}`,
		},
		{
			name: "one number for two ports", asked: "IPv4 30080", causes: "spec.ports[1].nodePort Invalid",
			given: `{type: NodePort, ports: [{name: a, port: 80, nodePort: 30080}, {name: b, port: 81, protocol: UDP, nodePort: 30080}]}`,
		},
		{
			name: "a load balancer that needs none", given: `{type: LoadBalancer, allocateLoadBalancerNodePorts: false, ports: [{port: 80}]}`,
			asked: "IPv4", want: "0",
		},
		{
			name: "and one that was asked for all the same", asked: "IPv4 30081", want: "0 30081",
			given: `{type: LoadBalancer, allocateLoadBalancerNodePorts: false, ports: [{name: a, port: 80}, {name: b, port: 81, nodePort: 30081}]}`,
		},
		{
			name: "below the range", given: `{type: NodePort, ports: [{port: 80, nodePort: 80}]}`, asked: "IPv4 80",
			causes: "spec.ports[0].nodePort Invalid",
		},
		{
			name: "negative", given: `{type: NodePort, ports: [{port: 80, nodePort: -1}]}`, asked: "IPv4 -1",
			causes: "spec.ports[0].nodePort Invalid",
		},
		{
			name: "a health-check port beside", asked: "IPv4 port port", want: "32767 health 32766",
			given: `{type: LoadBalancer, externalTrafficPolicy: Local, ports: [{port: 80}]}`,
		},
		{
			name: "a health-check port asked for", asked: "IPv4 32767 port", want: "32766 health 32767",
			given: `{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 32767, ports: [{port: 80}]}`,
		},
		{
			name: "a health-check port without node ports", asked: "IPv4 port", want: "0 health 32767",
			given: `{type: LoadBalancer, externalTrafficPolicy: Local, allocateLoadBalancerNodePorts: false, ports: [{port: 80}]}`,
		},
		{
			name: "a health-check port is no node port", asked: "IPv4 30080", causes: "spec.healthCheckNodePort Invalid",
			given: `{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30080, ports: [{port: 80, nodePort: 30080}]}`,
		},
		{
			name: "a health-check port out of range", asked: "IPv4 80", causes: "spec.healthCheckNodePort Invalid",
			given: `{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 80, ports: [{port: 80}]}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			choice, svc := newCluster().choice(), service(t, c.given)
			wantCauses(t, causes(Allocate(svc, nil, choice)), c.causes)
			if got := strings.Join(choice.asked, " "); got != c.asked {
				t.Errorf("asked for %q, want %q", got, c.asked)
			}
			if got := portsOf(svc); c.causes == "" && got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// A range that is used up is reported to the user with the field.
func TestAllocateFull(t *testing.T) {
	for given, want := range map[string]string{
		`{}`: "spec.clusterIPs Invalid",
		`{ipFamilyPolicy: RequireDualStack, clusterIP: 10.96.0.9}`:                 "spec.clusterIPs Invalid",
		`{type: NodePort, clusterIP: 10.96.0.9, ports: [{port: 80}]}`:              "spec.ports[0].nodePort Invalid",
		`{type: LoadBalancer, clusterIP: 10.96.0.9, externalTrafficPolicy: Local}`: "spec.healthCheckNodePort Invalid",
	} {
		c := newCluster()
		c.first, c.last = 30000, 29999
		choice := c.choice()
		choice.full = true
		errs := Allocate(service(t, given), nil, choice)
		wantCauses(t, causes(errs), want)
		if len(errs) > 0 && !strings.Contains(errs[0].Detail, errFull.Error()) {
			t.Errorf("%s: %v doesn't say that the range is full", given, errs)
		}
	}
}

// An update asks for no more than the Service lacks.
func TestAllocateUpdate(t *testing.T) {
	for _, c := range []struct{ name, given, change, asked, want, causes string }{
		{name: "nothing new", given: `{type: NodePort, ports: [{port: 80}]}`, change: `{selector: {a: b}}`},
		{
			name: "a type with node ports", given: `{ports: [{port: 80}]}`, change: `{type: NodePort}`, asked: "port",
			want: `{clusterIP: 10.96.0.2, ports: [{nodePort: 32767, port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{
			name: "a port more", given: `{type: NodePort, ports: [{name: a, port: 80}]}`,
			change: `{ports: [{name: b, port: 81}, {name: a, port: 80}]}`, asked: "port",
			want: `{ports: [{name: b, nodePort: 32766, port: 81, protocol: TCP, targetPort: 81}, {name: a, nodePort: 32767, port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{
			name: "another number, and the old one for another port", given: `{type: NodePort, ports: [{name: a, port: 80, nodePort: 30080}]}`,
			change: `{ports: [{name: a, port: 80, nodePort: 30081}, {name: b, port: 81, nodePort: 30080}]}`, asked: "30081",
		},
		{
			name: "one number for two protocols", given: `{type: NodePort, ports: [{name: a, port: 80}]}`,
			change: `{ports: [{name: a, port: 80, nodePort: 30053}, {name: b, port: 81, protocol: UDP, nodePort: 30053}]}`, asked: "30053",
		},
		{
			name: "a second family", given: `{ports: [{port: 80}]}`, change: `{ipFamilyPolicy: PreferDualStack}`, asked: "IPv6",
			want: `{clusterIPs: [10.96.0.2, "fd00:96::1"], ipFamilies: [IPv4, IPv6]}`,
		},
		{
			name: "a second address asked for", given: `{ports: [{port: 80}]}`,
			change: `{ipFamilyPolicy: RequireDualStack, clusterIPs: [10.96.0.2, "fd00:96::9"]}`, asked: "fd00:96::9",
			want: `{clusterIPs: [10.96.0.2, "fd00:96::9"], ipFamilies: [IPv4, IPv6]}`,
		},
		{
			name: "back to one", given: `{ipFamilyPolicy: RequireDualStack, ports: [{port: 80}]}`, change: `{ipFamilyPolicy: SingleStack}`,
			want: `{clusterIPs: [10.96.0.2], ipFamilies: [IPv4]}`,
		},
		{
			name: "back to one without a word", given: `{ipFamilyPolicy: RequireDualStack, ports: [{port: 80}]}`,
			change: `{clusterIPs: [10.96.0.2], ipFamilies: [IPv4]}`, causes: "spec.ipFamilyPolicy Invalid; spec.ipFamilyPolicy Invalid",
		},
		{
			name: "from a name to an address", given: `{type: ExternalName, externalName: a.b, ports: [{port: 80, nodePort: 30080}]}`,
			change: `{type: NodePort}`, asked: "IPv4 30080", want: `{clusterIPs: [10.96.0.2]}`,
		},
		{
			name: "health checks begin", given: `{type: LoadBalancer, ports: [{port: 80}]}`, change: `{externalTrafficPolicy: Local}`,
			asked: "port", want: `{healthCheckNodePort: 32766}`,
		},
		{
			name: "health checks end, and their port becomes a node port", causes: "spec.ports[0].nodePort Invalid",
			given:  `{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30099, ports: [{port: 80}]}`,
			change: `{externalTrafficPolicy: Cluster, healthCheckNodePort: 0, ports: [{port: 80, nodePort: 30099}]}`,
		},
		{
			name: "a node port becomes the health-check port", causes: "spec.healthCheckNodePort Invalid", asked: "30081",
			given:  `{type: LoadBalancer, ports: [{port: 80, nodePort: 30080}]}`,
			change: `{externalTrafficPolicy: Local, healthCheckNodePort: 30080, ports: [{port: 80, nodePort: 30081}]}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := newCluster()
			cl.created(t, c.given)
			choice, svc := cl.choice(), cl.merged(t, "s", c.change)
			wantCauses(t, causes(Allocate(svc, cl.stored["s"].DeepCopy(), choice)), c.causes)
			if got := strings.Join(choice.asked, " "); got != c.asked {
				t.Errorf("asked for %q, want %q", got, c.asked)
			}
			if c.want != "" {
				wantSpec(t, svc, c.want)
			}
		})
	}
}

// A cluster that gains a family leaves Services alone that only prefer two, until somebody touches their families.
func TestNewFamilyLeavesServicesAlone(t *testing.T) {
	c := newCluster(v4)
	c.created(t, `{ipFamilyPolicy: PreferDualStack, ports: [{port: 80}]}`)
	c.has = []corev1.IPFamily{v4, v6}
	svc, errs := c.update(c.merged(t, "s", `{selector: {a: b}}`))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	wantSpec(t, svc, `{clusterIPs: [10.96.0.2], ipFamilies: [IPv4]}`)
	svc, errs = c.update(c.merged(t, "s", `{ipFamilies: [IPv4, IPv6]}`))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	wantSpec(t, svc, `{clusterIPs: [10.96.0.2, "fd00:96::1"]}`)
}

// What an old Kubernetes stored is completed before it is compared with anything.
func TestOldObjects(t *testing.T) {
	for given, want := range map[string]string{
		`{clusterIP: 10.96.0.9}`:              `{clusterIPs: [10.96.0.9], ipFamilies: [IPv4], ipFamilyPolicy: SingleStack}`,
		`{clusterIP: None, selector: {a: b}}`: `{clusterIPs: [None], ipFamilies: [IPv4], ipFamilyPolicy: SingleStack}`,
		`{clusterIP: None}`:                   `{clusterIPs: [None], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack}`,
		`{type: ExternalName, externalName: a.b, internalTrafficPolicy: Local}`: `{clusterIPs: null, ipFamilies: null, internalTrafficPolicy: null}`,
	} {
		c := newCluster()
		stored := service(t, given)
		stored.ResourceVersion = "1"
		c.stored["s"] = stored
		wantSpec(t, c.read("s"), want)
		if got := Claims(stored).Addresses; len(got) != strings.Count(given, "10.96") {
			t.Errorf("%s holds %v", given, got)
		}
		after := stored.DeepCopy()
		after.Labels = map[string]string{"a": "b"}
		after.Spec.Ports = []corev1.ServicePort{{Port: 80}}
		Default(after)
		if _, errs := c.update(after); len(errs) > 0 {
			t.Errorf("%s can't be updated: %v", given, errs)
		}
	}
}

func TestClaims(t *testing.T) {
	for _, c := range []struct {
		given     string
		addresses string
		ports     []int32
		health    int32
	}{
		{given: `{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, "FD00:96:0::0009"]}`, addresses: "10.96.0.9 fd00:96::9"},
		{given: `{clusterIP: 010.096.0.9, clusterIPs: [010.096.0.9]}`, addresses: "10.96.0.9"},
		{given: `{clusterIP: None, clusterIPs: [None], ports: [{port: 80}]}`},
		{given: `{type: ExternalName, clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9], healthCheckNodePort: 30099, ports: [{port: 80, nodePort: 30080}]}`},
		{given: `{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9], ports: [{port: 80, nodePort: 30080}]}`, addresses: "10.96.0.9"},
		{
			given: `{type: NodePort, externalTrafficPolicy: Local, ports: [{port: 81, nodePort: 30081}, {port: 53, nodePort: 30053}, {port: 53, protocol: UDP, nodePort: 30053}]}`,
			ports: []int32{30053, 30081},
		},
		{given: `{type: LoadBalancer, allocateLoadBalancerNodePorts: false, ports: [{port: 80}]}`},
		{given: `{type: LoadBalancer, allocateLoadBalancerNodePorts: false, ports: [{port: 80, nodePort: 30080}]}`, ports: []int32{30080}},
		{given: `{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30099, ports: [{port: 80}]}`, health: 30099},
		{given: `{type: LoadBalancer, externalTrafficPolicy: Cluster, healthCheckNodePort: 30099, ports: [{port: 80, nodePort: 30080}]}`, ports: []int32{30080}},
	} {
		held := Claims(service(t, c.given))
		var addresses []string
		for _, a := range held.Addresses {
			addresses = append(addresses, a.String())
		}
		if got := strings.Join(addresses, " "); got != c.addresses {
			t.Errorf("%s holds the addresses %q, want %q", c.given, got, c.addresses)
		}
		if !slices.Equal(held.NodePorts, c.ports) || held.HealthPort != c.health {
			t.Errorf("%s holds the ports %v and %d, want %v and %d", c.given, held.NodePorts, held.HealthPort, c.ports, c.health)
		}
	}
}

// portsOf are node ports, and the health-check port where there is one.
func portsOf(svc *corev1.Service) string {
	var out []string
	for _, p := range svc.Spec.Ports {
		out = append(out, fmt.Sprint(p.NodePort))
	}
	if p := svc.Spec.HealthCheckNodePort; p != 0 {
		out = append(out, fmt.Sprint("health ", p))
	}
	return strings.Join(out, " ")
}

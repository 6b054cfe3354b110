package test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/lab"
	"portal/internal/lb"
	"portal/internal/lb/bgp"
	"portal/test/harness"
)

// What the lab's router, which runs BIRD, and the nodes' balancers are in a test of BGP. The addresses are of no network that a machine has: only
// routes lead there.
const (
	bgpPool     = "office=198.51.100.0/29,fd00:200::/125"
	bgpPassword = "correct horse"
	bgpPeers    = `
localAS: 64512
peers:
- {address: 192.168.100.1, as: 64500, passwordKey: router%s}
pools:
- {name: office, communities: ["64512:7", "64512:1:2"]}
`
)

// bird is BIRD on the lab's router.
type bird struct {
	t *testing.T
	l *lab.Lab
	*harness.Bird
}

func startBird(t *testing.T, l *lab.Lab) *bird {
	t.Helper()
	b, err := harness.StartBird(l, t.TempDir(), `bfd on; password "`+bgpPassword+`";`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.Close()
		if t.Failed() {
			t.Logf("bird:\n%s", b.Log())
			for _, name := range l.NodeNames() {
				log, _ := os.ReadFile(l.Log(name))
				t.Logf("%s:\n%s", name, log[max(0, len(log)-4000):])
			}
		}
	})
	return &bird{t, l, b}
}

// ask runs a command of BIRD's.
func (b *bird) ask(command ...string) string {
	out, err := b.Ask(b.t.Context(), command...)
	if err != nil {
		return err.Error()
	}
	return out
}

// up says whether the session with a node is, and since when.
func (b *bird) up(node string) (since string, up bool) {
	for line := range strings.Lines(b.ask("show", "protocols")) {
		if f := strings.Fields(line); len(f) >= 6 && f[0] == node {
			return f[4], f[5] == "Established"
		}
	}
	return "", false
}

// hops are the nodes that the router's kernel sends packets to an address to.
func (b *bird) hops(a netip.Addr) (out []string) {
	b.t.Helper()
	family := "-4"
	if a.Is6() {
		family = "-6"
	}
	fields := strings.Fields(on(b.t, b.l.Router, "ip", family, "route", "show", a.String()))
	for i, f := range fields {
		if f == "via" && i+1 < len(fields) {
			out = append(out, nodeAt(fields[i+1]))
		}
	}
	slices.Sort(out)
	return out
}

// nodeAt is the node of the lab with an address of either family.
func nodeAt(address string) string {
	for i := 1; i <= 3; i++ {
		if address == fmt.Sprint("192.168.100.1", i) || netip.MustParseAddr(address) == netip.AddrFrom16([16]byte{0: 0xfd, 3: 0, 2: 0x01, 15: byte(10 + i)}) {
			return fmt.Sprint("node", i)
		}
	}
	return address
}

// lead waits until packets to all addresses go to these nodes, and says how long it took.
func (b *bird) lead(addrs []netip.Addr, nodes ...string) time.Duration {
	b.t.Helper()
	return eventually(b.t, lbLimit, fmt.Sprint(addrs, " by ", nodes), func() string {
		for _, a := range addrs {
			if got := b.hops(a); !slices.Equal(got, nodes) {
				return fmt.Sprintf("%s by %v\n%s", a, got, b.ask("show", "protocols"))
			}
		}
		return ""
	})
}

// changes are the changes of the router's routes from now on.
func (b *bird) changes() func() string {
	ctx, cancel := context.WithCancel(b.t.Context())
	b.t.Cleanup(cancel)
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "ip", "monitor", "route")
	cmd.Stdout = &out
	var wg sync.WaitGroup
	wg.Go(func() { _ = b.l.Router.Run(cmd) })
	return func() string {
		cancel()
		wg.Wait()
		return out.String()
	}
}

// configure gives the nodes their peers, with more options.
func configure(t *testing.T, l *lab.Lab, key, options string) {
	t.Helper()
	maps := l.API.CoreV1().ConfigMaps(lb.Namespace)
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: lb.PoolsName}, Data: map[string]string{key: fmt.Sprintf(bgpPeers, options)}}
	_, err := maps.Create(t.Context(), m, metav1.CreateOptions{})
	if err != nil {
		_, err = maps.Update(t.Context(), m, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestLabBGP: three nodes announce an address of each family to a router, BIRD, which spreads connections over them. Who must not serve an address is no
// next hop; a killed process stays one until it is back, a stopped one and a lost node don't.
func TestLabBGP(t *testing.T) {
	t.Parallel()
	l := startLab(t, lab.Options{Nodes: 3, BalancerPools: []string{bgpPool}, NodeArgs: []string{"--load-balancer-announce", "bgp"}})
	b := startBird(t, l)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: lb.PasswordsName}, StringData: map[string]string{"router": bgpPassword}}
	if _, err := l.API.CoreV1().Secrets(lb.Namespace).Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	configure(t, l, lb.PeersKey, "")
	labKubectl(t, l, exposed("web", "", 3), "apply")
	addrs := ingressOf(t, l, "web", 2)
	deployed(t, l, "web", 2*time.Minute)
	all := l.NodeNames()
	b.lead(addrs, all...)
	if text := b.ask("show", "route", "all", "for", addrs[0].String()); strings.Count(text, "(64512,7)") != 3 || strings.Count(text, "(64512, 1, 2)") != 3 {
		t.Errorf("communities are missing:\n%s", text)
	}
	t.Run("spread", func(t *testing.T) { spreadOver(t, l, addrs, all) })
	t.Run("local", func(t *testing.T) { bgpLocal(t, l, b) })
	t.Run("affinity", func(t *testing.T) { bgpAffinity(t, l, b, addrs) })
	t.Run("excluded", func(t *testing.T) {
		labKubectl(t, l, "", "label", "node", "node2", corev1.LabelNodeExcludeBalancers+"=")
		b.lead(addrs, "node1", "node3")
		labKubectl(t, l, "", "label", "node", "node2", corev1.LabelNodeExcludeBalancers+"-")
		b.lead(addrs, all...)
	})
	t.Run("kept", func(t *testing.T) { bgpKept(t, l, b, addrs) })
	t.Run("stopped", func(t *testing.T) {
		if err := syscall.Kill(program(t, "node1", l.Dir), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		t.Logf("node1 was stopped, and no next hop any more after %v", b.lead(addrs, "node2", "node3"))
		b.lead(addrs, all...)
	})
	t.Run("lost", func(t *testing.T) { bgpLost(t, l, b, addrs) })
	labKubectl(t, l, "", "delete", "service", "web", "--timeout=60s")
	b.lead(addrs)
}

// spread: connections of one client come in by every node.
func spreadOver(t *testing.T, l *lab.Lab, addrs []netip.Addr, nodes []string) {
	for _, a := range addrs {
		seen := map[string]int{}
		eventually(t, lbLimit, "connections by every node", func() string {
			// A Pod sees the node that the connection came in by.
			client, err := fromOutside(l, t, a, "/client")
			if err != nil {
				return err.Error()
			}
			seen[nodeAt(strings.TrimSpace(client))]++
			for _, n := range nodes {
				if seen[n] == 0 {
					return fmt.Sprint(seen)
				}
			}
			return ""
		})
		t.Logf("%s: %v", a, seen)
	}
}

// bgpLocal: with externalTrafficPolicy Local only the nodes with a ready endpoint are next hops, and the Pod sees the client.
func bgpLocal(t *testing.T, l *lab.Lab, b *bird) {
	labKubectl(t, l, exposed("local", "externalTrafficPolicy: Local", 1), "apply")
	addrs := ingressOf(t, l, "local", 2)
	deployed(t, l, "local", 2*time.Minute)
	at := backendsOf(t, l, "local")[0].Spec.NodeName
	b.lead(addrs, at)
	for i, client := range []string{"203.0.113.10", "fd00:113::a"} {
		if got := answers(t, l, addrs[i], "/client"); got != client {
			t.Errorf("the Pod sees %s, want %s", got, client)
		}
	}
	other := l.NodeNames()[(slices.Index(l.NodeNames(), at)+1)%3]
	patch := fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeName":%q}}}}`, other)
	if _, err := l.API.AppsV1().Deployments("default").Patch(t.Context(), "local", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.lead(addrs, other)
	labKubectl(t, l, "", "delete", "service,deployment", "local", "--timeout=60s")
	b.lead(addrs)
}

// bgpAffinity: with sessionAffinity ClientIP one node gets all connections, another one when that is lost; a client stays with its Pod, although the
// router chooses by ports. Without it they are spread again. Also where each node has but its own Pods.
func bgpAffinity(t *testing.T, l *lab.Lab, b *bird, addrs []netip.Addr) {
	set := func(affinity, policy string) {
		labKubectl(t, l, "", "patch", "service", "web", "-p", fmt.Sprintf(`{"spec":{"sessionAffinity":%q,"externalTrafficPolicy":%q}}`, affinity, policy))
	}
	// answering waits until a row of requests is answered by one Pod, or by several.
	answering := func(a netip.Addr, several bool) {
		eventually(t, lbLimit, fmt.Sprint("answers at ", a, " by several Pods: ", several), func() string {
			seen := map[string]bool{}
			for range 15 {
				pod, err := fromOutside(l, t, a, "/")
				if err != nil {
					return err.Error()
				}
				seen[pod] = true
			}
			if several != (len(seen) > 1) {
				return fmt.Sprint(seen)
			}
			return ""
		})
	}
	for _, policy := range []string{"Cluster", "Local"} {
		set("ClientIP", policy)
		for _, a := range addrs {
			nodes := l.NodeNames()
			slices.SortFunc(nodes, func(x, y string) int { return cmp.Compare(bgp.Metric(a, x), bgp.Metric(a, y)) })
			b.lead([]netip.Addr{a}, nodes[0])
			answering(a, false)
			labKubectl(t, l, "", "label", "node", nodes[0], corev1.LabelNodeExcludeBalancers+"=")
			b.lead([]netip.Addr{a}, nodes[1])
			labKubectl(t, l, "", "label", "node", nodes[0], corev1.LabelNodeExcludeBalancers+"-")
			b.lead([]netip.Addr{a}, nodes[0])
		}
		set("None", policy)
		b.lead(addrs, l.NodeNames()...)
		answering(addrs[0], true)
	}
	set("None", "Cluster")
}

// bgpKept: a ConfigMap that can't be used, an API that is away, and a process that is killed and started again change no route.
func bgpKept(t *testing.T, l *lab.Lab, b *bird, addrs []netip.Addr) {
	changes := b.changes()
	configure(t, l, "bpg", "")
	eventually(t, lbLimit, "the error", func() string {
		log, err := os.ReadFile(l.Log("node1"))
		if err != nil || !strings.Contains(string(log), "BGP peers not changed") || !strings.Contains(string(log), "bpg") {
			return fmt.Sprint(err, " not logged")
		}
		return ""
	})
	configure(t, l, lb.PeersKey, "")
	if err := l.Server.Kill(); err != nil {
		t.Fatal(err)
	}
	for begin := time.Now(); time.Since(begin) < 4*time.Second; {
		b.lead(addrs, l.NodeNames()...)
	}
	if err := l.Server.Start(); err != nil {
		t.Fatal(err)
	}
	before, _ := b.up("node1")
	if err := syscall.Kill(program(t, "node1", l.Dir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	took := eventually(t, lbLimit, "another session", func() string {
		if since, up := b.up("node1"); !up || since == before {
			return since
		}
		return ""
	})
	t.Logf("node1 was killed, and had a session again after %v", took)
	eventually(t, lbLimit, "the end of the restart", func() string {
		if text := b.ask("show", "protocols", "all", "node1"); !strings.Contains(text, "Routes:         2 imported") && strings.Count(text, "1 imported") != 2 {
			return text
		}
		return ""
	})
	b.lead(addrs, l.NodeNames()...)
	if text := changes(); strings.Contains(text, addrs[0].String()) || strings.Contains(text, addrs[1].String()) {
		t.Errorf("routes changed:\n%s", text)
	}
}

// bgpLost: a node whose cable is pulled is no next hop any more when the hold time ends, or, with BFD, much sooner.
func bgpLost(t *testing.T, l *lab.Lab, b *bird, addrs []netip.Addr) {
	lose := func(how string) {
		if err := l.Cut("node3"); err != nil {
			t.Fatal(err)
		}
		t.Logf("node3 was lost, and no next hop any more after %v by %s", b.lead(addrs, "node1", "node2"), how)
	}
	configure(t, l, lb.PeersKey, ", holdTime: 3s")
	eventually(t, lbLimit, "sessions with another hold time", func() string {
		for _, n := range l.NodeNames() {
			if text := b.ask("show", "protocols", "all", n); !regexp.MustCompile(`Hold timer: +[0-9.]+/3\n`).MatchString(text) {
				return text
			}
		}
		return ""
	})
	b.lead(addrs, l.NodeNames()...)
	lose("the hold time")
	// Now it would last longer than the test waits.
	configure(t, l, lb.PeersKey, ", holdTime: 300s, bfd: {interval: 200ms}")
	if err := l.Heal("node3"); err != nil {
		t.Fatal(err)
	}
	b.lead(addrs, l.NodeNames()...)
	eventually(t, lbLimit, "three sessions of BFD", func() string {
		if text := b.ask("show", "bfd", "sessions"); strings.Count(text, " Up ") != 3 {
			return text
		}
		return ""
	})
	lose("BFD")
	if err := l.Heal("node3"); err != nil {
		t.Fatal(err)
	}
	b.lead(addrs, l.NodeNames()...)
}

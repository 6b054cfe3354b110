//go:build lbnodes

package test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
	"portal/internal/lb/announce"
	"portal/test/harness"
)

var (
	lbRate   = flag.Int("lb.rate", 60, "requests a second in all that TestLabBalancerNodes sends")
	lbRounds = flag.Int("lb.rounds", 1, "how often TestLabBalancerNodes restarts every node's agent")
	lbModes  = flag.String("lb.modes", "nftables", "the proxy modes that TestLabBalancerNodes runs in")
)

// TestLabBalancerNodes: clients outside use balancers of all kinds, over new connections and over ones that stay. While the agents of all nodes, with
// their proxies and balancers, are restarted one after the other, not one request fails, and no connection breaks. When the machine that owns
// an address loses its power, a new connection is answered after seconds, and only connections through that machine break.
func TestLabBalancerNodes(t *testing.T) {
	for _, mode := range strings.Split(*lbModes, ",") {
		t.Run(mode, func(t *testing.T) {
			l := startLab(t, lab.Options{Nodes: 3, ProxyMode: mode, BalancerPools: []string{nodesPool}})
			balancerNodes(t, l, func(node string) { restartAgent(t, l, node, func() {}) })
		})
	}
	t.Run("apart", func(t *testing.T) {
		l := startLab(t, lab.Options{Nodes: 3, NodeArgs: []string{"--proxy-mode", "none"}})
		parts := startParts(t, l)
		balancerNodes(t, l, func(node string) { parts.restart(t, node) })
	})
}

const nodesPool = "192.168.100.240-192.168.100.249"

// ownParts are `portal proxy` and `portal lb` as processes of their own on every node, as beside a kubelet.
type ownParts struct {
	l       *lab.Lab
	dir     string
	running map[string]*part // by node and program
}

type part struct {
	stop context.CancelFunc
	done chan struct{}
}

func startParts(t *testing.T, l *lab.Lab) *ownParts {
	t.Helper()
	p := &ownParts{l: l, dir: t.TempDir(), running: map[string]*part{}}
	t.Cleanup(func() {
		for name, one := range p.running {
			one.stop()
			<-one.done
			if log, err := os.ReadFile(filepath.Join(p.dir, strings.ReplaceAll(name, " ", "-"))); err == nil && t.Failed() {
				t.Logf("%s:\n%s", name, log[max(0, len(log)-4000):])
			}
		}
	})
	for _, node := range l.NodeNames() {
		p.start(t, node, "proxy")
		p.start(t, node, "lb")
	}
	return p
}

func (p *ownParts) start(t *testing.T, node, program string) {
	t.Helper()
	args := []string{program, "--kubeconfig", filepath.Join(lab.NodeDir(p.l.Dir, "server"), "admin.kubeconfig"), "--hostname-override", node, "--metrics-bind-address", "127.0.0.1:0"}
	if program == "lb" {
		args = append(args, "--pool", nodesPool, "--run-dir", filepath.Join(p.dir, node))
	}
	log, err := os.OpenFile(filepath.Join(p.dir, node+"-"+program), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, harness.Portal(), args...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = log, log, time.Minute
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	one := &part{stop, make(chan struct{})}
	p.running[node+" "+program] = one
	go func() {
		defer close(one.done)
		defer log.Close()
		err := p.l.Node(node).Run(cmd)
		if ctx.Err() == nil {
			fmt.Fprintln(log, "it ended: ", err)
		}
	}()
}

// restart stops a node's programs, one after the other, and starts them again when they have ended.
func (p *ownParts) restart(t *testing.T, node string) {
	t.Helper()
	before := *memberOf(t, p.l, node).Spec.HolderIdentity
	for _, program := range []string{"proxy", "lb"} {
		one := p.running[node+" "+program]
		one.stop()
		<-one.done
		p.start(t, node, program)
	}
	awaitMember(t, p.l, node, before, func() {})
}

// waysOf makes a Service of each kind, whose Pods come later: one whose packets are passed on, and others whose connections end at the balancer.
func waysOf(t *testing.T, l *lab.Lab) (out []reached) {
	t.Helper()
	(&edge{Lab: l}).certificate(t, "own", "web.example")
	secure := "ports: [{port: 443, targetPort: 9376}]"
	labKubectl(t, l, serviceManifest("packets", "LoadBalancer", "web", "")+
		serviceManifest("bytes", "LoadBalancer", "web", "", "portal.dev/load-balancing-policy: least-connections")+
		serviceManifest("requests", "LoadBalancer", "web", "", aws("backend-protocol", "http"))+
		serviceManifest("secure", "LoadBalancer", "web", secure, aws("backend-protocol", "http"), aws("ssl-cert", "own")), "apply")
	for _, name := range []string{"packets", "bytes", "requests", "secure"} {
		port := "80"
		if name == "secure" {
			port = "443"
		}
		out = append(out, reached{name, net.JoinHostPort(ingressOf(t, l, name, 1)[0].String(), port), name == "secure"})
	}
	return out
}

// ownersOf waits until each Service's address has an owner, and returns them by Service.
func ownersOf(t *testing.T, l *lab.Lab, services []reached) (out map[string]string) {
	t.Helper()
	eventually(t, lbLimit, "owners of all addresses", func() string {
		out = map[string]string{}
		list, err := l.API.CoordinationV1().Leases("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: announce.MemberLabel + "=true"})
		if err != nil || len(list.Items) < len(l.NodeNames()) {
			return fmt.Sprint(len(list.Items), " members: ", err)
		}
		for _, lease := range list.Items {
			node, held := strings.TrimPrefix(lease.Name, announce.LeasePrefix), strings.Split(lease.Annotations["portal.dev/lb-addresses"], ",")
			for _, s := range services {
				if slices.Contains(held, netip.MustParseAddrPort(s.address).Addr().String()) {
					if out[s.name] != "" {
						return s.name + " has two owners"
					}
					out[s.name] = node
				}
			}
		}
		if len(out) < len(services) {
			return fmt.Sprint(out)
		}
		return ""
	})
	return out
}

func balancerNodes(t *testing.T, l *lab.Lab, restart func(node string)) {
	logOnFailure(t, l)
	services := waysOf(t, l)
	owners := ownersOf(t, l, services)
	t.Logf("the owners are %v", owners)
	lost := owners["packets"]
	left := slices.DeleteFunc(l.NodeNames(), func(n string) bool { return n == lost })
	// All Pods are on machines that keep their power: so what breaks breaks for the balancer.
	pods := "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [" +
		strings.Join(left, ", ") + "]}]}]}}}\n" + spread("web")
	labKubectl(t, l, workload{name: "web", replicas: 4, pod: pods}.String(), "apply")
	deployed(t, l, "web", 2*time.Minute)
	for _, s := range services {
		awaitService(t, l, s)
	}
	// Half of the requests are on connections that stay, which send ten a second.
	kept, fresh := max(2, *lbRate/2/10/len(services)), max(2, *lbRate/2/len(services))
	t.Run("restarts", func(t *testing.T) {
		x := trafficOf(t, l, services, fresh, kept)
		for round := range *lbRounds {
			for _, node := range l.NodeNames() {
				restart(node)
				t.Logf("round %d: %s was restarted, and is back after %s", round+1, node, x.since().Round(time.Millisecond))
			}
		}
		x.report(t, nil)
		if after := ownersOf(t, l, services); !maps.Equal(after, owners) {
			t.Errorf("the owners were %v, and are %v", owners, after)
		}
	})
	t.Run("loss", func(t *testing.T) { lostOwner(t, l, services, owners, lost, fresh, kept) })
}

// logOnFailure shows what the nodes logged if the test fails.
func logOnFailure(t *testing.T, l *lab.Lab) {
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, name := range l.NodeNames() {
			log, _ := os.ReadFile(l.Log(name))
			t.Logf("%s:\n%s", name, log[max(0, len(log)-5000):])
		}
	})
}

// tryService asks a Service from outside once, over a new connection.
func tryService(l *lab.Lab, s reached, limit time.Duration) error {
	return l.Client.Do(func() error {
		_, err := s.ask(time.Now().Add(limit))
		return err
	})
}

func awaitService(t *testing.T, l *lab.Lab, s reached) {
	t.Helper()
	eventually(t, lbLimit, "an answer of "+s.name, func() string {
		if err := tryService(l, s, 5*time.Second); err != nil {
			return err.Error()
		}
		return ""
	})
}

// lostOwner: the machine that owns addresses loses its power.
func lostOwner(t *testing.T, l *lab.Lab, services []reached, owners map[string]string, lost string, fresh, kept int) {
	var stay, move []reached
	for _, s := range services {
		if owners[s.name] == lost {
			move = append(move, s)
		} else {
			stay = append(stay, s)
		}
	}
	if len(stay) == 0 {
		t.Fatalf("%s owns all addresses: %v", lost, owners)
	}
	x := trafficOf(t, l, stay, fresh, kept)
	doomed := trafficOf(t, l, move, fresh, kept)
	eventually(t, lbLimit, "answers over all connections", func() string {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.sent < 10*len(x.kept) {
			return fmt.Sprint(x.sent)
		}
		return ""
	})
	nodes, off := macs(t, l), doomed.since()
	pause := longestPause(t.Context())
	begin := time.Now()
	if err := l.PowerOff(lost); err != nil {
		t.Fatal(err)
	}
	for _, s := range move {
		for err := error(nil); ; {
			// The kernel may forward for a moment after the last process has ended.
			if err = tryService(l, s, 250*time.Millisecond); err == nil && neighbour(t, l, nodes, netip.MustParseAddrPort(s.address).Addr()) != lost {
				break
			}
			if time.Since(begin) > lbLimit {
				t.Fatalf("no answer of %s: %v", s.name, err)
			}
		}
		took := time.Since(begin)
		t.Logf("%s lost its power, and a new connection to %s was answered after %s", lost, s.name, took.Round(time.Millisecond))
		// On a machine that is busy with other things only the order of magnitude says something.
		if limit := 3 * time.Second; took > limit && *strictRequests || took > 5*limit+10*pause() {
			t.Errorf("that took more than %s", limit)
		}
	}
	back := doomed.since()
	// From then on new connections work.
	x.mu.Lock()
	sent := x.sent
	x.mu.Unlock()
	eventually(t, lbLimit, "more answers", func() string {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.sent < sent+20*len(x.kept) {
			return fmt.Sprint(x.sent)
		}
		return ""
	})
	x.report(t, nil) // nobody who does not go through the lost machine notices
	doomed.report(t, func(f failedRequest) bool {
		return f.at+f.took >= off && (strings.HasPrefix(f.source, "a connection that stays") || f.at <= back+time.Second)
	})
	if n := doomed.living(); len(n) > 0 {
		t.Logf("of those through the lost machine, %v live", n)
	}
}

// living are the connections that stayed, by Service.
func (x *traffic) living() map[string]int {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := map[string]int{}
	for _, k := range x.kept {
		if k.broken == nil {
			out[k.to.name]++
		}
	}
	return out
}

// ask asks for a Pod's name over a new connection, from the network of the calling thread.
func (s reached) ask(deadline time.Time) (string, error) {
	k := &keptConn{to: s}
	c, err := (&net.Dialer{Deadline: deadline}).Dial("tcp", s.address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := k.begin(c, deadline); err != nil {
		return "", err
	}
	err = k.ask(true, deadline)
	return k.pod, err
}

package test

import (
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/intent"
	"portal/internal/proxy/backend/backendtest"
)

// target is a way to a Service that must always work.
type target struct {
	from *backendtest.Host
	p    intent.Protocol
	to   netip.AddrPort
}

func (t target) String() string { return fmt.Sprintf("%s > %s/%s", t.from, t.to, t.p) }

// steady creates Services that stay as they are, whatever happens to others, and returns the ways to them.
func (l *proxyLab) steady(t *testing.T) (out []target) {
	t.Helper()
	ports := func(tcp, udp int32) []corev1.ServicePort {
		target := intstr.FromInt32(backendtest.ServerPort)
		return []corev1.ServicePort{
			{Name: "http", Port: 80, TargetPort: target, NodePort: tcp},
			{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: target, NodePort: udp},
		}
	}
	local4, local6 := l.LocalPods(intent.IPv4), l.LocalPods(intent.IPv6)
	far4, far6 := l.FarPods(intent.IPv4), l.FarPods(intent.IPv6)
	l.create(t, labService("steady-web", func(s *corev1.ServiceSpec) {
		s.Type, s.Ports = corev1.ServiceTypeNodePort, ports(30101, 30102)
		s.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
		s.ClusterIP, s.ClusterIPs = "10.96.0.101", []string{"10.96.0.101", "fd00:96::101"}
		s.ExternalIPs = []string{"198.51.100.101"}
	}), labSlice("steady-web", intent.IPv4, []netip.Addr{local4[0], local4[1], far4[0]}, local4),
		labSlice("steady-web", intent.IPv6, []netip.Addr{local6[0], far6[1]}, local6))
	balanced := labService("steady-local", func(s *corev1.ServiceSpec) {
		s.Type, s.Ports, s.ClusterIP = corev1.ServiceTypeLoadBalancer, ports(30103, 30104), "10.96.0.102"
		s.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		s.LoadBalancerSourceRanges = []string{"172.31.0.0/16"}
	})
	balanced.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.102"}}
	l.create(t, balanced, labSlice("steady-local", intent.IPv4, []netip.Addr{local4[1], local4[2], far4[1]}, local4))
	l.create(t, labService("steady-sticky", func(s *corev1.ServiceSpec) {
		s.ClusterIP, s.SessionAffinity, s.Ports = "10.96.0.103", corev1.ServiceAffinityClientIP, ports(0, 0)
	}), labSlice("steady-sticky", intent.IPv4, far4, local4))
	for _, w := range []struct {
		from *backendtest.Host
		p    intent.Protocol
		to   string
	}{
		{l.Client, intent.TCP, "10.96.0.101:80"},
		{l.Client, intent.UDP, "10.96.0.101:53"},
		{l.Client, intent.TCP, "[fd00:96::101]:80"},
		{l.Client, intent.TCP, "10.96.0.103:80"},
		{l.Node, intent.TCP, "10.96.0.101:80"},
		{l.Node, intent.UDP, "10.96.0.102:53"},
		{l.Outside, intent.TCP, "172.31.0.11:30101"},
		{l.Outside, intent.UDP, "172.31.0.11:30102"},
		{l.Outside, intent.TCP, "[fd00:31::11]:30101"},
		{l.Outside, intent.TCP, "198.51.100.101:80"},
		{l.Outside, intent.TCP, "203.0.113.102:80"},
		{l.Outside, intent.TCP, "10.96.0.103:80"},
	} {
		out = append(out, target{w.from, w.p, netip.MustParseAddrPort(w.to)})
	}
	return out
}

// vigil asks for Services all the time, and holds connections to them: none may fail.
type vigil struct {
	stop  chan struct{}
	wg    sync.WaitGroup
	flows []*backendtest.Flow

	asked, said atomic.Int64
	// again counts connections for which something had to be sent more than once: a packet was lost, or very late.
	again atomic.Int64

	mu       sync.Mutex
	failures []string
}

// vigilPause is how long to wait between two questions, vigilPatience how long for an answer.
var vigilPause, vigilPatience = 25 * time.Millisecond, 5 * time.Second

func init() {
	if os.Getenv("PORTAL_VM") != "" { // emulated, some ten times slower
		vigilPause, vigilPatience = 10*vigilPause, 6*vigilPatience
	}
}

// vigil begins.
func (l *proxyLab) vigil(t *testing.T, targets []target) *vigil {
	t.Helper()
	v := &vigil{stop: make(chan struct{})}
	t.Cleanup(func() { v.halt() })
	for _, w := range targets {
		for range 2 {
			f, err := w.from.Hold(w.p, w.to, vigilPatience)
			if err != nil {
				t.Fatalf("%v: %v", w, err)
			}
			v.flows = append(v.flows, f)
			v.wg.Go(func() { v.loop(10*vigilPause, func() { v.note(&v.said, w, "a living flow", f.Alive()) }) })
		}
		v.wg.Go(func() { v.loop(vigilPause, func() { v.note(&v.asked, w, "a new flow", v.ask(w)) }) })
	}
	return v
}

func (v *vigil) loop(pause time.Duration, do func()) {
	for {
		select {
		case <-v.stop:
			return
		case <-time.After(pause):
			do()
		}
	}
}

func (v *vigil) ask(w target) error {
	f, err := w.from.Hold(w.p, w.to, vigilPatience)
	if err != nil {
		return err
	}
	defer f.Close()
	if w.p == intent.TCP && f.Retransmissions() > 0 {
		v.again.Add(1)
	}
	return nil
}

func (v *vigil) note(count *atomic.Int64, w target, what string, err error) {
	count.Add(1)
	if err == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failures = append(v.failures, fmt.Sprintf("%s %v, %s: %v", time.Now().Format("15:04:05.000"), w, what, err))
}

// failed says whether something has failed already.
func (v *vigil) failed() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.failures) > 0
}

// halt ends the vigil once.
func (v *vigil) halt() {
	select {
	case <-v.stop:
		return
	default:
	}
	close(v.stop)
	v.wg.Wait()
	for _, f := range v.flows {
		f.Close()
	}
}

// end ends the vigil and reports. However short it was, those who live have said something after all that happened.
func (v *vigil) end(t *testing.T) {
	t.Helper()
	enough := v.said.Load() + 2*int64(len(v.flows))
	for until := time.Now().Add(4 * vigilPatience); v.said.Load() < enough && time.Now().Before(until) && !v.failed(); {
		time.Sleep(vigilPause)
	}
	v.halt()
	for i, f := range v.failures {
		if i == 10 {
			t.Errorf("… and %d more", len(v.failures)-i)
			break
		}
		t.Error(f)
	}
	if v.asked.Load() == 0 || v.said.Load() == 0 {
		t.Error("nobody asked for anything")
	}
	t.Logf("%d new connections (%d of them sent something twice), %d words on %d living ones, %d failures",
		v.asked.Load(), v.again.Load(), v.said.Load(), len(v.flows), len(v.failures))
}

package test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
	"portal/internal/proxy"
	"portal/internal/trace"
)

// traceLab is a lab with Services of all kinds, whose endpoints answer with who they are and whom they see.
type traceLab struct {
	*lab.Lab
	pods     []corev1.Pod
	services map[string]*corev1.Service
	places   map[string]spot // by the name that a trace has for them
}

// spot is where packets come from: a network namespace.
type spot struct {
	ns    *os.File
	addrs []netip.Addr
}

const (
	tracePort     = 9376 // of the Pods
	traceNodePort = 9377 // of processes of the nodes
)

// traceServices are the Services of the lab, with the text after "spec:".
var traceServices = map[string]string{
	"all":           `{selector: {app: all}`,
	"node-port":     `{type: NodePort, selector: {app: all}`,
	"port-local":    `{type: NodePort, externalTrafficPolicy: Local, selector: {on: node1}`,
	"balanced":      `{type: LoadBalancer, selector: {app: all}`,
	"range-in":      `{type: LoadBalancer, loadBalancerSourceRanges: [203.0.113.0/24, 10.244.1.0/24, "fd00:113::/64"], selector: {app: all}`,
	"range-out":     `{type: LoadBalancer, loadBalancerSourceRanges: [192.0.2.0/24], selector: {app: all}`,
	"balance-local": `{type: LoadBalancer, externalTrafficPolicy: Local, selector: {on: node2}`,
	"range-none":    `{type: LoadBalancer, loadBalancerSourceRanges: [192.0.2.0/24], selector: {app: nobody}`,
	"inner-local":   `{internalTrafficPolicy: Local, selector: {on: node2}`,
	"inner-each":    `{internalTrafficPolicy: Local, selector: {app: all}`,
	"none":          `{type: NodePort, externalIPs: [198.51.100.7, "fd00:198::7"], selector: {app: nobody}`,
	"external":      `{externalIPs: [198.51.100.8, "fd00:198::8"], selector: {app: all}`,
	"outer-local":   `{type: NodePort, externalTrafficPolicy: Local, externalIPs: [198.51.100.9, "fd00:198::9"], selector: {on: node2}`,
	"sticky":        `{type: NodePort, sessionAffinity: ClientIP, selector: {app: all}`,
	"single":        `{type: NodePort, selector: {name: p3a}`,
	"headless":      `{clusterIP: None, selector: {app: all}`,
	"leaving":       `{type: NodePort`,
	"chained":       `{ipFamilyPolicy: SingleStack`,
	"in-service":    `{ipFamilyPolicy: SingleStack`,
}

func startTraceLab(t *testing.T, mode string) *traceLab {
	t.Helper()
	l := &traceLab{Lab: startLab(t, lab.Options{Nodes: 3, ProxyMode: mode}), services: map[string]*corev1.Service{}, places: map[string]spot{}}
	var manifest strings.Builder
	for _, node := range l.NodeNames() {
		for _, letter := range []string{"a", "b"} {
			fmt.Fprintf(&manifest, `
apiVersion: v1
kind: Pod
metadata: {name: p%[2]s%[3]s, labels: {app: all, on: %[1]s, name: p%[2]s%[3]s}}
spec:
  nodeName: %[1]s
  terminationGracePeriodSeconds: 0
  containers: [{name: pause, image: portal, args: [echo, --listen, "127.0.0.1:1"]}]
---
`, node, strings.TrimPrefix(node, "node"), letter)
		}
	}
	for name, spec := range traceServices {
		if !strings.Contains(spec, "ipFamilyPolicy") {
			spec += ", ipFamilyPolicy: PreferDualStack"
		}
		fmt.Fprintf(&manifest, `
apiVersion: v1
kind: Service
metadata: {name: %s}
spec: %s, ports: [{name: web, port: 80, targetPort: %[3]d}, {name: dns, port: 53, protocol: UDP, targetPort: %[3]d}]}
---
`, name, spec, tracePort)
	}
	manifest.WriteString("apiVersion: v1\nkind: Service\nmetadata: {name: alias}\nspec: {type: ExternalName, externalName: example.com}\n")
	labKubectl(t, l.Lab, manifest.String(), "apply")
	labKubectl(t, l.Lab, "", "wait", "--for=condition=Ready", "--timeout=120s", "pod", "--all")
	l.balance(t)
	l.read(t)
	l.endpoints(t)
	l.serve(t)
	for _, words := range []string{
		"route add 198.51.100.0/24 via 192.168.100.12", "-6 route add fd00:198::/64 via fd00:100::c",
		"route add 198.51.101.0/24 via 192.168.100.11", "-6 route add fd00:201::/64 via fd00:100::b",
	} {
		on(t, l.Router, append([]string{"ip"}, strings.Fields(words)...)...)
	}
	return l
}

// via is the node that the router leads an address to.
func traceVia(a netip.Addr) string {
	for text, node := range map[string]string{"198.51.100.0/24": "node2", "fd00:198::/64": "node2", "198.51.101.0/24": "node1", "fd00:201::/64": "node1"} {
		if netip.MustParsePrefix(text).Contains(a) {
			return node
		}
	}
	return ""
}

// balance gives the Services of type LoadBalancer addresses.
func (l *traceLab) balance(t *testing.T) {
	t.Helper()
	number := 0
	for name, spec := range traceServices {
		if !strings.Contains(spec, "LoadBalancer") {
			continue
		}
		number++
		patch := fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":"198.51.101.%[1]d"},{"ip":"fd00:201::%[1]d"}]}}}`, number)
		labKubectl(t, l.Lab, "", "patch", "service", name, "--subresource=status", "--type=merge", "-p", patch)
	}
}

// read takes notes of Pods and Services.
func (l *traceLab) read(t *testing.T) {
	t.Helper()
	pods, err := l.API.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	services, err := l.API.CoreV1().Services("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l.pods = pods.Items
	for i := range services.Items {
		l.services[services.Items[i].Name] = &services.Items[i]
	}
}

// endpoints writes slices for the Services without a selector: one is terminating, one is a node port of another node, and one another
// Service's cluster IP.
func (l *traceLab) endpoints(t *testing.T) {
	t.Helper()
	slice := func(name, service, address, conditions string, web, dns int32) string {
		return fmt.Sprintf(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %s, labels: {kubernetes.io/service-name: %s}}
addressType: IPv4
ports: [{name: web, port: %d}, {name: dns, port: %d, protocol: UDP}]
endpoints: [{addresses: ["%s"], conditions: {%s}}]
---
`, name, service, web, dns, address, conditions)
	}
	leaving := ""
	for i := range l.pods {
		if p := &l.pods[i]; p.Name == "p1b" {
			leaving = p.Status.PodIP
		}
	}
	ports := l.services["node-port"].Spec.Ports
	labKubectl(t, l.Lab, slice("leaving-1", "leaving", leaving, "ready: false, serving: true, terminating: true", tracePort, tracePort)+
		slice("chained-1", "chained", "192.168.100.12", "ready: true", ports[0].NodePort, ports[1].NodePort)+
		slice("in-service-1", "in-service", l.services["all"].Spec.ClusterIP, "ready: true", 80, 53), "apply")
}

// serve answers in all Pods and on all nodes, and notes where packets can come from.
func (l *traceLab) serve(t *testing.T) {
	t.Helper()
	add := func(name, path string, addrs []netip.Addr, port uint16) {
		ns, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ns.Close() })
		p := spot{ns, addrs}
		if err := p.do(func() error { // each packet is to be answered, however many there are
			return errors.Join(os.WriteFile("/proc/sys/net/ipv4/icmp_ratelimit", []byte("0"), 0), os.WriteFile("/proc/sys/net/ipv6/icmp/ratelimit", []byte("0"), 0))
		}); err != nil {
			t.Fatal(err)
		}
		l.places[name] = p
		for _, a := range addrs {
			if port != 0 {
				p.listen(t, netip.AddrPortFrom(a, port))
			}
		}
	}
	for i := range l.pods {
		p := &l.pods[i]
		m := l.Node(p.Spec.NodeName)
		shim, err := os.ReadFile(filepath.Join(lab.NodeDir(l.Dir, m.Name), "pods", string(p.UID), "shim.pid"))
		if err != nil {
			t.Fatal(err)
		}
		var addrs []netip.Addr
		for _, ip := range p.Status.PodIPs {
			addrs = append(addrs, netip.MustParseAddr(ip.IP))
		}
		add(p.Name, fmt.Sprintf("/proc/%d/root/proc/%s/ns/net", m.PID, strings.TrimSpace(string(shim))), addrs, tracePort)
	}
	for i, name := range l.NodeNames() {
		addrs := []netip.Addr{netip.MustParseAddr(fmt.Sprintf("192.168.100.%d", 11+i)), netip.MustParseAddr(fmt.Sprintf("fd00:100::%x", 11+i))}
		add(name, fmt.Sprintf("/proc/%d/ns/net", l.Node(name).PID), addrs, traceNodePort)
	}
	add(trace.Client, fmt.Sprintf("/proc/%d/ns/net", l.Client.PID), []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("fd00:113::a")}, 0)
}

// do runs a function in the network namespace, on a thread that ends with it.
func (p spot) do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(p.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// listen answers to every connection and datagram with who this is and whom it sees.
func (p spot) listen(t *testing.T, at netip.AddrPort) {
	t.Helper()
	var l *net.TCPListener
	var u *net.UDPConn
	err := p.do(func() (err error) {
		if l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at)); err != nil {
			return err
		}
		u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		t.Fatalf("listen at %s: %v", at, err)
	}
	t.Cleanup(func() { _, _ = l.Close(), u.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
			fmt.Fprintf(c, "%s %s\n", at, from)
			_ = c.Close()
		}
	}()
	go func() {
		b := make([]byte, 16)
		for {
			_, from, err := u.ReadFromUDPAddrPort(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = u.WriteToUDPAddrPort(fmt.Appendf(nil, "%s %s\n", at, from.Addr().Unmap()), from)
			}
		}
	}()
}

// seen is what became of a packet.
type seen struct {
	what string // answered, refused, silence, or unreachable
	by   netip.AddrPort
	// source is what the one who answered saw.
	source netip.Addr
}

// ask sends a packet from there, and waits for what becomes of it.
func (p spot) ask(network string, to netip.AddrPort, patience time.Duration) (out seen) {
	var c net.Conn
	err := p.do(func() (err error) {
		c, err = (&net.Dialer{Timeout: patience}).Dial(network, to.String())
		return err
	})
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if network == "udp" {
			_, err = c.Write([]byte("?"))
			if errors.Is(err, unix.EPERM) {
				err = nil // it was dropped on its way out, and perhaps rejected
			}
		}
	}
	line := ""
	if err == nil {
		line, err = bufio.NewReader(c).ReadString('\n')
	}
	var timeout net.Error
	switch {
	case err == nil:
		who, source, _ := strings.Cut(strings.TrimSpace(line), " ")
		out = seen{what: "answered"}
		out.by, _ = netip.ParseAddrPort(who)
		out.source, _ = netip.ParseAddr(source)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		out.what = "refused"
	case errors.As(err, &timeout) && timeout.Timeout():
		out.what = "silence"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		out.what = "unreachable"
	default:
		out.what = err.Error()
	}
	return out
}

// objects lists what a trace is made from.
func (l *traceLab) objects(t *testing.T) *trace.Objects {
	t.Helper()
	var o trace.Objects
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	services, err := l.API.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
	must(err)
	endpoints, err := l.API.DiscoveryV1().EndpointSlices("").List(t.Context(), metav1.ListOptions{})
	must(err)
	nodes, err := l.API.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	must(err)
	pods, err := l.API.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
	must(err)
	namespaces, err := l.API.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	must(err)
	ranges, err := l.API.NetworkingV1().ServiceCIDRs().List(t.Context(), metav1.ListOptions{})
	must(err)
	o.Services, o.Slices, o.Nodes, o.Pods, o.Namespaces, o.Ranges = services.Items, endpoints.Items, nodes.Items, pods.Items, namespaces.Items, ranges.Items
	return &o
}

// synced waits until each node's proxy has in the kernel what the trace believes.
func (l *traceLab) synced(t *testing.T, w *trace.World) {
	t.Helper()
	for _, name := range l.NodeNames() {
		client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = l.places[name].do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		}}}
		eventually(t, 30*time.Second, "the proxy of "+name, func() string {
			resp, err := client.Get("http://127.0.0.1:10249/state")
			if err != nil {
				return err.Error()
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			var state proxy.State
			if err := errors.Join(err, json.Unmarshal(body, &state)); err != nil {
				return err.Error()
			}
			return strings.Join(w.Compare(name, &state), "; ")
		})
	}
}

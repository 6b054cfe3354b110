package lb

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/lb/compile"
	"portal/internal/lb/config"
	"portal/internal/lb/spec"
)

// ProxyModeUnsupported is the reason of Events that a proxy in the mode ipvs takes the packets of a balancer's port.
const ProxyModeUnsupported = "ProxyModeUnsupported"

// ipvsTable has what IPVS balances in this network namespace. Kernels without IPVS have no such file.
const ipvsTable = "/proc/net/ip_vs"

// bypassed are problems of Services whose ports should be led to the balancing process, while IPVS of this machine takes their packets first. Proxies of a
// cluster have one mode, so this machine stands for all.
func (p *balancing) bypassed(listeners []config.Listener) (out []compile.Problem) {
	if len(listeners) == 0 {
		return nil
	}
	text, err := os.ReadFile(ipvsTable)
	if err != nil {
		return nil
	}
	taken, marks := parseIPVS(string(text)), hasProxyMarks(string(text))
	said := map[string]bool{}
	for _, l := range listeners {
		key := l.Owner.Namespace + "/" + l.Owner.Name
		if said[key] {
			continue
		}
		object, found, err := p.services.GetByKey(key)
		svc, ok := object.(*corev1.Service)
		if err != nil || !found || !ok || !taken[l.Address] && !(marks && hasAddress(svc, l.Address.Addr())) {
			continue
		}
		said[key] = true
		out = append(out, compile.Problem{Service: svc, Problem: spec.Problem{Reason: ProxyModeUnsupported, Message: fmt.Sprintf(
			"the proxy is in the mode ipvs, which takes connections to %s before the balancing process: what annotations ask of them has no effect; run proxies in the mode nftables or iptables", l.Address)}})
	}
	return out
}

// hasProxyMarks says whether IPVS balances by marks of Portal's proxy, which begin with a 5: it puts them on packets for addresses other than cluster IPs,
// so that the table does not have these.
func hasProxyMarks(text string) bool {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "FWM" && len(fields[1]) == 8 && fields[1][0] == '5' {
			return true
		}
	}
	return false
}

// hasAddress says whether proxies serve an address as one of a Service's load balancer.
func hasAddress(svc *corev1.Service, addr netip.Addr) bool {
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil && a == addr && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP) {
			return true
		}
	}
	return false
}

// parseIPVS reads which TCP services there are: addresses and ports are hexadecimal, and those of IPv6 in brackets.
func parseIPVS(text string) map[netip.AddrPort]bool {
	out := map[netip.AddrPort]bool{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "TCP" {
			continue
		}
		cut := strings.LastIndexByte(fields[1], ':')
		if cut < 0 {
			continue
		}
		port, err := hex.DecodeString(fields[1][cut+1:])
		if err != nil || len(port) != 2 {
			continue
		}
		host := fields[1][:cut]
		var addr netip.Addr
		if six, ok := strings.CutPrefix(host, "["); ok {
			addr, err = netip.ParseAddr(strings.TrimSuffix(six, "]"))
		} else {
			var raw []byte
			raw, err = hex.DecodeString(host)
			addr, ok = netip.AddrFromSlice(raw)
			if !ok {
				continue
			}
		}
		if err == nil {
			out[netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port))] = true
		}
	}
	return out
}

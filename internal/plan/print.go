package plan

import (
	"fmt"
	"net/netip"
	"strings"
)

func (o Origin) String() string { return [...]string{"pod", "node", "outside"}[o] }

func (v Verdict) String() string { return [...]string{"forward", "reject", "drop"}[v] }

func (k Kind) String() string {
	return [...]string{"ClusterIP", "ExternalIP", "LoadBalancerIP", "NodePort"}[k]
}

func (p PortID) String() string {
	s := p.Service.String()
	if p.Port != "" {
		s += ":" + p.Port
	}
	return fmt.Sprintf("%s/%v/IPv%d", s, p.Protocol, p.Family)
}

// String is address:port/protocol; a node port's address is a star.
func (k FrontendKey) String() string {
	at := fmt.Sprintf("*:%d/IPv%d", k.Port, k.Family)
	if k.Addr.IsValid() {
		at = netip.AddrPortFrom(k.Addr, k.Port).String()
	}
	return at + "/" + strings.ToLower(k.Protocol.String())
}

func (r Route) String() string {
	if r.Verdict != Forward {
		return r.Verdict.String()
	}
	var b strings.Builder
	for i, e := range r.Pool.Endpoints {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(e.Addr.String())
	}
	if r.Masquerade {
		b.WriteString(" masquerade")
	}
	return b.String()
}

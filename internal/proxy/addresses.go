package proxy

import (
	"context"
	"net/netip"
	"slices"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

// LocalAddrs knows the addresses of this machine.
type LocalAddrs interface {
	List() (hostnet.Addresses, error)
	// Changes receives when they may have changed, until the context ends.
	Changes(context.Context) <-chan struct{}
}

// APIAddrs knows where the proxy reaches the API.
type APIAddrs interface {
	List() []netip.AddrPort
	// Changed receives when there is a new one.
	Changed() <-chan struct{}
}

// exempt are the frontends that would capture the proxy's own connections to the API: those at its addresses, and where such
// an address is this machine's, the node port.
func exempt(api []netip.AddrPort, local []netip.Addr) (out []plan.FrontendKey) {
	for _, a := range api {
		k := plan.FrontendKey{Addr: a.Addr(), Family: intent.FamilyOf(a.Addr()), Protocol: intent.TCP, Port: a.Port()}
		out = append(out, k)
		if a.Addr().IsLoopback() || slices.Contains(local, a.Addr()) {
			k.Addr = netip.Addr{}
			out = append(out, k)
		}
	}
	return out
}

package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"portal/internal/plan"
	"portal/internal/proxy"
)

// Compare says in what a node's proxy, by its own account (/state), differs from what traces take it to do: another mode, frontends that
// it lacks, refused or leads elsewhere. Nothing: traces of packets on this node are right.
func (w *World) Compare(node string, state *proxy.State) (out []string) {
	n := w.node(node)
	if n == nil {
		return []string{fmt.Sprintf("there is no node %q", node)}
	}
	if state.Mode != w.mode.Name {
		out = append(out, fmt.Sprintf("its mode is %s, not %s", cmp.Or(state.Mode, "not chosen yet"), w.mode.Name))
	}
	if !state.Complete {
		return append(out, "it has not listed everything yet")
	}
	snap := w.snapshot(n)
	have := map[plan.FrontendKey]*proxy.FrontendState{}
	for i := range state.Frontends {
		have[stateKey(&state.Frontends[i])] = &state.Frontends[i]
	}
	for k, f := range snap.Frontends {
		h := have[k]
		switch {
		case h == nil:
			out = append(out, fmt.Sprintf("it does not have %s of Service %s", k, f.ID.Service))
		case h.Refused != "":
			out = append(out, fmt.Sprintf("the kernel refused %s of Service %s: %s", k, f.ID.Service, h.Refused))
		case h.Acknowledged.IsZero():
			out = append(out, fmt.Sprintf("%s of Service %s is not in sync", k, f.ID.Service))
		default:
			if want, got := routesText(f), stateRoutes(state, h); want != got {
				out = append(out, fmt.Sprintf("%s of Service %s goes to %s, not to %s", k, f.ID.Service, got, want))
			}
		}
	}
	for k, h := range have {
		if snap.Frontends[k] == nil {
			out = append(out, fmt.Sprintf("it still has %s of Service %s/%s", k, h.Namespace, h.Service))
		}
	}
	slices.Sort(out)
	return out
}

func stateKey(s *proxy.FrontendState) plan.FrontendKey {
	k := plan.FrontendKey{Family: 4, Protocol: protocolNamed(s.Protocol), Port: s.Port}
	if strings.HasSuffix(s.Family, "6") {
		k.Family = 6
	}
	if s.Address != nil {
		k.Addr = *s.Address
	}
	return k
}

// routesText is what a frontend does, by origin, in a form that can be compared.
func routesText(f *plan.Frontend) string {
	var b strings.Builder
	for o, r := range f.Routes {
		var to []netip.AddrPort
		if r.Pool != nil {
			for _, e := range r.Pool.Endpoints {
				to = append(to, e.Addr)
			}
		}
		routeText(&b, plan.Origin(o).String(), r.Verdict.String(), r.Masquerade, to)
	}
	return b.String()
}

func routeText(b *strings.Builder, from, verdict string, masquerade bool, to []netip.AddrPort) {
	fmt.Fprintf(b, "[%s: %s %v", from, verdict, to)
	if masquerade {
		b.WriteString(" masqueraded")
	}
	b.WriteString("]")
}

func stateRoutes(s *proxy.State, f *proxy.FrontendState) string {
	var b strings.Builder
	for o := range plan.Origins {
		for _, r := range f.Routes {
			if !slices.Contains(r.From, o.String()) {
				continue
			}
			var to []netip.AddrPort
			if r.Pool != nil && *r.Pool < len(s.Pools) {
				to = s.Pools[*r.Pool].Endpoints
			}
			routeText(&b, o.String(), r.Verdict, r.Masquerade, to)
		}
	}
	return b.String()
}

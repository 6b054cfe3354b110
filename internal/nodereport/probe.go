package nodereport

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"portal/internal/plan"
	"portal/internal/proxy"
)

const (
	// probeTime is how long a connection may take. Whoever asks for the report waits.
	probeTime = time.Second
	// mostProbes is how many connections are tried for one report.
	mostProbes = 40
)

// Dial is the result of one attempt to connect from the node.
type Dial struct {
	To netip.AddrPort `json:"to"`
	// Frontend: it is an address of the Service. Otherwise an endpoint's.
	Frontend bool `json:"frontend,omitempty"`
	// Error is empty if it succeeded, or one of Refused, TimedOut, or what the kernel says.
	Error string `json:"error,omitempty"`
}

// What most often is wrong.
const (
	Refused  = "connection refused"
	TimedOut = "no answer"
)

// dials connects to the TCP frontends with an address, and to the endpoints, of the Service that a state is limited to.
func dials(ctx context.Context, s *proxy.State) []Dial {
	var out []Dial
	add := func(d Dial) {
		if len(out) < mostProbes && !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Protocol != "TCP" {
			continue
		}
		for _, r := range f.Routes {
			// What is dropped or rejected on purpose says nothing.
			if !slices.Contains(r.From, "node") || r.Pool == nil || *r.Pool >= len(s.Pools) {
				continue
			}
			if f.Address != nil && f.Kind == plan.ClusterIP.String() && f.Refused == "" {
				add(Dial{To: netip.AddrPortFrom(*f.Address, f.Port), Frontend: true})
			}
			for _, e := range s.Pools[*r.Pool].Endpoints {
				add(Dial{To: e})
			}
		}
	}
	var all sync.WaitGroup
	for i := range out {
		all.Go(func() { out[i].Error = dial(ctx, out[i].To) })
	}
	all.Wait()
	return out
}

func dial(ctx context.Context, to netip.AddrPort) string {
	c, err := (&net.Dialer{Timeout: probeTime}).DialContext(ctx, "tcp", to.String())
	if err == nil {
		_ = c.Close()
		return ""
	}
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.As(err, &timeout) && timeout.Timeout():
		return TimedOut
	}
	var kernel syscall.Errno
	if errors.As(err, &kernel) {
		return kernel.Error()
	}
	return err.Error()
}

// Lookup is the result of asking the cluster's DNS for a name that every cluster has.
type Lookup struct {
	Server netip.AddrPort `json:"server"`
	Name   string         `json:"name"`
	Error  string         `json:"error,omitempty"`
}

// lookup asks the cluster's DNS, where the proxy serves it.
func lookup(ctx context.Context, s *proxy.State, zone string) *Lookup {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Protocol != "UDP" || f.Port != 53 || f.Address == nil {
			continue
		}
		out := &Lookup{Server: netip.AddrPortFrom(*f.Address, f.Port), Name: "kubernetes.default.svc." + zone + "."}
		resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, out.Server.String())
		}}
		ctx, cancel := context.WithTimeout(ctx, 2*probeTime)
		defer cancel()
		if _, err := resolver.LookupNetIP(ctx, "ip", out.Name); err != nil {
			out.Error = TimedOut
			var reason *net.DNSError
			if errors.As(err, &reason) && !reason.IsTimeout {
				out.Error = reason.Err
			}
		}
		return out
	}
	return nil
}

package engine

import (
	"cmp"
	"net/netip"
	"slices"

	"portal/internal/lb/config"
)

// State is what the engine does at present: for people and for those who manage it.
type State struct {
	Listeners []ListenerState `json:"listeners"`
	Pools     []PoolState     `json:"pools"`
	// Errors are what of the last configuration could not be carried out, by listener or "pool NAME".
	Errors      map[string]string `json:"errors,omitempty"`
	Connections int               `json:"connections"`
}

// ListenerState is that of a listener.
type ListenerState struct {
	Name        string          `json:"name"`
	Owner       config.Owner    `json:"owner"`
	Address     netip.AddrPort  `json:"address"`
	Protocol    config.Protocol `json:"protocol"`
	Connections int64           `json:"connections"`
	Total       uint64          `json:"total"`
}

// PoolState is that of a pool.
type PoolState struct {
	Name      string          `json:"name"`
	Owner     config.Owner    `json:"owner"`
	Leader    netip.AddrPort  `json:"leader,omitzero"`
	Endpoints []EndpointState `json:"endpoints"`
}

// EndpointState is that of an endpoint.
type EndpointState struct {
	Address netip.AddrPort `json:"address"`
	Name    string         `json:"name,omitempty"`
	Healthy bool           `json:"healthy"`
	Ejected bool           `json:"ejected,omitempty"`
	// Error is what its last health check said, if that failed.
	Error  string `json:"error,omitempty"`
	Active int64  `json:"active"`
	Total  uint64 `json:"total"`
}

// State returns what the engine does.
func (e *Engine) State() State {
	out := State{Connections: e.Connections()}
	e.mu.Lock()
	for _, l := range e.listeners {
		cfg := l.state.Load().cfg
		out.Listeners = append(out.Listeners, ListenerState{cfg.Name, cfg.Owner, cfg.Address, cfg.Protocol, l.counters.active.Load(), l.counters.total.Load()})
	}
	for part, err := range e.errors {
		if out.Errors == nil {
			out.Errors = map[string]string{}
		}
		out.Errors[part] = err.Error()
	}
	e.mu.Unlock()
	checks := e.checks.Results()
	for name, p := range *e.pools.Load() {
		s := PoolState{Name: name, Owner: p.Config().Owner}
		if leader := p.Leader(); leader != nil {
			s.Leader = leader.Address
		}
		for _, m := range p.Endpoints() {
			s.Endpoints = append(s.Endpoints, EndpointState{
				Address: m.Address, Name: m.Config().Name, Healthy: m.Healthy(), Ejected: m.Ejected(), Error: checks[name][m.Address].Error,
				Active: m.Active(), Total: m.Counters.Begun.Load(),
			})
		}
		out.Pools = append(out.Pools, s)
	}
	slices.SortFunc(out.Listeners, func(a, b ListenerState) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(out.Pools, func(a, b PoolState) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Adopt takes over another engine's state: leaders and unhealthy endpoints. It is for an engine that replaces another one,
// after its first configuration.
func (e *Engine) Adopt(s State) {
	pools := *e.pools.Load()
	for _, was := range s.Pools {
		p := pools[was.Name]
		if p == nil {
			continue
		}
		if was.Leader.IsValid() {
			p.SetLeader(was.Leader)
		}
		for _, m := range was.Endpoints {
			if !m.Healthy {
				e.checks.Unhealthy(was.Name, m.Address)
			}
		}
	}
}

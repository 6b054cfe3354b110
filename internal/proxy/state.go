package proxy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/foreign"
)

// status is what the loop reports about itself.
type status struct {
	Mode, Wanted                   string
	Limits                         []string
	Synced                         bool
	Syncs, FullSyncs               int
	LastSync, LastFullSync         time.Time
	LastSyncTook, LastFullSyncTook time.Duration
	LastCheck                      time.Time
	Drifts, Failures               int
	LastDrift                      string
	LastDriftAt                    time.Time
	Fallbacks                      uint64
	LastError                      string
	LastErrorAt                    time.Time
	Refused                        map[plan.FrontendKey]error
	Problems                       []hostnet.Problem
	Foreign                        []foreign.Leftover
}

// State is /state: what this node does for Services, as JSON.
type State struct {
	Mode       string   `json:"mode"`
	WantedMode string   `json:"wantedMode"`
	Limits     []string `json:"limits,omitempty"`

	Node              string         `json:"node"`
	Zone              string         `json:"zone,omitempty"`
	Families          []string       `json:"families"`
	Addresses         []netip.Addr   `json:"addresses"`
	PodPrefixes       []netip.Prefix `json:"podPrefixes,omitempty"`
	PodInterface      string         `json:"podInterface,omitempty"`
	PodInterfaceNames string         `json:"podInterfacePrefix,omitempty"`
	NodePorts         NodePortState  `json:"nodePorts"`
	// ServicePrefixes are the ranges in which addresses that no Service has are dropped.
	ServicePrefixes []netip.Prefix `json:"servicePrefixes,omitempty"`

	// Complete: everything has been listed from the API; before, nothing is programmed.
	Complete         bool      `json:"complete"`
	Syncs            int       `json:"syncs"`
	FullSyncs        int       `json:"fullSyncs"`
	LastSync         time.Time `json:"lastSync,omitzero"`
	LastSyncTook     string    `json:"lastSyncTook,omitempty"`
	LastFullSync     time.Time `json:"lastFullSync,omitzero"`
	LastFullSyncTook string    `json:"lastFullSyncTook,omitempty"`
	LastCheck        time.Time `json:"lastCheck,omitzero"`
	Drifts           int       `json:"drifts"`
	// LastDrift is what differed when rules were last found changed by somebody else.
	LastDrift   string    `json:"lastDrift,omitempty"`
	LastDriftAt time.Time `json:"lastDriftAt,omitzero"`
	// Fallbacks counts syncs that the mode could make only by its second way.
	Fallbacks   uint64    `json:"fallbacks,omitempty"`
	Failures    int       `json:"failures"`
	LastError   string    `json:"lastError,omitempty"`
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`

	// Problems are settings and missing routes of this machine because of which packets to Services are lost.
	Problems []hostnet.Problem `json:"problems,omitempty"`

	// Foreign is what another proxy left in the kernel: what was found at the start, until it is gone.
	Foreign []foreign.Leftover `json:"foreign,omitempty"`
	// Notes are what of Services is not served as they ask.
	Notes []NoteState `json:"notes,omitempty"`

	Services  int             `json:"services"`
	Frontends []FrontendState `json:"frontends"`
	Pools     []PoolState     `json:"pools"`
}

// NoteState says in words what is particular about a Service.
type NoteState struct {
	Namespace string `json:"namespace"`
	Service   string `json:"service"`
	Message   string `json:"message"`
}

// NodePortState is where node ports are served.
type NodePortState struct {
	All       bool         `json:"all"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Loopback  bool         `json:"loopback"`
}

// FrontendState is one address and port; a node port has no address.
type FrontendState struct {
	Address         *netip.Addr    `json:"address,omitempty"`
	Family          string         `json:"family"`
	Protocol        string         `json:"protocol"`
	Port            uint16         `json:"port"`
	Kind            string         `json:"kind"`
	Namespace       string         `json:"namespace"`
	Service         string         `json:"service"`
	PortName        string         `json:"portName,omitempty"`
	AffinitySeconds int            `json:"affinitySeconds,omitempty"`
	Sources         []netip.Prefix `json:"sources,omitempty"`
	Routes          []RouteState   `json:"routes"`
	// Acknowledged is since when it has been in sync; absent: it is not yet.
	Acknowledged time.Time `json:"acknowledged,omitzero"`
	// Refused is why the kernel does not have it.
	Refused string `json:"refused,omitempty"`
}

// RouteState is what becomes of packets of some origins.
type RouteState struct {
	From       []string `json:"from"`
	Verdict    string   `json:"verdict"`
	Masquerade bool     `json:"masquerade,omitempty"`
	// Pool is an index of State.Pools.
	Pool *int `json:"pool,omitempty"`
}

// PoolState is a set of endpoints.
type PoolState struct {
	Local     bool             `json:"local"`
	Endpoints []netip.AddrPort `json:"endpoints"`
}

// State returns what this node does, for all Services or for some.
func (p *Proxy) State(only ...intent.Key) *State {
	wanted := among(only)
	complete := p.Cluster.Complete()
	p.mu.RLock()
	st := p.status
	var snap *plan.Snapshot
	var frontends []*plan.Frontend
	acked := map[intent.Key]time.Time{}
	services := 0
	var notes []NoteState
	var facts *plan.Facts
	if snap = p.snap; snap != nil {
		facts, services, notes = snap.Facts, len(snap.Services), p.notes(wanted)
		for _, f := range snap.Frontends {
			if wanted(f.ID.Service) {
				frontends = append(frontends, f)
				if r := p.known[f.ID.Service]; r.acked != 0 {
					acked[f.ID.Service] = time.Unix(0, r.acked)
				}
			}
		}
	}
	p.mu.RUnlock()
	out := st.state()
	out.Complete, out.Services, out.Node, out.Notes = complete, services, p.Config.Node, notes
	out.describe(facts)
	out.add(frontends, acked, st.Refused)
	return out
}

// among says which Services are meant: some, or all.
func among(only []intent.Key) func(intent.Key) bool {
	if len(only) == 0 {
		return func(intent.Key) bool { return true }
	}
	set := make(map[intent.Key]bool, len(only))
	for _, k := range only {
		set[k] = true
	}
	return func(k intent.Key) bool { return set[k] }
}

// notes are those of plans, of health-check node ports, and of endpoints that are cluster IPs: a connection to one would have to be led twice.
func (p *Proxy) notes(wanted func(intent.Key) bool) (out []NoteState) {
	for k, s := range p.snap.Services {
		if !wanted(k) {
			continue
		}
		for _, n := range s.Notes {
			out = append(out, NoteState{k.Namespace, k.Name, n})
		}
		for _, a := range s.Endpoints() {
			if p.snap.ClusterIPs[a.Addr()] > 0 {
				out = append(out, NoteState{k.Namespace, k.Name, fmt.Sprintf("endpoint %s is the cluster IP of a Service: packets to it may be lost", a)})
			}
		}
	}
	if p.Checks != nil {
		for k, list := range p.Checks.Notes() {
			for _, n := range list {
				if wanted(k) {
					out = append(out, NoteState{k.Namespace, k.Name, n})
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b NoteState) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Service, b.Service), cmp.Compare(a.Message, b.Message))
	})
	return out
}

func (s *status) state() *State {
	out := &State{
		Mode: s.Mode, WantedMode: s.Wanted, Limits: s.Limits, Syncs: s.Syncs, FullSyncs: s.FullSyncs,
		LastSync: s.LastSync, LastFullSync: s.LastFullSync, LastCheck: s.LastCheck, Drifts: s.Drifts, Failures: s.Failures,
		LastError: s.LastError, LastErrorAt: s.LastErrorAt, LastDrift: s.LastDrift, LastDriftAt: s.LastDriftAt, Fallbacks: s.Fallbacks, Problems: s.Problems, Foreign: s.Foreign, Frontends: []FrontendState{}, Pools: []PoolState{},
	}
	if s.Synced {
		out.LastSyncTook, out.LastFullSyncTook = s.LastSyncTook.String(), s.LastFullSyncTook.String()
	}
	return out
}

func (s *State) describe(f *plan.Facts) {
	if f == nil {
		return
	}
	s.Zone, s.Addresses = f.Zone, f.Addrs
	for _, family := range f.Families {
		s.Families = append(s.Families, familyName(family))
	}
	s.PodPrefixes, s.PodInterface, s.PodInterfaceNames = f.Pods.Prefixes, f.Pods.Interface, f.Pods.InterfacePrefix
	s.NodePorts = NodePortState{f.NodePorts.All, f.NodePorts.Addrs, f.NodePorts.Loopback4 || f.NodePorts.Loopback6}
	s.ServicePrefixes = f.ServicePrefixes
}

func (s *State) add(frontends []*plan.Frontend, acked map[intent.Key]time.Time, refused map[plan.FrontendKey]error) {
	slices.SortFunc(frontends, func(a, b *plan.Frontend) int { return a.FrontendKey.Compare(b.FrontendKey) })
	pools := map[*plan.Pool]int{}
	for _, f := range frontends {
		out := FrontendState{
			Family: familyName(f.Family), Protocol: f.Protocol.String(), Port: f.Port, Kind: f.Kind.String(),
			Namespace: f.ID.Service.Namespace, Service: f.ID.Service.Name, PortName: f.ID.Port,
			AffinitySeconds: int(f.Affinity / time.Second), Sources: f.Sources, Acknowledged: acked[f.ID.Service],
		}
		if f.Addr.IsValid() {
			out.Address = &f.Addr
		}
		if err := refused[f.FrontendKey]; err != nil {
			out.Refused, out.Acknowledged = err.Error(), time.Time{}
		}
		out.Routes = s.routes(f, pools)
		s.Frontends = append(s.Frontends, out)
	}
}

// routes puts origins with the same fate together.
func (s *State) routes(f *plan.Frontend, pools map[*plan.Pool]int) (out []RouteState) {
	for o, r := range f.Routes {
		from := plan.Origin(o).String()
		if i := slices.Index(f.Routes[:o], r); i >= 0 {
			at := slices.IndexFunc(out, func(r RouteState) bool { return slices.Contains(r.From, plan.Origin(i).String()) })
			out[at].From = append(out[at].From, from)
			continue
		}
		route := RouteState{From: []string{from}, Verdict: r.Verdict.String(), Masquerade: r.Masquerade}
		if r.Pool != nil {
			n, ok := pools[r.Pool]
			if !ok {
				n = len(s.Pools)
				pools[r.Pool] = n
				s.Pools = append(s.Pools, poolState(r.Pool))
			}
			route.Pool = &n
		}
		out = append(out, route)
	}
	return out
}

func poolState(p *plan.Pool) PoolState {
	out := PoolState{Local: p.Local}
	for _, e := range p.Endpoints {
		out.Endpoints = append(out.Endpoints, e.Addr)
	}
	return out
}

// ServeState answers /state; ?service=NAMESPACE/NAME limits it to one Service.
func (p *Proxy) ServeState(w http.ResponseWriter, r *http.Request) {
	var only []intent.Key
	if q := r.URL.Query().Get("service"); q != "" {
		k, err := parseKey(q)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		only = append(only, k)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p.State(only...))
}

func parseKey(s string) (intent.Key, error) {
	for i := range s {
		if s[i] == '/' && i > 0 && i < len(s)-1 {
			return intent.Key{Namespace: s[:i], Name: s[i+1:]}, nil
		}
	}
	return intent.Key{}, fmt.Errorf("service is %q; want NAMESPACE/NAME", s)
}

// ServeMode answers /proxyMode with the name of the mode that runs.
func (p *Proxy) ServeMode(w http.ResponseWriter, _ *http.Request) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	fmt.Fprint(w, p.status.Mode)
}

// Synced says whether the first sync is done.
func (p *Proxy) Synced() bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.status.Synced
}

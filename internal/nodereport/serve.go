package nodereport

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"portal/internal/clusterdns"
	"portal/internal/intent"
	"portal/internal/proxy"
	"portal/internal/proxy/foreign"
)

// Source is where a node's report comes from.
type Source struct {
	Node string
	// PodsDir has a folder for each Pod, named by its UID, with the number of a process that is in the Pod's network in PIDFile.
	PodsDir, PIDFile string
	// Proxy is this process's proxy, nil while there is none.
	Proxy func() *proxy.Proxy
	// NoProxy is why none runs here.
	NoProxy string
	// Zone is the cluster's DNS zone.
	Zone string
	// Unhealthy are the endpoints that this machine's load balancer has taken out; nil if none runs here.
	Unhealthy func(context.Context) []Unhealthy
	// Foreign looks for rules of another proxy; nil: what the proxy found when it started is all that is said.
	Foreign func(context.Context) ([]foreign.Leftover, error)
}

// ServeHTTP answers with the report. ?service=NAMESPACE/NAME limits the proxy's part to one Service; &probe=true connects to it from
// here, and asks DNS for a name; with it, dial, alias, as and port are what Attempts has. ?services=NAMESPACE/NAME, which may be there many
// times, limits it to several: nodes that don't know it answer about all.
func (s Source) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	only, err := readServices(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	further, err := readAttempts(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	out := s.Report(only...)
	out.Unhealthy = s.unhealthy(r.Context(), only)
	// The proxy may have become ready since.
	if p := s.Proxy(); p != nil && out.Proxy != nil && r.URL.Query().Get("probe") == "true" {
		s.try(r.Context(), out, p, len(only) == 1, further)
	}
	out.Time = time.Now() // when it is sent: clocks are compared
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out) // a client that has gone needs no answer
}

// readServices are the Services that a question is limited to; none: it is about all.
func readServices(q url.Values) (out []intent.Key, err error) {
	for _, param := range []string{"service", "services"} {
		for _, text := range q[param] {
			namespace, name, ok := strings.Cut(text, "/")
			switch {
			case text == "":
			case !ok || namespace == "" || name == "":
				return nil, fmt.Errorf("%s is %q; want NAMESPACE/NAME", param, text)
			default:
				out = append(out, intent.Key{Namespace: namespace, Name: name})
			}
		}
	}
	return out, nil
}

// try sends packets, all at the same time, as whoever asks waits.
func (s Source) try(ctx context.Context, out *Report, p *proxy.Proxy, limited bool, further Attempts) {
	names := p.State(intent.Key{Namespace: "kube-system", Name: clusterdns.ServiceName})
	var all sync.WaitGroup
	all.Go(func() { out.Lookup = lookup(ctx, names, s.Zone) })
	if limited {
		all.Go(func() { out.Dials = dials(ctx, out.Proxy) })
	}
	if s.Foreign != nil {
		all.Go(func() { s.lookForForeign(ctx, out.Proxy) })
	}
	out.Tries = make([]Dial, len(further.Dial))
	for i, to := range further.Dial {
		all.Go(func() { out.Tries[i] = Dial{To: to, Error: dial(ctx, to)} })
	}
	if further.Alias != "" {
		out.Alias = &Alias{Name: further.Alias, As: further.As}
		all.Go(func() { alias(ctx, names, out.Alias, further.Ports) })
	}
	all.Wait()
}

// lookForForeign puts what it finds in the proxy's state: rules of another proxy may have come since this one started.
func (s Source) lookForForeign(ctx context.Context, state *proxy.State) {
	ctx, cancel := context.WithTimeout(ctx, 2*probeTime)
	defer cancel()
	if found, err := s.Foreign(ctx); err == nil || len(found) > 0 {
		state.Foreign = found
	}
}

// unhealthy are the endpoints that are taken out, of some Services or of all.
func (s Source) unhealthy(ctx context.Context, only []intent.Key) (out []Unhealthy) {
	if s.Unhealthy == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	for _, u := range s.Unhealthy(ctx) {
		if len(only) == 0 || slices.Contains(only, intent.Key{Namespace: u.Namespace, Name: u.Service}) {
			out = append(out, u)
		}
	}
	return out
}

// Report is the report of this moment.
func (s Source) Report(only ...intent.Key) *Report {
	out := &Report{Node: s.Node, ProxyNote: s.NoProxy, Conntrack: Conntrack(), Links: Links(), Listening: map[string][]Socket{}}
	if p := s.Proxy(); p != nil {
		out.Proxy = p.State(only...)
	}
	folders, _ := os.ReadDir(s.PodsDir) // a node without Pods may have none
	for _, folder := range folders {
		data, err := os.ReadFile(filepath.Join(s.PodsDir, folder.Name(), s.PIDFile))
		if err != nil {
			continue
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
		if err != nil {
			continue
		}
		// A Pod that ends meanwhile is left out.
		if sockets, err := Sockets(pid); err == nil {
			out.Listening[folder.Name()] = sockets
		}
	}
	out.Time = time.Now()
	return out
}

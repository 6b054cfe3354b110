package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"portal/internal/lb/spec"
	"portal/internal/nodereport"
)

// checkBalancerHealth looks at endpoints that load balancers send nothing to, though the API has them as ready.
func checkBalancerHealth(v *View) (out []Finding) {
	type taken struct {
		nodes []string
		nodereport.Unhealthy
	}
	found := map[*Service]map[netip.AddrPort]*taken{}
	for _, name := range slices.Sorted(maps.Keys(v.Reports)) {
		r := v.Reports[name]
		if r.Report == nil {
			continue
		}
		for _, u := range r.Unhealthy {
			s := v.Service(u.Namespace, u.Service)
			if s == nil {
				continue
			}
			if found[s] == nil {
				found[s] = map[netip.AddrPort]*taken{}
			}
			at := found[s][u.Address]
			if at == nil {
				at = &taken{Unhealthy: u}
				found[s][u.Address] = at
			}
			at.nodes = append(at.nodes, name)
			at.Error = cmp.Or(at.Error, u.Error)
		}
	}
	for _, s := range v.order {
		if len(found[s]) == 0 {
			continue
		}
		all := slices.SortedFunc(maps.Keys(found[s]), netip.AddrPort.Compare)
		first := found[s][all[0]]
		f := Finding{Code: "balancer-health", Severity: Degraded, Sure: Certain, Object: s.ref(), Field: "metadata.annotations"}
		f.Verdict = fmt.Sprintf("%s: its load balancer takes %s for broken, though %s ready: its health check %s says: %s", s.ref(), v.endpointsText(all), isAre(len(all)), v.healthCheckText(s), first.Error)
		if first.Error == "" {
			f.Code, f.Field = "balancer-ejected", ""
			f.Verdict = fmt.Sprintf("%s: its load balancer has taken out %s, though %s ready, for a while: requests to %s failed", s.ref(), v.endpointsText(all), isAre(len(all)), itThem(len(all)))
		}
		for _, at := range all {
			f.Evidence = append(f.Evidence, strings.TrimSuffix(fmt.Sprintf("on %s: %s: %s", nodesText(found[s][at].nodes), at, found[s][at].Error), ": "))
			if p := v.podIPs[at.Addr()]; p != nil {
				f.Affects = append(f.Affects, podRef(p))
			}
		}
		if ready, _ := s.endpoints(); len(all) >= ready {
			f.Evidence = append(f.Evidence, "as it takes all of them for broken, it goes on sending to all")
		}
		f.Evidence = limit(f.Evidence)
		f.Fix = v.healthCheckFix(s)
		out = append(out, f)
	}
	return out
}

func isAre(n int) string {
	if n == 1 {
		return "it is"
	}
	return "they are"
}

func (v *View) endpointsText(all []netip.AddrPort) string {
	who := all[0].String()
	if p := v.podIPs[all[0].Addr()]; p != nil {
		who += " (Pod " + p.Name + ")"
	}
	if len(all) == 1 {
		return "the endpoint " + who
	}
	return fmt.Sprintf("%d endpoints, such as %s,", len(all), who)
}

// healthCheckText is what a Service's annotations have its load balancer ask.
func (v *View) healthCheckText(s *Service) string {
	asked, _ := spec.Read(s.Service)
	h := asked.HealthCheck
	out := cmp.Or(h.Protocol, "tcp")
	if h.Path != "" {
		out = cmp.Or(h.Protocol, "http") + " " + h.Path
	}
	if h.Port != "" && h.Port != "traffic-port" {
		out += " at port " + h.Port
	}
	return "(" + out + ")"
}

// healthCheckFix takes away what the annotations say about where and how to ask.
func (v *View) healthCheckFix(s *Service) []string {
	var keys []string
	for _, key := range slices.Sorted(maps.Keys(s.Annotations)) {
		for _, what := range []string{"healthcheck-path", "healthcheck-port", "healthcheck-protocol"} {
			if strings.HasSuffix(key, what) {
				keys = append(keys, key+"-")
			}
		}
	}
	if len(keys) == 0 {
		return []string{kubectl(s.Namespace, "describe service %s", s.Name)}
	}
	return []string{kubectl(s.Namespace, "annotate service %s %s", s.Name, strings.Join(keys, " "))}
}

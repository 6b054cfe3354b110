// Package explain answers the questions that people ask about Services: why doesn't it answer, where does this name or address
// lead, what is wrong in this cluster. Evidence is gathered once; checks are independent pure functions of it; findings are data that
// the command line and others show. This package reads nothing itself and knows no client: see package gather.
package explain

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Severity is how much a finding costs those who use a Service.
type Severity int

// From the least to the worst.
const (
	// Notice: it works as specified, but perhaps not as expected. It is reported to those who ask about this object only.
	Notice Severity = iota
	// Degraded: some requests fail, or the next change will not be carried out.
	Degraded
	// Broken: requests fail.
	Broken
)

var severities = [...]string{"notice", "degraded", "broken"}

func (s Severity) String() string { return severities[s] }

// MarshalJSON writes the word.
func (s Severity) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// UnmarshalJSON reads the word.
func (s *Severity) UnmarshalJSON(data []byte) error {
	var word string
	if err := json.Unmarshal(data, &word); err != nil {
		return err
	}
	i := slices.Index(severities[:], word)
	if i < 0 {
		return fmt.Errorf("severity %q: must be one of %s", word, strings.Join(severities[:], ", "))
	}
	*s = Severity(i)
	return nil
}

// How sure a finding is.
const (
	Certain  = "certain"  // it follows from what was read
	Likely   = "likely"   // other explanations are rare
	Possible = "possible" // worth a look
)

// Ref names an object.
type Ref struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

func (r Ref) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + r.Namespace + "/" + r.Name
}

// Finding is something that is wrong.
type Finding struct {
	// Code names the sort of finding, for programs.
	Code     string   `json:"code"`
	Severity Severity `json:"severity"`
	Sure     string   `json:"sure"`
	// Object is where the cause is; Field is the field of it, if it is one; Node is where it is so, if not everywhere.
	Object Ref        `json:"object"`
	Field  string     `json:"field,omitempty"`
	Node   string     `json:"node,omitempty"`
	Since  *time.Time `json:"since,omitempty"`
	// Verdict is one sentence that names the cause.
	Verdict  string   `json:"verdict"`
	Evidence []string `json:"evidence,omitempty"`
	// Fix are commands that can be typed as they stand.
	Fix []string `json:"fix,omitempty"`
	// On is the node on which to type them, if not anywhere.
	On string `json:"on,omitempty"`
	// Affects are the other objects that suffer from it.
	Affects []Ref `json:"affects,omitempty"`
	// Explains are codes of findings that follow from this one and are not listed themselves.
	Explains []string `json:"explains,omitempty"`
}

// About says whether a finding is about an object.
func (f *Finding) About(r Ref) bool { return f.Object == r || slices.Contains(f.Affects, r) }

// Check finds what is wrong of one kind.
type Check func(*View) []Finding

// check is a Check, and whether it looks at the View's subjects alone: what it finds is then about nothing else, and needs no other Service
// to be looked at.
type check struct {
	find   Check
	single bool
}

// checks are all of them. Their order is of no importance.
var checks = []check{
	{checkSelectors, true},
	{checkPods, true},
	{checkWorkloads, true},
	{checkRestarts, true},
	{checkDeleting, false},
	{checkServiceDeleting, true},
	{checkTargetPorts, true},
	{checkListeners, true},
	{checkSlices, true},
	{checkHandMade, true},
	{checkEndpointAddresses, true},
	{checkControllers, false},
	{checkPolicies, true},
	{checkExternalIPs, false},
	{checkBalancers, false},
	{checkBalancerHealth, false},
	{checkExternalNames, true},
	{checkHeadless, true},
	{checkStatefulSets, false},
	{checkNodes, false},
	{checkNetwork, false},
	{checkProxies, false},
	{checkParts, false},
	{checkServedByProxy, true},
	{checkReach, false},
	{checkOutside, false},
	{checkLookups, false},
	{checkHosts, false},
	{checkDNS, false},
	{checkPodDNS, false},
	{checkClaims, false},
	{checkRanges, false},
	{checkIngresses, false},
	{checkCertificates, false},
}

// consequences says which findings follow from which, if both are about the same object: the cause is listed, and the rest is not.
var consequences = map[string][]string{
	"proxy-stale":            {"endpoint-unreachable", "service-unreachable"},
	"endpoint-unreachable":   {"node-port-unreachable", "address-unreachable"},
	"service-unreachable":    {"node-port-unreachable", "address-unreachable"},
	"frontend-missing":       {"endpoint-unreachable", "service-unreachable"},
	"publish-not-ready":      {"endpoint-unreachable", "service-unreachable"},
	"endpoints-stale":        {"endpoint-unreachable", "service-unreachable"},
	"slice-by-hand":          {"endpoint-unreachable", "service-unreachable"},
	"endpoint-no-pod":        {"endpoint-unreachable", "service-unreachable"},
	"endpoint-is-cluster-ip": {"endpoint-unreachable", "service-unreachable"},
	"node-not-ready":         {"endpoint-unreachable", "service-unreachable", "pods-unready", "proxy-unreachable", "endpoints-stale", "dns-no-endpoints", "policy-local", "pods-pending", "pod-lost", "clock-skew"},
	"controllers-stopped":    {"endpoints-stale", "no-endpoints", "dns-no-endpoints", "selector-no-pods", "workload-empty"},
	"namespace-terminating":  {"no-endpoints", "workload-empty", "workload-short", "selector-no-pods", "selector-typo", "selector-namespace", "pods-terminating", "endpoints-stale", "service-deleting", "pods-pending"},
	"service-deleting":       {"endpoints-stale", "no-endpoints", "frontend-missing", "service-unreachable"},
	"workload-short":         {"pods-ended", "pods-terminating"},
	"selector-typo":          {"no-endpoints"},
	"selector-no-pods":       {"no-endpoints"},
	"selector-namespace":     {"no-endpoints"},
	"workload-empty":         {"no-endpoints"},
	"readiness-port":         {"pods-unready"},
	"listens-on-loopback":    {"endpoint-unreachable", "service-unreachable", "pods-unready", "readiness-port"},
	"listens-other-family":   {"endpoint-unreachable", "service-unreachable", "pods-unready"},
	"selector-too-wide":      {"endpoint-unreachable", "service-unreachable", "port-not-listening", "target-port-name"},
	"port-not-listening":     {"endpoint-unreachable", "service-unreachable", "readiness-port"},
	"target-port-name":       {"slice-port", "port-not-listening"},
	"port-protocol":          {"port-not-listening"},
	"proxy-unreachable":      {"proxy-stale", "proxy-behind"},
	"proxy-failing":          {"proxy-unhealthy"},
	"proxy-degraded":         {"proxy-unhealthy"},
	"proxy-not-synced":       {"proxy-stale", "frontend-missing"},
	"frontend-refused":       {"endpoint-unreachable", "service-unreachable", "frontend-missing", "proxy-failing"},
	"service-proxy-name":     {"frontend-missing"},
	"headless-label":         {"frontend-missing", "service-unreachable"},
	"dns-no-endpoints":       {"dns-unreachable"},
	"mtu":                    {"endpoint-unreachable"},
	"node-address-conflict":  {"endpoint-unreachable", "service-unreachable", "dns-unreachable"},
	"range-overlap":          {"endpoint-unreachable", "service-unreachable", "pod-address-conflict"},
	"pod-address-conflict":   {"endpoint-unreachable", "service-unreachable"},
	"balancer-certificate":   {"address-unreachable"},
	"balancer-group":         {"address-unreachable"},
	"certificate-unreadable": {"address-unreachable"},
	"address-taken":          {"endpoint-unreachable", "service-unreachable", "dns-unreachable", "node-port-unreachable"},
	"balancer-stopped":       {"balancer-pending", "address-unreachable"},
	"host-setting":           {"dns-unreachable", "endpoint-unreachable", "service-unreachable"},
	"externalname-ip":        {"externalname-unknown"},
	"range-full":             {"claim-missing"},
	"cluster-ip-outside":     {"claim-missing"},
	"certificate-expired":    {"certificate-ends"},
	"ingress-no-service":     {"ingress-port"},
	"selector-removed":       {"endpoint-no-pod", "endpoint-unreachable", "service-unreachable", "no-endpoints"},
	"slice-label":            {"no-endpoints"},
	"slice-family":           {"no-endpoints"},
	"endpoints-unmirrored":   {"no-endpoints"},
	"slice-port":             {"no-endpoints"},
	"no-service-name":        {"no-endpoints"},
}

// All runs every check, and returns what is wrong, the worst first. Findings that follow from others are folded into these.
func All(v *View) []Finding {
	found := v.run(nil, false)
	return v.conclude(v.run(found, true))
}

// run adds what the checks of single Services find, or all others.
func (v *View) run(found [][]Finding, single bool) [][]Finding {
	if found == nil {
		found = make([][]Finding, len(checks))
	}
	for i, c := range checks {
		if c.single == single {
			found[i] = c.find(v)
		}
	}
	return found
}

// conclude makes one list of what checks found.
func (v *View) conclude(found [][]Finding) []Finding {
	out := slices.Concat(found...)
	out = fold(append(out, unexplained(v, out)...))
	slices.SortStableFunc(out, compare)
	return out
}

// unexplained are Services without endpoints about which no check has found anything: that they have none is worth a word at least.
func unexplained(v *View, found []Finding) (out []Finding) {
	if !v.sees("endpointslices", "pods") {
		return nil
	}
	known := map[Ref]bool{}
	for i := range found {
		if found[i].Severity == Notice {
			continue
		}
		for _, r := range found[i].refs() {
			known[r] = true
		}
	}
	for _, s := range v.subjects {
		if s.Spec.Type == corev1.ServiceTypeExternalName || known[s.ref()] || s.served() || !s.selects() || v.Now.Sub(s.CreationTimestamp.Time) < settle || v.moving(s) {
			continue
		}
		out = append(out, v.noFamily(s))
	}
	return out
}

// fold leaves out findings that others explain.
func fold(all []Finding) []Finding {
	about := map[Ref][]int{}
	for i := range all {
		for _, r := range all[i].refs() {
			about[r] = append(about[r], i)
		}
	}
	gone := make([]bool, len(all))
	for i := range all {
		follows := consequences[all[i].Code]
		if len(follows) == 0 {
			continue
		}
		for _, r := range all[i].refs() {
			for _, j := range about[r] {
				// What is explained is about this object itself: a finding that only touches it may have other reasons.
				if i == j || gone[j] || all[j].Object != r || !slices.Contains(follows, all[j].Code) || otherPort(all[i].Field, all[j].Field) {
					continue
				}
				gone[j] = true
				if !slices.Contains(all[i].Explains, all[j].Code) {
					all[i].Explains = append(all[i].Explains, all[j].Code)
				}
				all[i].Severity = max(all[i].Severity, all[j].Severity)
			}
		}
	}
	out := all[:0]
	for i := range all {
		if !gone[i] {
			out = append(out, all[i])
		}
	}
	return out
}

// otherPort says whether two fields are of different ports of a Service: what is wrong with one explains nothing about the other.
func otherPort(a, b string) bool {
	portOf := func(field string) string {
		port, _, _ := strings.Cut(field, "]")
		return port
	}
	return strings.HasPrefix(a, "spec.ports[") && strings.HasPrefix(b, "spec.ports[") && portOf(a) != portOf(b)
}

func (f *Finding) refs() []Ref {
	if slices.Contains(f.Affects, f.Object) {
		return f.Affects
	}
	return append([]Ref{f.Object}, f.Affects...)
}

var sureness = map[string]int{Certain: 2, Likely: 1, Possible: 0}

// compare puts the worst first; of equals, what affects more.
func compare(a, b Finding) int {
	return cmp.Or(
		cmp.Compare(b.Severity, a.Severity), cmp.Compare(sureness[b.Sure], sureness[a.Sure]), cmp.Compare(len(b.Affects), len(a.Affects)),
		cmp.Compare(a.Object.Namespace, b.Object.Namespace), cmp.Compare(a.Object.Name, b.Object.Name), cmp.Compare(a.Code, b.Code),
	)
}

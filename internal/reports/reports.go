// Package reports is what each part of a node says about itself in the API: one small NodeReport a node and part, in the group portal.dev.
// It has the type, its CustomResourceDefinition, and the decision when a report is due: pure. Package publish writes reports; what they mean for
// Services is for package explain to say.
package reports

import (
	_ "embed"
	"encoding/json"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Where reports are in the API.
const (
	Group    = "portal.dev"
	Version  = "v1alpha1"
	Kind     = "NodeReport"
	Resource = "nodereports"

	// APIPath is where all of them are read.
	APIPath = "/apis/" + Group + "/" + Version + "/" + Resource
	// DefinitionName is that of the CustomResourceDefinition.
	DefinitionName = Resource + "." + Group
	// PartLabel says which part a report is of.
	PartLabel = Group + "/part"
)

// The parts.
const (
	Proxy = "proxy"
	DNS   = "dns"
	LB    = "lb"
	Agent = "agent" // runs the node's Pods
)

// Parts are all of them.
var Parts = []string{Proxy, DNS, LB, Agent}

// Name is that of a part's report. Parts' names have no dot, so that two nodes never share one.
func Name(node, part string) string { return node + "." + part }

// SplitName finds the node and part of a report's name.
func SplitName(name string) (node, part string, ok bool) {
	i := strings.LastIndexByte(name, '.')
	if i <= 0 || !slices.Contains(Parts, name[i+1:]) {
		return "", "", false
	}
	return name[:i], name[i+1:], true
}

// Definition is the CustomResourceDefinition, as it is sent to an API server.
//
//go:embed definition.json
var Definition []byte

// Report is the object.
type Report struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Node   string `json:"node"`
	Part   string `json:"part"`
	Status Status `json:"status"`
}

// List is what a list of reports is read into.
type List struct {
	metav1.ListMeta `json:"metadata"`
	Items           []Report `json:"items"`
}

// State is how a part is.
type State string

// From the best to the worst.
const (
	Running  State = "Running"
	Starting State = "Starting" // it has not read everything yet
	Degraded State = "Degraded" // it works, but for something that Message names
	Failing  State = "Failing"  // it can't do its work
)

// Status is what a part says.
type Status struct {
	State State `json:"state"`
	// Message says what is wrong, in one sentence.
	Message string `json:"message,omitempty"`
	// Since is when the state became what it is; Started, when the process did.
	Since   metav1.Time `json:"since"`
	Started metav1.Time `json:"started"`
	// Updated is when the report was written.
	Updated metav1.Time `json:"updated"`
	Version string      `json:"version,omitempty"`
	// Mode is how it works: a proxy's mode, the ways in which a balancer announces addresses, what serves Pods.
	Mode string `json:"mode,omitempty"`
	// Limits are what the mode can't do.
	Limits []string `json:"limits,omitempty"`
	// Services is how many it serves.
	Services *int `json:"services,omitempty"`
	// Synced is what the part has carried out.
	Synced *Synced `json:"synced,omitempty"`
	// Refused are frontends that the kernel does not accept.
	Refused *Refused `json:"refused,omitempty"`
	// Drift is about changes that others made to the part's rules.
	Drift     *Drift     `json:"drift,omitempty"`
	Conntrack *Conntrack `json:"conntrack,omitempty"`
	LastError *Error     `json:"lastError,omitempty"`
}

// Synced is up to where a part has followed the API.
type Synced struct {
	// Revision is the newest resource version that one of the part's watches has brought and the part has carried out.
	Revision string      `json:"revision,omitempty"`
	Time     metav1.Time `json:"time"`
}

// Refused counts what is not served, and has some of it.
type Refused struct {
	Count int      `json:"count"`
	Some  []string `json:"some,omitempty"`
}

// Drift counts changes by others.
type Drift struct {
	Count int         `json:"count"`
	Last  string      `json:"last,omitempty"`
	Time  metav1.Time `json:"time"`
}

// Conntrack is how full the table of connections is.
type Conntrack struct {
	Count   int `json:"count"`
	Max     int `json:"max"`
	Percent int `json:"percent"`
}

// Error is the last one.
type Error struct {
	Message string      `json:"message"`
	Time    metav1.Time `json:"time"`
}

// Bounds of what is written: a report stays small, whatever goes wrong.
const (
	maxMessage = 400
	maxSome    = 5
	maxLimits  = 10
)

// Trim keeps a status small.
func (s *Status) Trim() {
	s.Message = shorten(s.Message)
	s.Limits = shortened(s.Limits, maxLimits)
	if s.Refused != nil {
		s.Refused.Some = shortened(s.Refused.Some, maxSome)
	}
	if s.Drift != nil {
		s.Drift.Last = shorten(s.Drift.Last)
	}
	if s.LastError != nil {
		s.LastError.Message = shorten(s.LastError.Message)
	}
}

func shortened(list []string, most int) []string {
	out := slices.Clone(list[:min(most, len(list))])
	for i := range out {
		out[i] = shorten(out[i])
	}
	return out
}

func shorten(text string) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage], "") + "…"
}

// NoManagers, as a report's managed fields in an update, has the API server keep none from then on: each report has one writer, and to find out which
// fields an update has changed is a fifth of what the update costs the server.
func NoManagers() []metav1.ManagedFieldsEntry { return []metav1.ManagedFieldsEntry{{}} }

// Parse reads a report.
func Parse(data []byte) (*Report, error) {
	out := &Report{}
	return out, json.Unmarshal(data, out)
}

// Age is how long ago a report was written.
func (r *Report) Age(now time.Time) time.Duration { return now.Sub(r.Status.Updated.Time) }

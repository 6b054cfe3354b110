package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
	"portal/internal/lb/announce"
	"portal/internal/trace"
	"portal/internal/trace/learn"
)

// traceTimeout is for a whole trace. The first one of a large cluster waits until everything was listed.
const traceTimeout = 20 * time.Second

// maxEnds is how many ends of a way are sent; the rest is counted.
const maxEnds = 50

// TraceAnswer is what `portal trace` says, in parts that a page can lay out.
type TraceAnswer struct {
	From    string `json:"from"`
	To      string `json:"to"`
	Verdict string `json:"verdict"`
	Good    bool   `json:"good"`
	Reason  string `json:"reason"`
	// Mode is the proxy mode that was assumed.
	Mode  string       `json:"mode"`
	Steps []trace.Step `json:"steps"`
	Ends  []TraceEnd   `json:"ends,omitempty"`
	// More counts the ends that are left out.
	More        int      `json:"more,omitempty"`
	Assumptions []string `json:"assumptions,omitempty"`
	// Text is all of it as the command prints it; Command is what to type for it.
	Text    string `json:"text"`
	Command string `json:"command"`
}

// TraceEnd is where a packet may arrive.
type TraceEnd struct {
	Odds string `json:"odds"`
	Text string `json:"text"`
}

// trace answers which way a packet goes, from what the person may see.
func (c *Console) trace(w http.ResponseWriter, r *http.Request, s *session) {
	namespace := r.PathValue("namespace")
	if err := validNamespaces([]string{namespace}); err != nil {
		refuseFor(w, err)
		return
	}
	query := r.URL.Query()
	question := trace.Question{From: strings.TrimSpace(query.Get("from")), To: strings.TrimSpace(query.Get("to")), Via: strings.TrimSpace(query.Get("via")), Namespace: namespace}
	running, err := c.context()
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, "", err.Error())
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), traceTimeout)
	defer cancel()
	defer context.AfterFunc(running, cancel)()
	out, err := s.account.trace(ctx, s.config, question, query.Get("mode"))
	if bad := (*trace.MistakeError)(nil); errors.As(err, &bad) {
		err = fieldError{bad.Part, fmt.Sprintf("%s: %v", bad.Part, bad.Err)}
	}
	if err != nil {
		refuseFor(w, err)
		return
	}
	answer(w, http.StatusOK, out)
}

// trace works out a packet's way. config is that of the session which asks.
func (a *account) trace(ctx context.Context, config *rest.Config, q trace.Question, mode string) (*TraceAnswer, error) {
	held, release, err := a.hold()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := held.prepare(ctx, q.Namespace); err != nil {
		return nil, fmt.Errorf("the objects that a trace is made from could not be read within %s: try again", traceTimeout)
	}
	known, covered := held.evidence(q.Namespace)
	if !covered["services"] || !covered["endpointslices"] {
		return nil, fieldError{"from", "you may not watch Services and EndpointSlices of the namespace " + q.Namespace + ": there is nothing that a trace could be made from"}
	}
	settings := trace.Settings{Mode: mode, Zone: explainZone}
	objects, unseen := traceObjects(known, covered)
	learned := ""
	if mode == "" {
		if learned, err = learnSettings(ctx, config, known, &settings); err != nil {
			return nil, err
		}
	}
	done, err := a.console.traces.take(ctx, func(time.Duration) time.Duration { return 0 })
	if err != nil {
		return nil, err
	}
	defer done()
	world, err := trace.NewWorld(objects, settings)
	if err != nil {
		return nil, fieldError{"mode", "mode: " + err.Error()}
	}
	report, err := world.Trace(q)
	if err != nil {
		return nil, err
	}
	report.Assumptions = append(report.Assumptions, unseen...)
	switch {
	case learned != "":
		report.Assumptions = append(report.Assumptions, learned)
	case mode == "":
		report.Assumptions = append(report.Assumptions, "the nodes' proxy mode is "+report.Mode+" (--proxy-mode for another)")
	}
	return newTraceAnswer(report, q, mode), nil
}

// learnSettings asks nodes and the ConfigMap of kube-proxy how proxies are configured, as `portal trace` does. That this is forbidden says
// nothing about what is watched.
func learnSettings(ctx context.Context, config *rest.Config, known *explain.Evidence, s *trace.Settings) (string, error) {
	config = rest.CopyConfig(config)
	config.WarningHandler = rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	defer closeConnections(client)
	var names []string
	for i := range known.Nodes {
		names = append(names, known.Nodes[i].Name)
	}
	return learn.Settings(ctx, client, names, s), nil
}

// traceObjects are what a trace is made from, and what of it this person may not see. Without Nodes, those that Pods and endpoints are on
// stand in for them.
func traceObjects(known *explain.Evidence, covered map[string]bool) (o *trace.Objects, unseen []string) {
	o = &trace.Objects{Services: known.Services, Slices: known.Slices, Nodes: known.Nodes, Pods: known.Pods, Namespaces: known.Namespaces, Ranges: known.ServiceCIDRs, Announced: announce.Holders(known.Leases)}
	for _, missing := range []struct{ resource, words string }{
		{"pods", "Pods can't be read here: their addresses have no names"},
		{"namespaces", "Namespaces can't be read here: those with Services are known"},
		{"servicecidrs", "ServiceCIDRs can't be read here: the ranges of cluster IPs are not known"},
		{"nodes", "Nodes can't be read here: their addresses, and which addresses are Pods', are not known"},
	} {
		if !covered[missing.resource] {
			unseen = append(unseen, missing.words)
		}
	}
	if known.Limited != "" {
		unseen = append(unseen, "only the namespace "+known.Limited+" can be read here: an address of another one's Service is taken for somebody's outside")
	}
	if covered["nodes"] {
		return o, unseen
	}
	seen := map[string]bool{}
	add := func(name string) {
		if name != "" && !seen[name] {
			seen[name] = true
			o.Nodes = append(o.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	for i := range known.Pods {
		add(known.Pods[i].Spec.NodeName)
	}
	for i := range known.Slices {
		for j := range known.Slices[i].Endpoints {
			add(deref(known.Slices[i].Endpoints[j].NodeName))
		}
	}
	return o, unseen
}

func newTraceAnswer(r *trace.Report, q trace.Question, mode string) *TraceAnswer {
	var text strings.Builder
	_ = r.Print(&text) // a Builder takes everything
	out := &TraceAnswer{
		From: r.From, To: r.To, Verdict: string(r.Verdict), Good: r.Verdict.Good(), Reason: r.Reason, Mode: r.Mode, Assumptions: r.Assumptions, Text: text.String(),
		Command: "portal trace -n " + q.Namespace + " --from " + shellWord(q.From) + " --to " + shellWord(q.To),
	}
	if r.Source.IsValid() {
		out.From += ", " + r.Source.String()
	}
	if !strings.Contains(r.To, "/") {
		out.To += "/" + r.Protocol
	}
	if q.Via != "" {
		out.Command += " --via " + shellWord(q.Via)
	}
	if mode != "" {
		out.Command += " --proxy-mode " + shellWord(mode)
	}
	for _, s := range r.Steps {
		if s.Kind != "end" { // the reason has said it
			out.Steps = append(out.Steps, s)
		}
	}
	for i, e := range r.Ends {
		if i == maxEnds {
			out.More = len(r.Ends) - i
			break
		}
		out.Ends = append(out.Ends, TraceEnd{e.Percent(), e.String()})
	}
	return out
}

// shellWord is a word as a shell takes it.
func shellWord(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:[]", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 && !strings.ContainsAny(s, "[]") {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

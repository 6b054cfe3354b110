package console

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/top"
)

const (
	// trafficEvery is how often nodes are asked what they count; with many nodes it is less often: trafficPace for each.
	trafficEvery = 2 * time.Second
	trafficPace  = 15 * time.Millisecond
	// trafficTimeout is for one node: its first answer takes an interval.
	trafficTimeout = 6 * time.Second
	nodesAtOnce    = 32
)

// Rates are what goes through a Service or endpoint, a second.
type Rates struct {
	New    float64 `json:"new"`
	Open   int     `json:"open"`
	Bytes  float64 `json:"bytes"`
	Resets float64 `json:"resets"`
	// P50 and P99 are how long half of all, and all but a hundredth, of the new connections waited for an answer, in seconds; 0: not known.
	P50 float64 `json:"p50,omitempty"`
	P99 float64 `json:"p99,omitempty"`

	latency top.Latency
}

func (r *Rates) add(c *top.Counts) {
	r.New, r.Open, r.Bytes, r.Resets = r.New+c.NewRate, r.Open+c.Open, r.Bytes+c.ByteRate, r.Resets+c.ResetsRate
	if c.Latency != nil {
		r.latency.Add(c.Latency)
		r.P50, r.P99 = r.latency.Quantile(.5).Seconds(), r.latency.Quantile(.99).Seconds()
	}
}

// Collected is what all nodes counted in one interval.
type Collected struct {
	At time.Time `json:"at"`
	// Every is the time between two of these, in seconds.
	Every float64 `json:"every"`
	// Nodes answered, of so many.
	Nodes int `json:"nodes"`
	Of    int `json:"of"`
	// Missing is why there are no figures at all, or why some are not there.
	Missing string `json:"missing,omitempty"`
	// Notes are what is missing in the figures, and what would help.
	Notes []string `json:"notes,omitempty"`
	// Bytes and Latency: nodes count them.
	Bytes   bool `json:"bytes"`
	Latency bool `json:"latency"`

	services  map[key]*Rates
	endpoints map[key]map[string]*Rates
}

// traffic asks the nodes while pages show the answers.
type traffic struct {
	account *account

	mu      sync.Mutex
	changed chan struct{}
	last    *Collected
	feeds   map[*feed]int // of pages that look, for the names of nodes
	all     int           // pages that show all Services
	one     map[key]int   // pages that show one
	stop    func()        // nil: it does not run
}

func newTraffic(a *account) *traffic {
	return &traffic{account: a, changed: make(chan struct{}), feeds: map[*feed]int{}, one: map[key]int{}}
}

func (t *traffic) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.feeds) == 0
}

// want has nodes asked until release is called: about all Services, or about one and its endpoints.
func (t *traffic) want(f *feed, only *key) (release func(), err error) {
	ctx, err := t.account.console.context()
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stop == nil {
		var inner context.Context
		if err := t.account.console.spawn(ctx, func(ctx context.Context) { inner, t.stop = context.WithCancel(ctx) }, func() { t.run(inner) }); err != nil {
			return nil, err
		}
	}
	change := func(by int) {
		if t.feeds[f] += by; t.feeds[f] == 0 {
			delete(t.feeds, f)
		}
		if only == nil {
			t.all += by
		} else if t.one[*only] += by; t.one[*only] == 0 {
			delete(t.one, *only)
		}
	}
	change(1)
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		change(-1)
		if len(t.feeds) == 0 && t.stop != nil {
			t.stop()
			t.stop, t.last = nil, nil
		}
	}), nil
}

// run asks all nodes again and again.
func (t *traffic) run(ctx context.Context) {
	config := rest.CopyConfig(t.account.config)
	config.ContentType, config.AcceptContentTypes = "", "" // errors are shown
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.publish(ctx, &Collected{At: time.Now(), Missing: err.Error()})
		return
	}
	defer closeConnections(client)
	allowed, checked := false, time.Time{}
	for ctx.Err() == nil {
		started := time.Now()
		nodes, why := t.nodes()
		every := max(trafficEvery, time.Duration(len(nodes))*trafficPace)
		if why == "" && !allowed && time.Since(checked) > 10*time.Second {
			allowed, checked = mayAskNodes(ctx, client), time.Now()
		}
		out := &Collected{Every: every.Seconds(), Of: len(nodes)}
		switch {
		case why != "":
			out.Missing = why
		case !allowed:
			out.Missing = "live figures come from the nodes, and you may not ask them: that is the right to get nodes/proxy"
		default:
			allowed = t.round(ctx, client, nodes, out)
		}
		out.At = time.Now()
		t.publish(ctx, out)
		if !sleep(ctx, every-time.Since(started)) {
			return
		}
	}
}

func (t *traffic) publish(ctx context.Context, c *Collected) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	t.last = c
	close(t.changed)
	t.changed = make(chan struct{})
}

// nodes are those that can be asked.
func (t *traffic) nodes() (names []string, why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for f := range t.feeds {
		f.mu.Lock()
		names, limits, synced := slices.Sorted(maps.Keys(f.nodes)), f.status.Limits, f.status.Synced
		f.mu.Unlock()
		switch {
		case len(names) > 0:
			return names, ""
		case slices.Contains(limits, "Nodes"):
			why = "live figures come from the nodes, and you may not list these: that is the right to list and watch nodes, and to get nodes/proxy"
		case synced:
			why = "there are no nodes that could count"
		default:
			why = "loading"
		}
	}
	return nil, why
}

// mayAskNodes says whether the user may reach what nodes serve.
func mayAskNodes(ctx context.Context, client kubernetes.Interface) bool {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Resource: "nodes", Subresource: "proxy", Verb: "get"},
	}}
	answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	return err == nil && answer.Status.Allowed
}

// round asks each node once, and adds up. It returns false if that is forbidden.
func (t *traffic) round(ctx context.Context, client *kubernetes.Clientset, nodes []string, out *Collected) bool {
	t.mu.Lock()
	all, wanted := t.all > 0, slices.Collect(maps.Keys(t.one))
	t.mu.Unlock()
	out.services, out.endpoints = map[key]*Rates{}, map[key]map[string]*Rates{}
	var (
		group   sync.WaitGroup
		mu      sync.Mutex
		failed  = map[string][]string{} // nodes by why
		notes   = map[string][]string{} // nodes by note
		slots   = make(chan struct{}, nodesAtOnce)
		allowed = true
	)
	for _, node := range nodes {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			sample, status, why := askNode(ctx, client, node, all, wanted)
			mu.Lock()
			defer mu.Unlock()
			if sample == nil {
				allowed = allowed && status != http.StatusForbidden
				failed[why] = append(failed[why], node)
				return
			}
			out.Nodes++
			out.take(sample)
			for _, note := range sample.Notes {
				notes[note] = append(notes[note], node)
			}
		})
	}
	group.Wait()
	for _, why := range slices.Sorted(maps.Keys(failed)) {
		out.Notes = append(out.Notes, fmt.Sprintf("%s: %s", namesOf(failed[why]), why))
	}
	for _, note := range slices.Sorted(maps.Keys(notes)) {
		out.Notes = append(out.Notes, fmt.Sprintf("%s: %s", namesOf(notes[note]), note))
	}
	if out.Nodes > 0 && !out.Latency {
		out.Notes = append(out.Notes, "latency is not measured: turn the nodes' clock for connections on with sysctl -w net.netfilter.nf_conntrack_timestamp=1 (Linux 6.14 or newer)")
	}
	if out.Nodes == 0 && len(out.Notes) > 0 { // without notes nobody was asked: the last page has just been closed
		out.Missing = "no node answers how much it has to do: " + out.Notes[0]
		if more := len(out.Notes) - 1; more > 0 {
			out.Missing += fmt.Sprintf(", and %d more", more)
		}
		out.Notes = nil
	}
	return allowed
}

func namesOf(nodes []string) string {
	set := map[string]bool{}
	for _, n := range nodes {
		set[n] = true
	}
	return nameList(set)
}

// askNode asks one node for its last sample.
func askNode(ctx context.Context, client *kubernetes.Clientset, node string, all bool, wanted []key) (_ *top.Sample, status int, why string) {
	ctx, cancel := context.WithTimeout(ctx, trafficTimeout)
	defer cancel()
	request := client.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix(top.Path)
	for _, k := range wanted {
		request = request.Param("service", k.namespace+"/"+k.name)
	}
	if all {
		request = request.Param("all", "true")
	}
	result := request.Do(ctx)
	result.StatusCode(&status)
	data, err := result.Raw()
	switch {
	case status == http.StatusNotFound:
		return nil, status, "not a node of Portal's, or an older one: it does not count"
	case err != nil:
		return nil, status, reasonOf(data)
	}
	var sample top.Sample
	if err := json.Unmarshal(data, &sample); err != nil {
		return nil, status, "answers something else than figures"
	}
	return &sample, status, ""
}

// reasonOf is why a node gave no sample: its own words, those of the API server that could not reach it, or none.
func reasonOf(body []byte) string {
	var status metav1.Status
	if json.Unmarshal(body, &status) == nil {
		return cmp.Or(status.Message, "does not answer")
	}
	return cmp.Or(strings.TrimSpace(string(body[:min(len(body), 200)])), "does not answer")
}

// take adds what one node counted.
func (c *Collected) take(sample *top.Sample) {
	c.Bytes, c.Latency = c.Bytes || sample.Accounting, c.Latency || sample.Timestamps
	for i := range sample.Services {
		one := &sample.Services[i]
		k := key{one.Namespace, one.Name}
		if c.services[k] == nil {
			c.services[k] = &Rates{}
		}
		c.services[k].add(&one.Counts)
		for j := range one.Endpoints {
			e := &one.Endpoints[j]
			if c.endpoints[k] == nil {
				c.endpoints[k] = map[string]*Rates{}
			}
			name := ""
			if e.Address.IsValid() {
				name = e.Address.Addr().String()
			}
			if c.endpoints[k][name] == nil {
				c.endpoints[k][name] = &Rates{}
			}
			c.endpoints[k][name].add(&e.Counts)
		}
	}
}

// current is what was collected last, nil if nothing was, and what is closed at the next time.
func (t *traffic) current() (*Collected, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last, t.changed
}

// OverviewTraffic is what a page with all Services gets; Services has new connections, open ones, bytes and resets of each.
type OverviewTraffic struct {
	*Collected
	Services map[string][4]float64 `json:"services"`
}

// ServiceTraffic is what a Service's page gets.
type ServiceTraffic struct {
	*Collected
	Rates     Rates             `json:"rates"`
	Endpoints map[string]*Rates `json:"endpoints"`
}

// ofAll has the Services that the session may see.
func (c *Collected) ofAll(f *feed) OverviewTraffic {
	out := OverviewTraffic{c, map[string][4]float64{}}
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, r := range c.services {
		if e := f.services[k]; e != nil && e.svc != nil {
			out.Services[k.namespace+"/"+k.name] = [4]float64{round(r.New), float64(r.Open), round(r.Bytes), round(r.Resets)}
		}
	}
	return out
}

func (c *Collected) ofOne(f *feed, k key) ServiceTraffic {
	out := ServiceTraffic{Collected: c, Endpoints: map[string]*Rates{}}
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.services[k]; e == nil || e.svc == nil {
		return out
	}
	if r := c.services[k]; r != nil {
		out.Rates = *r
	}
	if list := c.endpoints[k]; list != nil {
		out.Endpoints = list
	}
	return out
}

// round leaves out digits that nobody reads.
func round(v float64) float64 { return float64(int64(v*100+.5)) / 100 }

// stream sends what is collected, until ctx ends.
func (t *traffic) stream(ctx context.Context, to *events, f *feed, only *key) error {
	release, err := t.want(f, only)
	if err != nil {
		return err
	}
	defer release()
	return pump(ctx, to, "traffic", func() ([]byte, <-chan struct{}, error) {
		now, changed := t.current()
		if now == nil {
			return nil, changed, nil
		}
		var out any = now.ofAll(f)
		if only != nil {
			out = now.ofOne(f, *only)
		}
		data, err := json.Marshal(out)
		return data, changed, err
	})
}

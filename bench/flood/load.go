package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/bench/report"
	"portal/test/harness"
)

const (
	configMaps = "/api/v1/namespaces/default/configmaps"
	nodeLeases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
	leaderPath = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
	nodes      = 20
)

// tokens are those of an ordinary user who floods, another who works, nodes, and a controller that leads.
func tokens() string {
	text := `flooder,flooder,1,""
second,second,2,""
leader,system:kube-controller-manager,3,""
`
	for i := range nodes {
		text += fmt.Sprintf("%s,system:node:%[1]s,node-%d,system:nodes\n", nodeName(i), i)
	}
	return text
}

func nodeName(i int) string { return fmt.Sprintf("node-%d", i) }

// prepare lets the users do what they do, and makes objects to ask for.
func prepare(ctx context.Context, api *harness.API, objects int) error {
	client, err := harness.Connect(api.Kubeconfig)
	if err != nil {
		return err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "bench-flood"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
	}
	for _, name := range []string{"flooder", "second", "system:kube-controller-manager"} {
		binding.Subjects = append(binding.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: "User", Name: name})
	}
	if _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return err
	}
	who := newUser(api.URL, "second")
	for _, user := range []string{"second", "flooder", "leader"} { // the binding counts when the server's authorizer has seen it
		if err := newUser(api.URL, user).wait(ctx, configMaps); err != nil {
			return err
		}
	}
	if err := report.Each(ctx, 8, objects, func(i int) error {
		if code, err := who.ask(ctx, "POST", configMaps, configMap(fmt.Sprintf("object-%d", i))); code != http.StatusCreated {
			return fmt.Errorf("create a ConfigMap: %d %w", code, err)
		}
		return nil
	}); err != nil {
		return err
	}
	for i := range nodes {
		body := fmt.Sprintf(`{"metadata":{"name":%q},"spec":{"holderIdentity":%[1]q}}`, nodeName(i))
		if code, err := who.ask(ctx, "POST", nodeLeases, body); code != http.StatusCreated {
			return fmt.Errorf("create a Lease: %d %w", code, err)
		}
	}
	if code, err := who.ask(ctx, "POST", leaderPath, `{"metadata":{"name":"leader"},"spec":{"holderIdentity":"me"}}`); code != http.StatusCreated {
		return fmt.Errorf("create a Lease: %d %w", code, err)
	}
	return nil
}

func configMap(name string) string {
	return fmt.Sprintf(`{"metadata":{"name":%q},"data":{"text":%q}}`, name, strings.Repeat("x", 1000))
}

// user is a client with a token and connections of its own.
type user struct {
	url, token string
	client     *http.Client
	mu         sync.Mutex
	failed     map[string]int
}

func newUser(url, token string) *user {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, MaxIdleConnsPerHost: 64} //nolint:gosec // loopback
	return &user{url: url, token: token, client: &http.Client{Transport: transport, Timeout: time.Minute}, failed: map[string]int{}}
}

// ask sends a request and reads the answer to its end.
func (u *user) ask(ctx context.Context, method, path, body string) (int, error) {
	request, err := http.NewRequestWithContext(ctx, method, u.url+path, strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Authorization", "Bearer "+u.token)
	kind := "application/json"
	if method == http.MethodPatch {
		kind = "application/merge-patch+json"
	}
	request.Header.Set("Content-Type", kind)
	resp, err := u.client.Do(request)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// wait returns when the user may read a path.
func (u *user) wait(ctx context.Context, path string) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		code, err := u.ask(ctx, http.MethodGet, path, "")
		if code == http.StatusOK {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("user %s gets %d from %s after 10 seconds: %w", u.token, code, path, err)
		}
	}
}

// work asks for small things, 20 times a second, and returns how long each took.
func (u *user) work(ctx context.Context, during time.Duration) (out []time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	asks := []struct{ method, path, body string }{
		{"GET", configMaps + "/object-0", ""},
		{"GET", "/api/v1/namespaces/kube-system/services", ""},
		{"PATCH", configMaps + "/object-1", `{"data":{"changed":"%d"}}`},
		{"GET", "/api/v1/namespaces/default", ""},
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return out
		case <-tick.C:
		}
		ask := asks[i%len(asks)]
		body := ask.body
		if body != "" {
			body = fmt.Sprintf(body, i)
		}
		begun := time.Now()
		code, err := u.ask(ctx, ask.method, ask.path, body)
		if ctx.Err() != nil {
			return out
		}
		out = append(out, time.Since(begun))
		if code != http.StatusOK {
			u.mu.Lock()
			u.failed[fmt.Sprintf("%s %s of the second user: %d %v", ask.method, ask.path, code, err)]++
			u.mu.Unlock()
		}
	}
}

func (u *user) failures() (out []string) {
	for what, times := range u.failed {
		out = append(out, fmt.Sprintf("%s (%d times)", what, times))
	}
	slices.Sort(out)
	return out
}

// rate is how many requests a second were answered, and the CPU time that the server spent for each.
type rate struct {
	second float64
	cpu    time.Duration
}

func (r rate) String() string {
	return fmt.Sprintf("%.0f (%s)", r.second, r.cpu.Round(time.Microsecond))
}

// throughput is what 16 clients of one user reach in five seconds.
func throughput(ctx context.Context, api *harness.API, method string) (rate, error) {
	before, err := report.ReadOwn(api.Pid())
	if err != nil {
		return rate{}, err
	}
	const clients, during = 16, 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	var done atomic.Int64
	var wrong atomic.Int64
	var group sync.WaitGroup
	for c := range clients {
		who := newUser(api.URL, "second")
		group.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				path, body, want := configMaps+"/object-0", "", http.StatusOK
				if method == http.MethodPost {
					path, body, want = configMaps, configMap(fmt.Sprintf("made-%d-%d", c, i)), http.StatusCreated
				}
				code, _ := who.ask(ctx, method, path, body)
				switch {
				case code == want:
					done.Add(1)
				case ctx.Err() == nil:
					wrong.Add(1)
				}
			}
		})
	}
	group.Wait()
	if n := wrong.Load(); n > 0 {
		return rate{}, fmt.Errorf("%d of %d requests (%s) failed without a flood", n, n+done.Load(), method)
	}
	after, err := report.ReadOwn(api.Pid())
	return rate{float64(done.Load()) / during.Seconds(), (after.CPU - before.CPU) / time.Duration(max(1, done.Load()))}, err
}

// flood asks for everything over many connections until ctx ends, and prints what came of it.
func flood(ctx context.Context, opts options) {
	everything := []string{
		"/api/v1/configmaps", "/api/v1/services", "/api/v1/secrets", "/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces", "/api/v1/events",
		"/apis/coordination.k8s.io/v1/leases", "/apis/discovery.k8s.io/v1/endpointslices", "/apis/rbac.authorization.k8s.io/v1/clusterroles",
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "/apis", "/openapi/v2", configMaps + "/object-2",
	}
	ctx, cancel := context.WithTimeout(ctx, opts.duration)
	defer cancel()
	var good, refused, other atomic.Int64
	var group sync.WaitGroup
	for c := range opts.connections {
		who := newUser(opts.child, "flooder")
		group.Go(func() {
			for i := c; ctx.Err() == nil; i++ {
				method, path, body := "GET", everything[i%len(everything)], ""
				if i%20 == 0 {
					method, path, body = "POST", configMaps, configMap(fmt.Sprintf("flood-%d-%d", c, i))
				}
				switch code, _ := who.ask(ctx, method, path, body); {
				case code >= 200 && code < 300:
					good.Add(1)
				case code == http.StatusTooManyRequests:
					refused.Add(1)
				default:
					other.Add(1)
				}
			}
		})
	}
	group.Wait()
	fmt.Printf("%d/%d", good.Load(), refused.Load())
}

// renewals renew Leases as nodes and a leader do, only more often.
type renewals struct {
	url    string
	group  sync.WaitGroup
	mu     sync.Mutex
	worst  map[string]time.Duration
	failed map[string]int
}

func newRenewals(url string) *renewals {
	r := &renewals{url: url, worst: map[string]time.Duration{}, failed: map[string]int{}}
	r.group.Add(1)
	return r
}

func (r *renewals) run(ctx context.Context) {
	defer r.group.Done()
	for i := range nodes {
		r.group.Go(func() { r.renew(ctx, "node", nodeName(i), nodeLeases+"/"+nodeName(i), 5*time.Second) })
	}
	r.group.Go(func() { r.renew(ctx, "leader", "leader", leaderPath+"/leader", 2*time.Second) })
}

func (r *renewals) renew(ctx context.Context, who, token, path string, every time.Duration) {
	client := newUser(r.url, token)
	last := time.Now()
	for {
		body := fmt.Sprintf(`{"spec":{"renewTime":%q}}`, time.Now().UTC().Format("2006-01-02T15:04:05.000000Z"))
		code, err := client.ask(ctx, "PATCH", path, body)
		if ctx.Err() != nil {
			return
		}
		r.mu.Lock()
		if code == http.StatusOK {
			r.worst[who] = max(r.worst[who], time.Since(last)-every)
			last = time.Now()
		} else {
			r.failed[fmt.Sprintf("renewal by %s: %d %v", who, code, err)]++
		}
		r.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
	}
}

// wait returns the longest delays of renewals and the failures.
func (r *renewals) wait() (node, leader time.Duration, failed []string) {
	r.group.Wait()
	for what, times := range r.failed {
		failed = append(failed, fmt.Sprintf("%s (%d times)", what, times))
	}
	slices.Sort(failed)
	return r.worst["node"], r.worst["leader"], failed
}

// peakMemory follows the anonymous memory of a process, in MB, until ctx ends.
func peakMemory(ctx context.Context, pid int) (peak float64) {
	for {
		if u, err := report.ReadOwn(pid); err == nil {
			peak = max(peak, u.Anonymous)
		}
		select {
		case <-ctx.Done():
			return peak
		case <-time.After(500 * time.Millisecond):
		}
	}
}

package test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"portal/internal/lab"
	"portal/internal/reports"
	"portal/internal/reports/publish"
	"portal/test/harness"
)

// reportTokens are those of parts on machines, and of somebody who may view.
const reportTokens = `proxy-1,system:portal:proxy:node1,1,"system:portal:proxies"
dns-1,system:portal:dns:node1,2,"system:portal:dns"
lb-1,system:portal:lb:node1,3,"system:portal:lb"
node-1,system:node:node1,4,"system:nodes"
proxy-none,system:portal:proxy,5,"system:portal:proxies"
viewer,viewer,6,""
stranger,stranger,7,""
`

// reported reads a report; nil if there is none.
func reported(t testing.TB, c *caller, name string) *reports.Report {
	t.Helper()
	code, answer := c.ask(t, "GET", reports.APIPath+"/"+name, "")
	if code == http.StatusNotFound {
		return nil
	}
	r, err := reports.Parse([]byte(answer))
	if code != http.StatusOK || err != nil {
		t.Fatalf("%s: %d %s", name, code, answer)
	}
	return r
}

// TestNodeReports: the server serves NodeReports from its start; a part's publisher writes its own when something changes, and it goes with
// the Node and comes back with it. Nobody writes another's.
func TestNodeReports(t *testing.T) {
	t.Parallel()
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	if err := os.WriteFile(tokens, []byte(reportTokens), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--token-auth-file", tokens)
	client, root := connect(t, api.Kubeconfig), admin(t, api)
	makeNode := func(name string) *corev1.Node {
		n, err := client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	node := makeNode("node1")
	makeNode("node2")
	within(t, "NodeReports are not served", func() error {
		if code, answer := root.ask(t, "GET", reports.APIPath, ""); code != http.StatusOK {
			return fmt.Errorf("%d %s", code, answer)
		}
		return nil
	})

	var mu sync.Mutex
	status := reports.Status{State: reports.Starting, Mode: "nftables"}
	set := func(s reports.Status) { mu.Lock(); defer mu.Unlock(); status = s }
	writes := 0
	p, err := publish.New(publish.Options{
		Config: &rest.Config{Host: api.URL, BearerToken: "proxy-1", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}, Node: "node1", Part: reports.Proxy, Version: "test",
		Status: func() reports.Status { mu.Lock(); defer mu.Unlock(); return status },
		Wrote:  func(*reports.Report) { mu.Lock(); defer mu.Unlock(); writes++ },
		Log:    slog.New(slog.DiscardHandler), Pacing: reports.Pacing{Burst: 1000, Refresh: time.Hour},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); p.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	const name = "node1.proxy"
	state := func(want reports.State) func() error {
		return func() error {
			if r := reported(t, root, name); r == nil || r.Status.State != want {
				return fmt.Errorf("the report is %+v", r)
			}
			return nil
		}
	}
	within(t, "no report", state(reports.Starting))
	set(reports.Status{State: reports.Degraded, Mode: "nftables", Message: "the kernel refuses 1 frontend", Refused: &reports.Refused{Count: 1, Some: []string{"10.96.0.1:80/TCP: no memory"}}})
	within(t, "a change is not reported", state(reports.Degraded))
	r := reported(t, root, name)
	if o := r.OwnerReferences; len(o) != 1 || o[0].UID != node.UID || r.Status.Version != "test" || r.Status.Since.IsZero() || r.Status.Refused.Count != 1 || len(r.ManagedFields) != 0 {
		t.Errorf("the report is %+v", r)
	}
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "kubectl", "--kubeconfig", api.Kubeconfig, "get", "nodereports")
	if err != nil || !strings.Contains(out, "STATE") || !strings.Contains(out, "Degraded") || !strings.Contains(out, "nftables") || !strings.Contains(out, "the kernel refuses 1 frontend") {
		t.Errorf("kubectl get nodereports: %v\n%s", err, out)
	}

	// Nobody writes another's.
	body := func(node, part, owner string) string {
		return fmt.Sprintf(`{"apiVersion":"portal.dev/v1alpha1","kind":"NodeReport","metadata":{"name":"%s.%s","ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"%s","uid":"u"}]},
			"node":"%s","part":"%s","status":{"state":"Running","since":"2026-01-01T00:00:00Z","updated":"2026-01-01T00:00:00Z"}}`, node, part, owner, node, part)
	}
	for _, c := range []struct {
		who, node, part, owner string
		want                   int
	}{
		{"dns-1", "node1", "dns", "node1", 201}, {"lb-1", "node1", "lb", "node1", 201}, {"node-1", "node1", "agent", "node1", 201},
		{"proxy-1", "node2", "proxy", "node2", 403}, {"proxy-1", "node1", "dns", "node1", 403}, {"dns-1", "node1", "proxy", "node1", 403},
		{"lb-1", "node2", "lb", "node2", 403}, {"node-1", "node2", "agent", "node2", 403}, {"node-1", "node1", "proxy", "node2", 403},
		{"proxy-none", "node1", "proxy", "node1", 403}, {"viewer", "node1", "proxy", "node1", 403}, {"stranger", "node1", "proxy", "node1", 403},
	} {
		if code, answer := somebody(api, c.who).ask(t, "POST", reports.APIPath, body(c.node, c.part, c.owner)); code != c.want {
			t.Errorf("%s writes the report of %s on %s owned by %s: %d, want %d: %s", c.who, c.part, c.node, c.owner, code, c.want, answer)
		}
	}
	for _, c := range []struct{ who, method, path string }{
		{"proxy-1", "DELETE", name}, {"node-1", "DELETE", name}, {"node-1", "GET", "node2.proxy"}, {"node-1", "GET", ""}, {"proxy-1", "GET", ""}, {"stranger", "GET", ""},
	} {
		if code, answer := somebody(api, c.who).ask(t, c.method, strings.TrimSuffix(reports.APIPath+"/"+c.path, "/"), ""); code != 403 {
			t.Errorf("%s: %s %s: %d %s", c.who, c.method, c.path, code, answer)
		}
	}
	if code, answer := root.ask(t, "POST", reports.APIPath, strings.Replace(body("node2", "dns", "node2"), `"Running"`, `"Odd"`, 1)); code != 422 || !strings.Contains(answer, "status.state") {
		t.Errorf("a wrong state: %d %s", code, answer)
	}
	_, err = client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "viewer"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "viewer"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	within(t, "who may view does not see reports", func() error {
		if code, answer := somebody(api, "viewer").ask(t, "GET", reports.APIPath, ""); code != 200 {
			return fmt.Errorf("%d %s", code, answer)
		}
		return nil
	})

	// It goes with the Node, and comes back with the next one of that name.
	if err := client.CoreV1().Nodes().Delete(t.Context(), "node1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "reports stay when their Node has gone", func() error {
		for _, left := range []string{name, "node1.agent"} {
			if reported(t, root, left) != nil {
				return fmt.Errorf("%s is there", left)
			}
		}
		return nil
	})
	next := makeNode("node1")
	set(reports.Status{State: reports.Failing, Mode: "nftables"})
	within(t, "no report of the new Node", func() error {
		if r := reported(t, root, name); r == nil || r.OwnerReferences[0].UID != next.UID {
			return fmt.Errorf("the report is %+v", r)
		}
		return nil
	})
	mu.Lock()
	if writes > 5 {
		t.Errorf("%d writes for 3 changes and a Node that came back", writes)
	}
	mu.Unlock()
	cancel()
	<-ended
}

// TestLabReports: the parts of a node of a lab report, and what is done to the proxy's rules is in its report.
func TestLabReports(t *testing.T) {
	t.Parallel()
	l := startLab(t, lab.Options{Nodes: 1})
	get := func(name string) (*reports.Report, error) {
		out, err := harness.Run(t.Context(), nil, harness.Portal(), "kubectl", "--kubeconfig", l.Kubeconfig, "get", "nodereport", name, "-o", "json")
		if err != nil {
			return nil, err
		}
		return reports.Parse([]byte(out))
	}
	for _, part := range []string{reports.Proxy, reports.DNS, reports.Agent} {
		within(t, "the "+part+" does not report", func() error {
			r, err := get("node1." + part)
			if err == nil && (r.Status.State != reports.Running || part != reports.Agent && (r.Status.Synced == nil || r.Status.Synced.Revision == "")) {
				err = fmt.Errorf("%+v", r.Status)
			}
			return err
		})
	}
	on(t, l.Node("node1"), "nft", "flush", "ruleset")
	within(t, "drift is not reported", func() error {
		r, err := get("node1.proxy")
		if err == nil && (r.Status.State != reports.Degraded || r.Status.Drift == nil) {
			err = fmt.Errorf("%+v", r.Status)
		}
		return err
	})
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "status", "--kubeconfig", l.Kubeconfig)
	if !strings.Contains(out, "somebody changes") {
		t.Errorf("portal status: %v\n%s", err, out)
	}
}

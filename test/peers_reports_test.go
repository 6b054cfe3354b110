//go:build peers

package test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/explain"
	"portal/internal/reports"
	"portal/internal/reports/publish"
	"portal/test/harness"
)

// explained runs portal explain, and returns its answer and exit status.
func explained(t *testing.T, kubeconfig string, args ...string) (a explain.Answer, code int) {
	t.Helper()
	var out, mistakes bytes.Buffer
	cmd := exec.CommandContext(t.Context(), harness.Portal(), append([]string{"explain", "-o", "json", "--kubeconfig", kubeconfig}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &mistakes
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || json.Unmarshal(out.Bytes(), &a) != nil {
		t.Fatalf("portal explain %v: %v\n%s%s", args, err, &out, &mistakes)
	}
	return a, cmd.ProcessState.ExitCode()
}

func codesOf(a explain.Answer) (out []string) {
	for _, f := range a.Findings {
		out = append(out, f.Code)
	}
	return out
}

// viewerOf makes an account with the ClusterRole view and nothing else, and a kubeconfig of it.
func viewerOf(t *testing.T, api *harness.API, client *kubernetes.Clientset) (kubeconfig string, config *rest.Config) {
	t.Helper()
	accounts := client.CoreV1().ServiceAccounts("default")
	if _, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "viewer"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "viewer"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "viewer"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	token, err := accounts.CreateToken(t.Context(), "viewer", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig = filepath.Join(t.TempDir(), "viewer.kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(strings.Replace(string(text), harness.KubeToken, token.Status.Token, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		t.Fatal(err)
	}
	return kubeconfig, config
}

// TestPeersExplain: explain and status work against Kubernetes' own servers, for somebody who may view and nothing else; they say what they
// could not see, and conclude nothing from it. A part installs the definition of NodeReports where it may, and does without where it may not.
func TestPeersExplain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need(t, harness.Portal(), "build")
	need(t, harness.Peer("kube-apiserver"), "peers")
	api, err := harness.StartKubeAPIServer(dir, startEtcd(t, 1)[0].ClientURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	startPeer(t, dir, "kube-controller-manager", "--kubeconfig", api.Kubeconfig, "--authentication-kubeconfig", api.Kubeconfig,
		"--authorization-kubeconfig", api.Kubeconfig, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(harness.FreePort()),
		"--cert-dir", filepath.Join(dir, "kcm"), "--node-monitor-grace-period", "1h", "--controllers",
		"endpointslice-controller,endpoints-controller,node-lifecycle-controller,garbage-collector-controller,clusterrole-aggregation-controller,serviceaccount-controller,namespace-controller")
	client := connect(t, api.Kubeconfig)
	if _, err := harness.StartFakeKubelet(t.Context(), client, "n1", "n2"); err != nil {
		t.Fatal(err)
	}
	kubectl := func(manifest string) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "m.yaml")
		if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := harness.Run(t.Context(), nil, harness.Portal(), "kubectl", "--kubeconfig", api.Kubeconfig, "apply", "-f", path); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	pod := func(name, node string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, labels: {app: web}}\nspec: {nodeName: %s, containers: [{name: web, image: web, ports: [{containerPort: 8080}]}]}\n---\n", name, node)
	}
	service := func(name, app string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {selector: {app: %s}, ports: [{port: 80, targetPort: 8080}]}\n---\n", name, app)
	}
	kubectl(pod("web-1", "n1") + pod("web-2", "n2") + service("good", "web") + service("typo", "wbe") +
		"apiVersion: v1\nkind: Service\nmetadata: {name: alias}\nspec: {type: ExternalName, externalName: db.example.com}\n")
	kubectl("apiVersion: v1\nkind: Pod\nmetadata: {name: dns, namespace: kube-system, labels: {k8s-app: kube-dns}}\nspec: {nodeName: n1, containers: [{name: dns, image: dns}]}\n---\n" +
		"apiVersion: v1\nkind: Service\nmetadata: {name: kube-dns, namespace: kube-system}\nspec: {selector: {k8s-app: kube-dns}, ports: [{name: dns, port: 53, protocol: UDP}]}\n")
	viewer, config := viewerOf(t, api, client)

	within(t, "a Service in order is not called so", func() error {
		if a, code := explained(t, viewer, "service", "good"); code != 0 || !a.Healthy || len(a.Findings) > 0 {
			return fmt.Errorf("exit status %d: %+v", code, a)
		}
		return nil
	})
	a, code := explained(t, viewer, "service", "typo")
	if code != 1 || !slices.Contains(codesOf(a), "selector-typo") || !strings.Contains(a.Verdict, "app=wbe") {
		t.Errorf("exit status %d: %+v", code, a)
	}
	unseen := strings.Join(a.Unseen, "\n")
	for _, what := range []string{"nodes: forbidden", "leases: forbidden", "ingressclasses: forbidden"} {
		if !strings.Contains(unseen, what) {
			t.Errorf("it does not say that it could not see %s:\n%s", what, unseen)
		}
	}
	if strings.Contains(unseen, reports.Resource) {
		t.Errorf("it misses NodeReports, which this API does not have:\n%s", unseen)
	}
	all, code := explained(t, viewer)
	for _, c := range codesOf(all) {
		if c != "selector-typo" {
			t.Errorf("a false alarm: %s in %+v", c, all.Findings)
		}
	}
	if code != 1 || !slices.Contains(codesOf(all), "selector-typo") {
		t.Errorf("exit status %d: %+v", code, all)
	}
	if a, code := explained(t, viewer, "address", "192.0.2.200"); code == 2 || a.Verdict == "" {
		t.Errorf("exit status %d: %+v", code, a)
	}
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "status", "--kubeconfig", viewer)
	if !strings.Contains(out, "selector") || !strings.Contains(out, "could not see nodes: forbidden") {
		t.Errorf("portal status: %v\n%s", err, out)
	}

	// An account that may not install the definition does without, with one line.
	var log bytes.Buffer
	pacing := reports.Pacing{Burst: 1000, Refresh: time.Hour}
	running := func() reports.Status {
		return reports.Status{State: reports.Failing, Mode: "nftables", Message: "no memory"}
	}
	publisher := func(config *rest.Config, log *slog.Logger) func(time.Duration) {
		p, err := publish.New(publish.Options{Config: config, Node: "n1", Part: reports.Proxy, Status: running, Log: log, Pacing: pacing})
		if err != nil {
			t.Fatal(err)
		}
		return func(d time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			p.Run(ctx)
		}
	}
	publisher(config, slog.New(slog.NewTextHandler(&log, nil)))(4 * time.Second)
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "does not report") {
		t.Errorf("%d lines of log:\n%s", n, &log)
	}
	root, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	go publisher(root, slog.New(slog.DiscardHandler))(2 * time.Minute)
	within(t, "no report", func() error {
		out, err := harness.Run(t.Context(), nil, harness.Portal(), "kubectl", "--kubeconfig", api.Kubeconfig, "get", "nodereports")
		if err == nil && !strings.Contains(out, "n1.proxy") {
			err = errors.New(out)
		}
		return err
	})
	// Now there are some, which the viewer does not see, and the administrator does.
	if a, _ := explained(t, viewer, "service", "good"); !strings.Contains(strings.Join(a.Unseen, "\n"), reports.Resource+": forbidden") {
		t.Errorf("it does not say that it could not see NodeReports: %q", a.Unseen)
	}
	if a, _ := explained(t, api.Kubeconfig, "service", "good"); !slices.Contains(codesOf(a), "proxy-failing") {
		t.Errorf("what the proxy reports is not found: %+v", a)
	}
}

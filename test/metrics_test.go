package test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/intent"
	"portal/test/harness"
)

// series reads metrics in the text format, strictly: every sample once, and every name with one type and a help text.
func series(t *testing.T, status int, text string) map[string]string {
	t.Helper()
	if status != http.StatusOK {
		t.Fatalf("/metrics: status %d: %s", status, text)
	}
	samples, help, kind := map[string]string{}, map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		words := strings.SplitN(line, " ", 4)
		switch {
		case line == "":
		case strings.HasPrefix(line, "# HELP "):
			help[words[2]] = len(words) == 4
		case strings.HasPrefix(line, "# TYPE "):
			if kind[words[2]] || !help[words[2]] {
				t.Errorf("%s: no help text, or twice", line)
			}
			kind[words[2]] = true
		default:
			at := strings.LastIndex(line, " ")
			if at < 0 || samples[line[:at]] != "" {
				t.Errorf("not a sample, or twice: %s", line)
				continue
			}
			samples[line[:at]] = line[at+1:]
		}
	}
	return samples
}

// wantSeries demands samples whose names begin with these and whose values are not 0.
func wantSeries(t *testing.T, samples map[string]string, prefixes ...string) {
	t.Helper()
	for _, prefix := range prefixes {
		found := false
		for name, value := range samples {
			found = found || strings.HasPrefix(name, prefix) && value != "0"
		}
		if !found {
			t.Errorf("no sample %s… that is not 0", prefix)
		}
	}
}

// TestServerMetrics uses the API in many ways, and then gathers the metrics twice.
func TestServerMetrics(t *testing.T) {
	t.Parallel()
	api := startPortal(t)
	client, raw := connect(t, api.Kubeconfig), admin(t, api)
	services := client.CoreV1().Services("default")
	watching, err := services.Watch(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watching.Stop()
	for i, spec := range []string{`{"type":"NodePort","ports":[{"port":80}]}`, `{"ports":[{"port":80}],"selector":{"a":"b"}}`, `{"clusterIP":"1.2.3.4","ports":[{"port":80}]}`} {
		raw.ask(t, "POST", "/api/v1/namespaces/default/services", serviceBody(fmt.Sprintf("s%d", i), spec))
	}
	raw.ask(t, "GET", "/api/v1/services?limit=1", "")
	raw.ask(t, "GET", "/api/v1/nothing", "")
	raw.ask(t, "DELETE", "/api/v1/namespaces/default/services/s0", "")
	raw.ask(t, "POST", "/portal/v1/audit", "")
	somebody(api, "wrong").ask(t, "GET", "/api/v1/services", "")
	for range 2 {
		code, text := raw.ask(t, "GET", "/metrics", "")
		wantSeries(t, series(t, code, text),
			`apiserver_request_total{code="201"`, `apiserver_request_total{code="422"`, "apiserver_request_duration_seconds_count",
			"apiserver_longrunning_requests", "workqueue_adds_total", "go_goroutines", "process_cpu_seconds_total")
	}
}

// TestControllersMetrics has `portal controllers` do some work, and then gathers its metrics twice.
func TestControllersMetrics(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	at := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	controllers, err := harness.Start(t.TempDir(), "controllers", harness.Portal(), "controllers", "--kubeconfig", api.Kubeconfig, "--metrics-bind-address", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(controllers.Kill)
	raw, client := admin(t, api), connect(t, api.Kubeconfig)
	raw.ask(t, "POST", "/api/v1/namespaces/default/services", serviceBody("web", `{"ports":[{"port":80}],"selector":{"a":"b"}}`))
	waitFor(t, "the Service has a slice", func() bool {
		list, err := client.DiscoveryV1().EndpointSlices("default").List(context.Background(), metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
		return err == nil && len(list.Items) == 1
	})
	for range 2 {
		answer, err := http.Get("http://" + at + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		wantSeries(t, series(t, answer.StatusCode, string(text)), "workqueue_adds_total", "go_goroutines", "process_cpu_seconds_total")
	}
}

// TestProxyMetrics carries traffic through a proxy whose Services change, and then gathers its metrics twice.
func TestProxyMetrics(t *testing.T) {
	rootOnly(t)
	t.Parallel()
	l := newProxyLab(t, "nftables")
	l.start(t)
	l.synced(t)
	pods := l.LocalPods(intent.IPv4)
	l.create(t, labService("web", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort }), labSlice("web", intent.IPv4, pods, pods))
	l.create(t, labService("empty", nil))
	l.settled(t, 30*time.Second)
	l.endpoints(t, "web", pods[:1]...)
	l.settled(t, 30*time.Second)
	if err := l.client.CoreV1().Services(labNamespace).Delete(context.Background(), "empty", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	l.settled(t, 30*time.Second)
	for range 2 {
		code, body, err := l.get("/metrics")
		if err != nil {
			t.Fatal(err)
		}
		wantSeries(t, series(t, code, string(body)), "kubeproxy_sync_proxy_rules_duration_seconds_count",
			"kubeproxy_sync_proxy_rules_service_changes_total", "kubeproxy_sync_proxy_rules_endpoint_changes_total", "go_goroutines", "process_cpu_seconds_total")
	}
}

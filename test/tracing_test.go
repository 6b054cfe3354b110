package test

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"portal/test/harness"
)

// collector receives spans as OpenTelemetry's own collectors do: OTLP over gRPC.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer
	address string

	mu    sync.Mutex
	spans map[string]*tracev1.Span // by ID
}

func startCollector(t *testing.T) *collector {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &collector{address: l.Addr().String(), spans: map[string]*tracev1.Span{}}
	server := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(server, c)
	done := make(chan error)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		<-done
	})
	return c
}

// Export is what servers call.
func (c *collector) Export(_ context.Context, r *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range r.ResourceSpans {
		for _, scope := range resource.ScopeSpans {
			for _, s := range scope.Spans {
				c.spans[string(s.SpanId)] = s
			}
		}
	}
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

// of are the spans whose names fit.
func (c *collector) of(name string) (out []*tracev1.Span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if s.Name == name {
			out = append(out, s)
		}
	}
	return out
}

// within says whether a span is part of another, at any depth.
func (c *collector) within(s, outer *tracev1.Span) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s != nil && string(s.SpanId) != string(outer.SpanId) {
		s = c.spans[string(s.ParentSpanId)]
	}
	return s != nil
}

func (c *collector) names() (out []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		out = append(out, fmt.Sprintf("%s %v", s.Name, s.Attributes))
	}
	return out
}

// tracing are the flags of a server whose spans go to an address.
func tracing(t *testing.T, address, more string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tracing.yaml")
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpoint: " + address + "\n" + more
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--tracing-config-file", file}
}

const (
	callersTrace = "0af7651916cd43dd8448eb211c80319c"
	callersSpan  = "b7ad6b7169203331"
)

// TestTracing: a request whose caller traces it continues the caller's trace, through admission down to etcd, inside the server and outside.
// Other requests are not recorded.
func TestTracing(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"embedded", "external"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			c := startCollector(t)
			args := tracing(t, c.address, "")
			if kind == "external" {
				args = append(args, "--etcd-servers", startEtcd(t, 1)[0].ClientURL)
			}
			api := startPortal(t, args...)
			raw := admin(t, api)
			traced := raw.with(http.Header{"Traceparent": {"00-" + callersTrace + "-" + callersSpan + "-01"}})
			const path = "/api/v1/namespaces/default/services"
			if code, text := traced.ask(t, "POST", path, serviceBody("web", `{"ports":[{"port":80}]}`)); code != http.StatusCreated {
				t.Fatal(code, text)
			}
			raw.ask(t, "GET", path+"/web", "")
			if err := api.Stop(time.Minute); err != nil { // which exports what is left
				t.Fatal(err)
			}
			requests := c.of("POST /api/v1/namespaces/{:namespace}/services")
			if len(requests) != 1 {
				t.Fatalf("%d spans of the request among %q", len(requests), c.names())
			}
			request := requests[0]
			if trace, parent := hex.EncodeToString(request.TraceId), hex.EncodeToString(request.ParentSpanId); trace != callersTrace || parent != callersSpan {
				t.Errorf("the request is part of span %s of trace %s; want %s of %s", parent, trace, callersSpan, callersTrace)
			}
			for _, name := range []string{"Create", "Mutating admission", "Validating admission", "Create etcd3", "etcdserverpb.KV/Txn"} {
				found := 0
				for _, s := range c.of(name) {
					if c.within(s, request) {
						found++
					}
				}
				if found == 0 {
					t.Errorf("the request has no span %q among %q", name, c.names())
				}
			}
			if other := c.of("GET /api/v1/namespaces/{:namespace}/services/{:name}"); len(other) > 0 {
				t.Errorf("a request that its caller did not trace was recorded: %v", other)
			}
		})
	}
}

// TestTracingSamples: with a rate, the server itself chooses requests to record: those of kubectl, for example.
func TestTracingSamples(t *testing.T) {
	t.Parallel()
	c := startCollector(t)
	api := startPortal(t, tracing(t, c.address, "samplingRatePerMillion: 1000000\n")...)
	if out, err := exec.CommandContext(t.Context(), harness.Portal(), "kubectl", "--kubeconfig", api.Kubeconfig, "get", "services").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := api.Stop(time.Minute); err != nil {
		t.Fatal(err)
	}
	for _, s := range c.of("GET /api/v1/namespaces/{:namespace}/services") {
		for _, a := range s.Attributes {
			if a.Key == "http.target" && strings.HasPrefix(a.Value.GetStringValue(), "/api/v1/namespaces/default/services?limit=500") {
				return
			}
		}
	}
	t.Errorf("kubectl's request is not among %q", c.names())
}

// TestTracingCollectorAway: a collector that is not there hinders neither requests nor the end of the server, and the log says so.
func TestTracingCollectorAway(t *testing.T) {
	t.Parallel()
	api := startPortal(t, tracing(t, fmt.Sprintf("127.0.0.1:%d", harness.FreePort()), "samplingRatePerMillion: 1000000\n")...)
	if code, text := admin(t, api).ask(t, "GET", "/api/v1/services", ""); code != http.StatusOK {
		t.Fatal(code, text)
	}
	waitFor(t, "the log says that spans are lost", func() bool { return strings.Contains(api.Tail(), "spans could not be exported") })
	if err := api.Stop(time.Minute); err != nil {
		t.Fatal(err)
	}
}

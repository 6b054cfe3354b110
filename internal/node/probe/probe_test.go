package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	grpchealth "google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

func ask1(t *testing.T, h corev1.ProbeHandler, target Target) error {
	t.Helper()
	check, err := New(h, target)
	if err != nil {
		return err
	}
	return ask(t.Context(), time.Second, check)
}

func wantError(t *testing.T, what string, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v", what, err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("%s: %v, want %q", what, err, want)
	}
}

func TestHTTP(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/status/{code}", func(w http.ResponseWriter, r *http.Request) {
		var code int
		fmt.Sscan(r.PathValue("code"), &code)
		w.WriteHeader(code)
	})
	mux.HandleFunc("/near", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/status/500", http.StatusFound) })
	mux.HandleFunc("/far", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://192.0.2.1/", http.StatusFound)
	})
	mux.HandleFunc("/slow", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/headers", func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "example.com" || r.Header.Get("X-One") != "1" || r.Header.Get("User-Agent") != "mine" || r.URL.RawQuery != "a=b" {
			w.WriteHeader(http.StatusTeapot)
		}
	})
	for _, scheme := range []corev1.URIScheme{corev1.URISchemeHTTP, corev1.URISchemeHTTPS} {
		server := httptest.NewServer(mux)
		if scheme == corev1.URISchemeHTTPS {
			server.Close()
			server = httptest.NewTLSServer(mux)
		}
		defer server.Close()
		at := netip.MustParseAddrPort(server.Listener.Addr().String())
		target := Target{Address: at.Addr(), Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: int32(at.Port())}}}
		for path, want := range map[string]string{
			"/status/200": "", "/status/399": "", "/status/400": "HTTP status 400", "status/204": "", "/near": "HTTP status 500", "/far": "", "/slow": "no answer in time", "/headers?a=b": "",
		} {
			wantError(t, path, ask1(t, corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
				Scheme: scheme, Path: path, Port: intstr.FromString("web"), HTTPHeaders: []corev1.HTTPHeader{{Name: "Host", Value: "example.com"}, {Name: "X-One", Value: "1"}, {Name: "user-agent", Value: "mine"}},
			}}, target), want)
		}
	}
}

func TestTCPAndNone(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(l.Addr().String())
	target := Target{Address: at.Addr()}
	probe := corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(int32(at.Port()))}}
	wantError(t, "open", ask1(t, probe, target), "")
	l.Close()
	wantError(t, "closed", ask1(t, probe, target), "refused")
	probe.TCPSocket.Port = intstr.FromString("nobody")
	wantError(t, "no such name", ask1(t, probe, target), `port "nobody"`)
	wantError(t, "nothing", ask1(t, corev1.ProbeHandler{}, target), "none of exec")
}

func TestExec(t *testing.T) {
	target := Target{Exec: func(ctx context.Context, args []string) (int, string, error) {
		switch args[0] {
		case "ok":
			return 0, "", nil
		case "bad":
			return 2, "not\xffyet", nil
		case "missing":
			return 0, "", errors.New("no such program")
		}
		<-ctx.Done()
		return 0, "", ctx.Err()
	}}
	for command, want := range map[string]string{"ok": "", "bad": "exit code 2: not?yet", "missing": "no such program", "slow": "did not end in time"} {
		wantError(t, command, ask1(t, corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{command}}}, target), want)
	}
}

func TestGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, service := grpc.NewServer(), grpchealth.NewServer()
	grpc_health_v1.RegisterHealthServer(server, service)
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	at := netip.MustParseAddrPort(l.Addr().String())
	service.SetServingStatus("down", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	for name, want := range map[string]string{"": "", "down": "NOT_SERVING", "unknown": "unknown service"} {
		wantError(t, name, ask1(t, corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: int32(at.Port()), Service: ptr.To(name)}}, Target{Address: at.Addr()}), want)
	}
}

// TestWatch turns the clock: delays, periods and thresholds are kept, and only changes are reported.
func TestWatch(t *testing.T) {
	for _, c := range []struct {
		name    string
		timing  Timing
		answers string // of each check: + or -, or t for one that takes too long
		want    string
	}{
		{"immediately", Timing{Period: 10 * time.Second, Timeout: time.Second, SuccessThreshold: 1, FailureThreshold: 3}, "+++", "0s+"},
		{"a delay", Timing{InitialDelay: 7 * time.Second, Period: 10 * time.Second, Timeout: time.Second, SuccessThreshold: 1, FailureThreshold: 3}, "+++", "7s+"},
		{"thresholds", Timing{Period: time.Second, Timeout: time.Second, SuccessThreshold: 2, FailureThreshold: 3}, "-+-++--+---+-++", "4s+ 10s- 14s+"},
		{"too slow", Timing{Period: 10 * time.Second, Timeout: 3 * time.Second, SuccessThreshold: 1, FailureThreshold: 2}, "tt+", "13s- 20s+"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				start := time.Now()
				var got []string
				n, failures := 0, 0
				Watch(ctx, c.timing, start, func(ctx context.Context) error {
					if n == len(c.answers) {
						cancel()
						return nil
					}
					n++
					switch c.answers[n-1] {
					case '-':
						return errors.New("no")
					case 't':
						<-ctx.Done()
						return ctx.Err()
					}
					return nil
				}, func(r Result) {
					sign := "-"
					if r.Success {
						sign = "+"
					}
					got = append(got, time.Since(start).String()+sign)
				}, func(string) { failures++ })
				if strings.Join(got, " ") != c.want {
					t.Errorf("got %v, want %s", got, c.want)
				}
				if want := strings.Count(c.answers, "-") + strings.Count(c.answers, "t"); failures != want {
					t.Errorf("%d failures, want %d", failures, want)
				}
			})
		})
	}
}

// TestAwaitPort: a server that listens soon after it started is found soon, and the attempts before are not counted.
func TestAwaitPort(t *testing.T) {
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	for _, c := range []struct {
		name    string
		started time.Duration // before the first check
		listens time.Duration // after it
		answer  error
		within  time.Duration
		want    string // the first results
	}{
		{"soon", 0, 40 * time.Millisecond, nil, 90 * time.Millisecond, "+"},
		{"late", 0, 700 * time.Millisecond, nil, 950 * time.Millisecond, "+"},
		{"not in the first period", 0, 1500 * time.Millisecond, nil, 2 * time.Second, "-+"},
		{"something else is wrong", 0, 10 * time.Millisecond, errors.New("HTTP status 500"), time.Second, "-"},
		{"it ran long ago", time.Minute, 40 * time.Millisecond, nil, time.Second, "-+"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				begin := time.Now()
				got, asked, failures := "", 0, 0
				timing := Timing{Period: time.Second, Timeout: time.Second, SuccessThreshold: 1, FailureThreshold: 1, AwaitPort: true}
				Watch(ctx, timing, begin.Add(-c.started), func(context.Context) error {
					if asked++; time.Since(begin) < c.listens {
						return refused
					}
					return c.answer
				}, func(r Result) {
					got += map[bool]string{true: "+", false: "-"}[r.Success]
					if r.Success || c.answer != nil {
						cancel()
					}
				}, func(string) { failures++ })
				if took := time.Since(begin); got != c.want || took > c.within || asked > 30 {
					t.Errorf("%s after %v and %d checks, want %s within %v", got, took, asked, c.want, c.within)
				}
				if want := strings.Count(c.want, "-"); failures < want || failures > want+1 {
					t.Errorf("%d failures are reported", failures)
				}
			})
		})
	}
	// Without it, the next check is a period later.
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		begin := time.Now()
		Watch(ctx, Timing{Period: time.Second, Timeout: time.Second, SuccessThreshold: 1, FailureThreshold: 3}, begin, func(context.Context) error {
			if time.Since(begin) < time.Millisecond {
				return refused
			}
			return nil
		}, func(Result) { cancel() }, func(string) {})
		if took := time.Since(begin); took != time.Second {
			t.Errorf("a success after %v", took)
		}
	})
}

// TestRefusedConnections: every kind of probe that connects says so, which is what waiting for a port goes by.
func TestRefusedConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(l.Addr().String())
	_ = l.Close()
	port := intstr.FromInt32(int32(at.Port()))
	for name, h := range map[string]corev1.ProbeHandler{
		"http": {HTTPGet: &corev1.HTTPGetAction{Port: port}},
		"tcp":  {TCPSocket: &corev1.TCPSocketAction{Port: port}},
	} {
		if err := ask1(t, h, Target{Address: at.Addr()}); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

package accesslog

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/lb/config"
)

func sample() *Record {
	return &Record{
		Time: time.Date(2015, 5, 13, 23, 39, 43, 945000000, time.UTC), Balancer: "my-loadbalancer", Client: netip.MustParseAddrPort("192.168.131.39:2817"),
		Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), RequestTime: 86 * time.Microsecond, EndpointTime: 1048 * time.Microsecond, ResponseTime: 1337 * time.Microsecond,
		Status: 200, EndpointStatus: 200, Received: 0, Sent: 57, Method: "GET", URL: "https://www.example.com:443/", Proto: "HTTP/1.1", UserAgent: "curl/7.38.0",
		TLSVersion: tls.VersionTLS12, TLSSuite: tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
	}
}

func TestELBLines(t *testing.T) {
	plain := sample()
	plain.TLSVersion, plain.UserAgent, plain.URL = 0, "", "http://www.example.com:80/"
	refused := sample()
	refused.Endpoint, refused.RequestTime, refused.EndpointTime, refused.ResponseTime, refused.Status, refused.EndpointStatus = netip.AddrPort{}, -1, -1, -1, 503, 0
	tcp := sample()
	tcp.Method, tcp.URL, tcp.Proto, tcp.UserAgent, tcp.TLSVersion, tcp.Received, tcp.Sent = "", "", "", "", 0, 82, 305
	evil := sample()
	evil.UserAgent, evil.URL = "a\" \"b\n", "http://a/\x00"
	for _, tc := range []struct {
		name, want string
		r          *Record
	}{
		{"https", `2015-05-13T23:39:43.947471Z my-loadbalancer 192.168.131.39:2817 10.0.0.1:80 0.000086 0.001048 0.001337 200 200 0 57 "GET https://www.example.com:443/ HTTP/1.1" "curl/7.38.0" ECDHE-RSA-AES128-GCM-SHA256 TLSv1.2`, sample()},
		{"http", `2015-05-13T23:39:43.947471Z my-loadbalancer 192.168.131.39:2817 10.0.0.1:80 0.000086 0.001048 0.001337 200 200 0 57 "GET http://www.example.com:80/ HTTP/1.1" "-" - -`, plain},
		{"no endpoint", `2015-05-13T23:39:43.945000Z my-loadbalancer 192.168.131.39:2817 - -1 -1 -1 503 0 0 57 "GET https://www.example.com:443/ HTTP/1.1" "curl/7.38.0" ECDHE-RSA-AES128-GCM-SHA256 TLSv1.2`, refused},
		{"tcp", `2015-05-13T23:39:43.947471Z my-loadbalancer 192.168.131.39:2817 10.0.0.1:80 0.000086 0.001048 0.001337 - - 82 305 "- - - " "-" - -`, tcp},
		{"strange bytes", `2015-05-13T23:39:43.947471Z my-loadbalancer 192.168.131.39:2817 10.0.0.1:80 0.000086 0.001048 0.001337 200 200 0 57 "GET http://a/\x00 HTTP/1.1" "a\" \"b\x0a" ECDHE-RSA-AES128-GCM-SHA256 TLSv1.2`, evil},
	} {
		if got := string(tc.r.AppendELB(nil)); got != tc.want+"\n" {
			t.Errorf("%s:\n%swant\n%s", tc.name, got, tc.want)
		}
	}
}

func TestJSONLines(t *testing.T) {
	r := sample()
	r.Tags = map[string]string{"environment": "prod"}
	r.Owner = config.Owner{Kind: "Service", Namespace: "a", Name: "b"}
	r.UserAgent = "a\"\n\xff"
	line := r.AppendJSON(nil)
	if strings.Count(string(line), "\n") != 1 {
		t.Errorf("%q is not one line", line)
	}
	var got map[string]any
	if err := json.Unmarshal(line, &got); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]any{"client": "192.168.131.39:2817", "status": 200.0, "namespace": "a", "tlsVersion": "TLSv1.2", "endpointTime": 0.001048} {
		if got[key] != want {
			t.Errorf("%s is %v; want %v", key, got[key], want)
		}
	}
	if tags, _ := got["tags"].(map[string]any); tags["environment"] != "prod" {
		t.Error(got["tags"])
	}
}

// clock is turned by tests.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) turn(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

func listener(url string) *config.Listener {
	return &config.Listener{AccessLog: &config.AccessLog{URL: url, Prefix: "my-bucket-prefix/prod", Interval: 5 * time.Minute, Format: "elb", Balancer: "my-loadbalancer"}}
}

// logs returns the files below a folder with their lines.
func logs(t *testing.T, dir string) map[string]int {
	t.Helper()
	found := map[string]int{}
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		found[name] = strings.Count(string(data), "\n")
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return found
}

func TestIntervals(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bucket")
	c := &clock{at: time.Date(2026, 11, 17, 12, 3, 0, 0, time.UTC)}
	l := New(Options{Now: c.now, Account: "123456789012", Region: "us-west-2", Address: netip.MustParseAddr("172.160.1.192")})
	ctx := context.Background()
	for range 3 {
		l.Write(listener("file://"+dir), sample())
	}
	l.write(ctx, false)
	if found := logs(t, dir); len(found) != 0 {
		t.Fatalf("written before the interval's end: %v", found)
	}
	c.turn(2 * time.Minute)
	l.write(ctx, false)
	want := regexp.MustCompile(`^my-bucket-prefix/prod/AWSLogs/123456789012/elasticloadbalancing/us-west-2/2026/11/17/123456789012_elasticloadbalancing_us-west-2_my-loadbalancer_20261117T1205Z_172.160.1.192_[0-9a-f]{10}\.log$`)
	found := logs(t, dir)
	for name, lines := range found {
		if !want.MatchString(name) || lines != 3 {
			t.Errorf("%s has %d lines", name, lines)
		}
	}
	if len(found) != 1 {
		t.Errorf("%v", found)
	}
	// What is left is written when it stops.
	l.Write(listener("file://"+dir), sample())
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	l.Run(stopped)
	if found := logs(t, dir); len(found) != 2 {
		t.Errorf("%v", found)
	}
	if held := l.held.Load(); held != 0 {
		t.Errorf("%d bytes are still held", held)
	}
}

// A bucket that can't be written is reported, tried again, and takes no more memory than allowed.
func TestBucketThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	blocked := filepath.Join(dir, "bucket")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := &clock{at: time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)}
	var failed []string
	l := New(Options{Now: c.now, MaxBytes: 1000, Failed: func(balancer, url string, err error) { failed = append(failed, balancer+" "+url+" "+err.Error()) }})
	for range 100 {
		l.Write(listener("file://"+blocked), sample())
	}
	lines, dropped, _, _ := l.Stats("my-loadbalancer")
	if lines != 100 || dropped == 0 || dropped >= 100 || l.held.Load() > 1000 {
		t.Errorf("%d lines, %d dropped, %d bytes", lines, dropped, l.held.Load())
	}
	c.turn(5 * time.Minute)
	l.write(context.Background(), false)
	l.write(context.Background(), false) // too early for another attempt
	if len(failed) != 1 || !strings.Contains(failed[0], "my-loadbalancer file://") {
		t.Errorf("%q", failed)
	}
	os.Remove(blocked)
	c.turn(time.Second)
	l.write(context.Background(), false)
	if _, _, objects, failures := l.Stats("my-loadbalancer"); objects != 1 || failures != 1 || l.held.Load() != 0 {
		t.Errorf("%d objects, %d failures, %d bytes", objects, failures, l.held.Load())
	}
	for _, n := range logs(t, blocked) {
		if n != int(lines-dropped) {
			t.Errorf("%d lines; want %d", n, lines-dropped)
		}
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(l)
	if families, err := registry.Gather(); err != nil || len(families) != 4 {
		t.Error(families, err)
	}
}

// s3blob speaks to a server that stands for S3.
func TestS3(t *testing.T) {
	got := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			body, _ := io.ReadAll(r.Body)
			got <- r.URL.Path + "\n" + string(body)
		}
	}))
	defer server.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "a")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "b")
	l := New(Options{})
	address := "s3://my-bucket?region=eu-west-1&use_path_style=true&disable_https=true&endpoint=" + server.URL
	l.Write(listener(address), sample())
	l.write(context.Background(), true)
	select {
	case put := <-got:
		if !strings.HasPrefix(put, "/my-bucket/my-bucket-prefix/prod/AWSLogs/") || !strings.Contains(put, "192.168.131.39:2817") {
			t.Errorf("%q", put)
		}
	default:
		t.Fatal("nothing was written")
	}
}

// A bucket that does not answer holds up nobody else's logs.
func TestBucketThatDoesNotAnswer(t *testing.T) {
	asked, ended := make(chan struct{}, 100), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		asked <- struct{}{}
		<-ended
	}))
	defer server.Close()
	defer close(ended)
	t.Setenv("AWS_ACCESS_KEY_ID", "a")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "b")
	dir := t.TempDir()
	l := New(Options{})
	l.Write(listener("s3://my-bucket?region=eu-west-1&use_path_style=true&disable_https=true&endpoint="+server.URL), sample())
	const others = 9
	for i := range others {
		l.Write(listener(fmt.Sprintf("file://%s/%d", dir, i)), sample())
	}
	ctx, cancel := context.WithCancel(context.Background())
	written := make(chan struct{})
	go func() {
		defer close(written)
		l.write(ctx, true)
	}()
	<-asked
	for end := time.Now().Add(time.Minute); len(logs(t, dir)) < others; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d logs are written", len(logs(t, dir)), others)
		}
	}
	cancel()
	<-written
}

// What is known of balancers that are gone is not kept for ever.
func TestForgotten(t *testing.T) {
	c := &clock{at: time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)}
	l := New(Options{Now: c.now})
	to := listener("file://" + t.TempDir())
	l.Write(to, sample())
	c.turn(time.Hour)
	l.write(context.Background(), false)
	l.write(context.Background(), false)
	c.turn(forgetAfter - time.Second)
	l.write(context.Background(), false)
	if n := len(l.all()); n != 1 {
		t.Errorf("%d logs; want 1", n)
	}
	c.turn(time.Second)
	l.write(context.Background(), false)
	if n := len(l.all()); n != 0 {
		t.Errorf("%d logs are left", n)
	}
	l.Write(to, sample())
	if lines, _, _, _ := l.Stats("my-loadbalancer"); lines != 1 {
		t.Errorf("%d lines after it was forgotten; want 1", lines)
	}
}

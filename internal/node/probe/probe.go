// Package probe asks containers how they are: by a command in the container, an HTTP request, a TCP connection or a gRPC health check,
// as often and with the thresholds that a Pod says. What follows from the answers it does not know.
package probe

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Target is the container that is asked.
type Target struct {
	Address netip.Addr // the Pod's
	Ports   []corev1.ContainerPort
	// Exec runs a command in the container and returns its exit code and the beginning of its output.
	Exec func(ctx context.Context, args []string) (code int, output string, err error)
}

// Check asks once. A nil error is a success; any other says what is wrong.
type Check func(ctx context.Context) error

// New makes the check of a probe's or a hook's handler.
func New(h corev1.ProbeHandler, t Target) (Check, error) {
	switch {
	case h.Exec != nil:
		return func(ctx context.Context) error { return runCommand(ctx, t, h.Exec.Command) }, nil
	case h.HTTPGet != nil:
		port, err := resolvePort(h.HTTPGet.Port, t.Ports)
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return get(ctx, t, h.HTTPGet, port) }, nil
	case h.TCPSocket != nil:
		port, err := resolvePort(h.TCPSocket.Port, t.Ports)
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return connect(ctx, host(h.TCPSocket.Host, t), port) }, nil
	case h.GRPC != nil:
		return func(ctx context.Context) error { return health(ctx, t, h.GRPC) }, nil
	}
	return nil, errors.New("it has none of exec, httpGet, tcpSocket and grpc")
}

// resolvePort finds a port by its number or the name that the container gives it.
func resolvePort(p intstr.IntOrString, ports []corev1.ContainerPort) (int, error) {
	n := p.IntValue()
	if p.Type == intstr.String {
		if named, err := strconv.Atoi(p.StrVal); err == nil {
			n = named
		}
		for _, known := range ports {
			if known.Name == p.StrVal {
				n = int(known.ContainerPort)
			}
		}
	}
	if n < 1 || n > 65535 {
		return 0, fmt.Errorf("port %q: is neither a number from 1 to 65535 nor the name of one of the container's ports", p.String())
	}
	return n, nil
}

func host(given string, t Target) string {
	if given != "" {
		return given
	}
	return t.Address.String()
}

// most is how much of an answer is read and shown.
const most = 10 << 10

func runCommand(ctx context.Context, t Target, args []string) error {
	code, output, err := t.Exec(ctx, args)
	switch {
	case ctx.Err() != nil:
		return errors.New("the command did not end in time")
	case err != nil:
		return fmt.Errorf("the command could not be run: %w", err)
	case code != 0:
		return fmt.Errorf("the command ended with exit code %d: %s", code, shown(output))
	}
	return nil
}

func shown(text string) string {
	text = strings.ToValidUTF8(strings.TrimSpace(text), "?")
	if len(text) > 500 {
		text = text[:500] + "…"
	}
	return text
}

// get succeeds with a status from 200 to 399. A redirect to another host counts as an answer.
func get(ctx context.Context, t Target, a *corev1.HTTPGetAction, port int) error {
	scheme := strings.ToLower(string(a.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	address := net.JoinHostPort(host(a.Host, t), strconv.Itoa(port))
	target, err := url.Parse(a.Path)
	if err != nil {
		target = &url.URL{Path: a.Path}
	}
	target.Scheme, target.Host = scheme, address
	if !strings.HasPrefix(target.Path, "/") {
		target.Path = "/" + target.Path
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return err
	}
	request.Header.Set("User-Agent", "kube-probe/1.37")
	request.Header.Set("Accept", "*/*")
	for _, h := range a.HTTPHeaders {
		if strings.EqualFold(h.Name, "host") {
			request.Host = h.Value
		}
		request.Header[http.CanonicalHeaderKey(h.Name)] = append(request.Header[http.CanonicalHeaderKey(h.Name)], h.Value)
	}
	for _, name := range []string{"User-Agent", "Accept"} {
		// One that the probe gives replaces ours; an empty one removes it.
		if values := request.Header[name]; len(values) > 1 {
			request.Header[name] = values[1:]
		}
	}
	response, err := client.Do(request)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return errors.New("no answer in time from " + target.Redacted())
		}
		return err
	}
	defer response.Body.Close()
	_, _ = io.CopyN(io.Discard, response.Body, most)
	if response.StatusCode < 200 || response.StatusCode >= 400 {
		return fmt.Errorf("HTTP status %d", response.StatusCode)
	}
	return nil
}

// client trusts any certificate: a probe asks whether somebody answers, not who. It keeps no connection. Requests and answers are
// small, and so are its buffers.
var client = &http.Client{
	Transport: &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, Proxy: nil, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		ReadBufferSize: 1 << 10, WriteBufferSize: 1 << 10,
	},
	CheckRedirect: func(r *http.Request, via []*http.Request) error {
		if r.URL.Hostname() != via[0].URL.Hostname() || len(via) >= 10 {
			return http.ErrUseLastResponse
		}
		return nil
	},
}

func connect(ctx context.Context, host string, port int) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	return c.Close()
}

func health(ctx context.Context, t Target, a *corev1.GRPCAction) error {
	address := net.JoinHostPort(t.Address.String(), strconv.Itoa(int(a.Port)))
	// Within the probe's time-out it connects again soon: the default is a second, which is the default time-out.
	again := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 2 * firstPause, Multiplier: 1.5, Jitter: 0.2, MaxDelay: maxPause}, MinConnectTimeout: 20 * time.Second}
	c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUserAgent("kube-probe/1.37"),
		grpc.WithConnectParams(again))
	if err != nil {
		return err
	}
	defer c.Close()
	service := ""
	if a.Service != nil {
		service = *a.Service
	}
	answer, err := grpc_health_v1.NewHealthClient(c).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	if answer.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("health is %s", answer.GetStatus())
	}
	return nil
}

// Timing says how often to ask, and how many answers make a result.
type Timing struct {
	InitialDelay, Period, Timeout      time.Duration
	SuccessThreshold, FailureThreshold int
	// AwaitPort has the first check of a container that has just started wait, a period at most, until something listens at its port. Nobody
	// notices the attempts before, and a server that listens after some milliseconds need not wait for the second check.
	AwaitPort bool
}

// TimingOf reads a probe's fields.
func TimingOf(p *corev1.Probe) Timing {
	seconds := func(n int32, least int32) time.Duration { return time.Duration(max(n, least)) * time.Second }
	return Timing{
		InitialDelay: seconds(p.InitialDelaySeconds, 0), Period: seconds(p.PeriodSeconds, 1), Timeout: seconds(p.TimeoutSeconds, 1),
		SuccessThreshold: int(max(p.SuccessThreshold, 1)), FailureThreshold: int(max(p.FailureThreshold, 1)),
	}
}

// Result is what answers have come to.
type Result struct {
	Success bool
	Message string
}

// Watch asks again and again until ctx ends. since is when the container started. It reports each result that differs from the one
// before, and each failed check.
func Watch(ctx context.Context, t Timing, since time.Time, check Check, report func(Result), failed func(message string)) {
	var last *bool
	count := 0
	previous := false
	wait := max(time.Until(since.Add(t.InitialDelay)), 0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		start := time.Now()
		err := ask(ctx, t.Timeout, check)
		if t.AwaitPort && last == nil && count == 0 {
			err = t.awaitPort(ctx, since.Add(t.InitialDelay+t.Period), err, check)
		}
		if ctx.Err() != nil {
			return
		}
		ok := err == nil
		message := ""
		if !ok {
			message = err.Error()
			failed(message)
		}
		if count == 0 || ok != previous {
			count = 0
		}
		previous = ok
		count++
		threshold := t.FailureThreshold
		if ok {
			threshold = t.SuccessThreshold
		}
		if count >= threshold && (last == nil || *last != ok) {
			last = &ok
			report(Result{Success: ok, Message: message})
		}
		wait = max(t.Period-time.Since(start), 0)
	}
}

const (
	firstPause = 5 * time.Millisecond
	maxPause   = 250 * time.Millisecond
)

// awaitPort checks again while connections are refused, at growing intervals.
func (t Timing) awaitPort(ctx context.Context, until time.Time, err error, check Check) error {
	for pause := firstPause; errors.Is(err, syscall.ECONNREFUSED) && time.Now().Add(pause).Before(until); pause = min(pause*3/2, maxPause) {
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
		err = ask(ctx, t.Timeout, check)
	}
	return err
}

func ask(ctx context.Context, timeout time.Duration, check Check) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return check(ctx)
}

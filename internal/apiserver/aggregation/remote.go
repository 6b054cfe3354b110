package aggregation

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/transport"
	"k8s.io/klog/v2"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// remote is a group version that an API server behind a Service serves.
type remote struct {
	in      *Aggregator
	name    string
	uid     types.UID
	version schema.GroupVersion
	spec    apiregistrationv1.APIServiceSpec
	port    int32
	// transport is nil if the spec does not say how to connect; then broken says why.
	transport *http.Transport
	broken    error
	state     atomic.Pointer[condition]
	poke      chan struct{}
	cancel    context.CancelFunc
	// reported is when the condition was last written; learned is what was read of the other server. Both belong to run.
	reported time.Time
	learned  learned
	// v3 is what follows "?" in the address of the group version's OpenAPI document, if there is one.
	v3 atomic.Pointer[string]
}

// condition is whether a group version is available, and why.
type condition struct {
	status          apiregistrationv1.ConditionStatus
	reason, message string
}

func (c condition) available() bool { return c.status == apiregistrationv1.ConditionTrue }

const (
	// checkInterval is how often a server that answers is asked, and failedInterval one that does not.
	checkInterval  = 5 * time.Second
	failedInterval = 2 * time.Second
	// pokeDelay bounds how often failing requests cause a check.
	pokeDelay    = 500 * time.Millisecond
	checkTimeout = 5 * time.Second
	// attempts are made at a time: one that succeeds is enough, as a Service has several endpoints.
	attempts = 3
	// messageInterval bounds how often a condition is written for another message alone.
	messageInterval = 30 * time.Second

	dialTimeout = 10 * time.Second
	idleTimeout = 90 * time.Second
	maxIdle     = 25

	defaultPort = 443
	// checker is who asks; those who connect with the server's certificate may say who they are.
	checker = "system:kube-aggregator"
)

func newRemote(a *Aggregator, s *apiService, stop context.CancelFunc) *remote {
	r := &remote{
		in: a, name: s.Name, uid: s.UID, version: versionOf(s), spec: *s.Spec.DeepCopy(), port: defaultPort,
		poke: make(chan struct{}, 1), cancel: stop,
	}
	if s.Spec.Service.Port != nil {
		r.port = *s.Spec.Service.Port
	}
	r.transport, r.broken = r.connect()
	found := condition{status: apiregistrationv1.ConditionUnknown}
	for _, c := range s.Status.Conditions {
		if c.Type == apiregistrationv1.Available && r.broken == nil {
			found = condition{c.Status, c.Reason, c.Message}
		}
	}
	r.state.Store(&found)
	return r
}

// connect makes the transport: the other server proves that it is the Service, and this one that it may speak for others.
func (r *remote) connect() (*http.Transport, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: r.spec.Service.Name + "." + r.spec.Service.Namespace + ".svc",
		InsecureSkipVerify: r.spec.InsecureSkipTLSVerify,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, key := r.in.Certificate()
			pair, err := tls.X509KeyPair(cert, key)
			return &pair, err
		},
	}
	if len(r.spec.CABundle) > 0 {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(r.spec.CABundle) {
			return nil, errors.New("spec.caBundle: has no certificate in PEM")
		}
	}
	return &http.Transport{
		DialContext:     (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig: config, TLSHandshakeTimeout: dialTimeout, ForceAttemptHTTP2: true,
		IdleConnTimeout: idleTimeout, MaxIdleConnsPerHost: maxIdle,
		HTTP2: &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
	}, nil
}

func (r *remote) stop() {
	r.cancel()
	if r.transport != nil {
		r.transport.CloseIdleConnections()
	}
}

// run checks and learns until ctx ends.
func (r *remote) run(ctx context.Context) {
	for ctx.Err() == nil {
		found := r.check(ctx)
		if ctx.Err() != nil {
			return
		}
		before := r.state.Swap(&found)
		r.count(*before, found)
		if before.available() != found.available() || before.reason != found.reason {
			klog.InfoS("availability of an APIService changed", "apiService", r.name, "available", found.status, "reason", found.reason, "message", found.message)
		}
		r.report(ctx, found)
		r.learn(ctx, found.available())
		wait := checkInterval
		if !found.available() {
			wait = failedInterval
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.poke:
			select {
			case <-ctx.Done():
			case <-time.After(pokeDelay):
			}
		}
		timer.Stop()
	}
}

// recheck has it checked soon, because a request failed.
func (r *remote) recheck() {
	select {
	case r.poke <- struct{}{}:
	default:
	}
}

// check finds out whether the other server is there. The reasons are Kubernetes'.
func (r *remote) check(ctx context.Context) condition {
	no := func(reason, format string, args ...any) condition {
		return condition{apiregistrationv1.ConditionFalse, reason, fmt.Sprintf(format, args...)}
	}
	where := r.spec.Service.Namespace + "/" + r.spec.Service.Name
	if r.broken != nil {
		return no("FailedDiscoveryCheck", "%v", r.broken)
	}
	svc, err := r.in.Service(r.spec.Service.Namespace, r.spec.Service.Name)
	switch {
	case apierrors.IsNotFound(err):
		return no("ServiceNotFound", "there is no Service %s", where)
	case err != nil:
		return condition{apiregistrationv1.ConditionUnknown, "ServiceAccessError", fmt.Sprintf("read Service %s: %v", where, err)}
	}
	if svc.Spec.Type != corev1.ServiceTypeExternalName {
		i := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == r.port })
		if i < 0 {
			return no("ServicePortError", "Service %s has no port %d", where, r.port)
		}
		list, err := r.in.Slices(r.spec.Service.Namespace, r.spec.Service.Name)
		switch {
		case err != nil:
			return condition{apiregistrationv1.ConditionUnknown, "EndpointsAccessError", fmt.Sprintf("read the EndpointSlices of Service %s: %v", where, err)}
		case len(list) == 0:
			return no("EndpointsNotFound", "Service %s has no EndpointSlices", where)
		case !slices.ContainsFunc(list, func(s *discoveryv1.EndpointSlice) bool { return hasReady(s, svc.Spec.Ports[i].Name) }):
			return no("MissingEndpoints", "Service %s has no ready endpoint with the port %q", where, svc.Spec.Ports[i].Name)
		}
	}
	if err := r.probe(ctx); err != nil {
		return no("FailedDiscoveryCheck", "%v", err)
	}
	return condition{apiregistrationv1.ConditionTrue, "Passed", "all checks passed"}
}

func hasReady(s *discoveryv1.EndpointSlice, port string) bool {
	return slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }) &&
		slices.ContainsFunc(s.Ports, func(p discoveryv1.EndpointPort) bool { return p.Name != nil && *p.Name == port && p.Port != nil })
}

// probe asks for the discovery of the group version, which every API server must serve.
func (r *remote) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	results := make(chan error, attempts)
	for range attempts {
		go func() {
			_, err := r.resources(ctx, maxProbe)
			results <- err
		}()
	}
	var last error
	for range attempts {
		err := <-results
		if err == nil {
			return nil
		}
		if last == nil || !errors.Is(err, context.Canceled) {
			last = err
		}
	}
	r.transport.CloseIdleConnections()
	return last
}

func (r *remote) path() string { return "/apis/" + r.version.Group + "/" + r.version.Version }

// answer is what the other server said.
type answer struct {
	body        []byte
	contentType string
	etag        string
	notModified bool
}

// Bodies of other servers are read up to these sizes.
const (
	maxProbe    = 1 << 20
	maxDocument = 16 << 20
)

// statusError is an answer other than 200.
type statusError struct {
	at   string
	code int
}

func (e statusError) Error() string {
	return fmt.Sprintf("GET %s: status %d %s", e.at, e.code, http.StatusText(e.code))
}

// get reads a document of the other server. Redirects are not followed: they could lead anywhere.
func (r *remote) get(ctx context.Context, path, accept, etag string, limit int64) (answer, error) {
	at, err := r.in.Resolve(r.spec.Service.Namespace, r.spec.Service.Name, r.port)
	if err != nil {
		return answer{}, err
	}
	u := url.URL{Scheme: "https", Host: at.Host, Path: path}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Accept", accept)
	if etag != "" {
		req.Header.Set("If-None-Match", etag)
	}
	transport.SetAuthProxyHeaders(req, checker, "", []string{user.SystemPrivilegedGroup}, nil)
	resp, err := r.transport.RoundTrip(req)
	if err != nil {
		return answer{}, fmt.Errorf("GET %s: %w", &u, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotModified && etag != "" {
		return answer{notModified: true}, nil
	}
	if resp.StatusCode != http.StatusOK {
		return answer{}, statusError{u.String(), resp.StatusCode}
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return answer{}, fmt.Errorf("GET %s: %w", &u, err)
	}
	if int64(len(body)) > limit {
		return answer{}, fmt.Errorf("GET %s: the answer is longer than %d bytes", &u, limit)
	}
	return answer{body: body, contentType: resp.Header.Get("Content-Type"), etag: resp.Header.Get("Etag")}, nil
}

// maxMessage bounds the message of a condition: part of it is what others say.
const maxMessage = 1024

// report writes the condition to the object, if it says something else.
func (r *remote) report(ctx context.Context, found condition) {
	object := r.in.object(r.name)
	if object == nil || object.UID != r.uid {
		return
	}
	next := object.DeepCopy()
	i := slices.IndexFunc(next.Status.Conditions, func(c apiregistrationv1.APIServiceCondition) bool { return c.Type == apiregistrationv1.Available })
	if i < 0 {
		next.Status.Conditions = append(next.Status.Conditions, apiregistrationv1.APIServiceCondition{Type: apiregistrationv1.Available})
		i = len(next.Status.Conditions) - 1
	}
	c := &next.Status.Conditions[i]
	message := strings.ToValidUTF8(found.message, "?")
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage], "")
	}
	same := c.Status == found.status && c.Reason == found.reason
	if same && (c.Message == message || time.Since(r.reported) < messageInterval) {
		return
	}
	if c.Status != found.status {
		c.LastTransitionTime = metav1.Now()
	}
	c.Status, c.Reason, c.Message = found.status, found.reason, message
	r.reported = time.Now()
	if _, err := r.in.Client.UpdateStatus(ctx, next, metav1.UpdateOptions{}); err != nil && ctx.Err() == nil {
		r.reported = time.Time{}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			klog.ErrorS(err, "availability of an APIService could not be written, retrying", "apiService", r.name)
		}
		r.recheck()
	}
}

package gather

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
	"portal/internal/lb/compile"
	"portal/internal/nodereport"
)

// askedAtOnce is how many nodes are asked at the same time.
const askedAtOnce = 32

// nodes asks nodes for their state, through the API server.
func (g *gatherer) nodes(ctx context.Context) {
	slots := make(chan struct{}, askedAtOnce)
	var all sync.WaitGroup
	names, left := g.asked()
	if left > 0 {
		g.out.Unseen["state"] = fmt.Sprintf("%d nodes were not asked for details: they report that all is well", left)
	}
	for _, name := range names {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			r, forbidden := g.node(ctx, name)
			g.note(func() {
				if forbidden {
					g.out.Unseen["nodes/proxy"] = "forbidden: what proxies do, and where Pods listen, is not known"
					return
				}
				g.out.Reports[name] = r
			})
		})
	}
	all.Wait()
}

func (g *gatherer) node(ctx context.Context, name string) (out *explain.NodeReport, forbidden bool) {
	ctx, cancel := context.WithTimeout(ctx, 3*g.NodeTimeout)
	defer cancel()
	out = &explain.NodeReport{Asked: true, Only: g.Services}
	if g.focus.Service != "" {
		out.Only = []string{g.focus.Service}
	}
	before := time.Now()
	request := g.client.CoreV1().RESTClient().Get().Resource("nodes").Name(name).SubResource("proxy").Suffix(nodereport.Path).
		SetHeader("Accept", runtime.ContentTypeJSON).Timeout(g.NodeTimeout)
	if len(out.Only) == 1 {
		request = request.Param("service", out.Only[0])
	} else {
		for _, name := range out.Only {
			request = request.Param("services", name)
		}
	}
	if g.Probe {
		request = request.Param("probe", "true")
		g.focus.Encode(func(name, value string) { request = request.Param(name, value) })
	}
	data, err := limitTime(ctx, g.NodeTimeout, request)
	if err != nil && g.ready(name) && (errors.Is(err, context.DeadlineExceeded) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err)) {
		before = time.Now()
		data, err = limitTime(ctx, g.NodeTimeout, request) // a busy machine may need longer
	}
	switch {
	case apierrors.IsForbidden(err):
		return nil, true
	case apierrors.IsNotFound(err):
		out.Unsupported = true
	case err != nil:
		out.Err = firstLine(err)
	default:
		var report nodereport.Report
		if err := json.Unmarshal(data, &report); err != nil || report.Node == "" {
			out.Unsupported = true
			break
		}
		out.Report = &report
		out.Skew = skew(before, time.Now(), report.Time)
	}
	if out.Report == nil || out.Proxy == nil {
		g.health(ctx, name, out)
	}
	return out, false
}

// ready says whether the API has a node as ready.
func (g *gatherer) ready(name string) bool {
	for i := range g.out.Nodes {
		if g.out.Nodes[i].Name != name {
			continue
		}
		return slices.ContainsFunc(g.out.Nodes[i].Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
	}
	return false
}

// skew is how far a clock is ahead, at least: the answer was written between two moments.
func skew(before, after, there time.Time) time.Duration {
	switch {
	case there.Before(before):
		return there.Sub(before)
	case there.After(after):
		return there.Sub(after)
	}
	return 0
}

// health asks the proxy's own port, which every service proxy has.
func (g *gatherer) health(ctx context.Context, name string, out *explain.NodeReport) {
	request := g.client.CoreV1().RESTClient().Get().Resource("nodes").Name("http:"+name+":10256").SubResource("proxy").Suffix("healthz").
		SetHeader("Accept", runtime.ContentTypeJSON) // so that the API server's own errors can be recognized below
	ctx, cancel := context.WithTimeout(ctx, g.NodeTimeout)
	defer cancel()
	result := request.Do(ctx)
	body, err := result.Raw()
	result.StatusCode(&out.Health)
	out.HealthBody = string(body)
	var status apierrors.APIStatus
	// The API server itself answers if it gets no connection.
	if errors.As(err, &status) && out.Health != http.StatusOK && strings.Contains(err.Error(), "dial") || out.Health == 0 || out.Health == http.StatusBadGateway {
		out.Health, out.HealthErr = 0, firstLine(err)
	}
	if out.Health == http.StatusServiceUnavailable && (strings.Contains(string(body), `"kind":"Status"`) || len(body) == 0) {
		out.Health, out.HealthErr = 0, firstLine(err)
	}
}

func limitTime(ctx context.Context, limit time.Duration, request *rest.Request) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return request.Do(ctx).Raw()
}

func firstLine(err error) string {
	if err == nil {
		return ""
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// secrets reads the certificates of Ingresses and load balancers, and keeps nothing else of any Secret.
func (g *gatherer) secrets(ctx context.Context) {
	for _, r := range explain.NeededSecrets(g.out) {
		if _, known := g.out.Secrets[r]; known || g.out.Unseen["secrets"] != "" {
			continue
		}
		secret, err := g.client.CoreV1().Secrets(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			g.out.Secrets[r] = false
		case err != nil:
			g.out.Unseen["secrets"] = short(err) + ": certificates of Ingresses are not checked"
		default:
			g.out.Secrets[r] = true
			if len(secret.Data["ca.crt"]) > 0 && len(secret.Data[corev1.TLSCertKey]) == 0 {
				continue // what endpoints are verified with
			}
			c := certificate(r, secret.Data[corev1.TLSCertKey])
			if _, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]); err != nil && c.Err == "" {
				c.Err = err.Error() // which never has anything of the key
			}
			g.out.Certificates = append(g.out.Certificates, c)
		}
	}
	if cert := g.Config.CertData; len(cert) > 0 {
		g.out.Certificates = append(g.out.Certificates, certificate(explain.Ref{Kind: "Kubeconfig", Name: "client certificate"}, cert))
	}
}

// balancers reads what Services of load balancers refer to by name.
func (g *gatherer) balancers(ctx context.Context) {
	if !slices.ContainsFunc(g.out.Services, func(s corev1.Service) bool { return s.Spec.Type == corev1.ServiceTypeLoadBalancer }) {
		return
	}
	g.out.ConfigMaps = map[string]map[string]string{}
	for _, name := range []string{compile.GroupsName, compile.CertificatesName} {
		namespace, short, _ := strings.Cut(name, "/")
		m, err := g.client.CoreV1().ConfigMaps(namespace).Get(ctx, short, metav1.GetOptions{})
		switch {
		case err == nil:
			g.out.ConfigMaps[name] = m.Data
		case !apierrors.IsNotFound(err):
			g.out.Unseen["configmaps"] = firstLine(err) + ": security groups of load balancers are not checked"
			return
		}
	}
}

// server reads what the API server says about itself: its version, and the certificate that it shows.
func (g *gatherer) server(ctx context.Context) {
	if v, err := g.client.Discovery().ServerVersion(); err == nil {
		g.note(func() { g.out.Version = v.GitVersion })
	}
	client, err := rest.HTTPClientFor(g.Config)
	if err != nil {
		return
	}
	base, _, err := rest.DefaultServerUrlFor(g.Config)
	if err != nil {
		return
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return
	}
	response, err := client.Do(request)
	if err != nil {
		return
	}
	defer response.Body.Close()
	if response.TLS != nil && len(response.TLS.PeerCertificates) > 0 {
		cert := response.TLS.PeerCertificates[0]
		g.note(func() {
			g.out.Certificates = append(g.out.Certificates, explain.Certificate{
				Object: explain.Ref{Kind: "Server", Name: base.Host}, Names: cert.DNSNames, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
			})
		})
	}
}

// certificate reads the first certificate of a PEM file.
func certificate(r explain.Ref, data []byte) explain.Certificate {
	out := explain.Certificate{Object: r}
	block, _ := pem.Decode(data)
	if block == nil {
		out.Err = "it is not PEM"
		return out
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		out.Err = err.Error()
		return out
	}
	out.Names, out.NotBefore, out.NotAfter = cert.DNSNames, cert.NotBefore, cert.NotAfter
	for _, ip := range cert.IPAddresses {
		out.Names = append(out.Names, ip.String())
	}
	if len(out.Names) == 0 && cert.Subject.CommonName != "" {
		out.Names = []string{cert.Subject.CommonName}
	}
	return out
}

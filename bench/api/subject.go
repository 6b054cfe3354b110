package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/bench/report"
	"portal/test/harness"
)

const (
	kubernetes     = "kube-apiserver"
	portal         = "portal"
	portalEmbedded = "portal-embedded"
)

// allServers are what can be measured. The others are compared with the first.
func allServers() []string { return []string{kubernetes, portal, portalEmbedded} }

// subject is a running API server with the etcd that it keeps its objects in.
type subject struct {
	name     string
	api      *harness.API
	etcd     *harness.Etcd // nil where it is part of the server's process
	sampler  *report.Sampler
	failures atomic.Int64 // answers of 400 and above, and requests without an answer
	failure  atomic.Value // the first of them, as a string
}

func startSubject(dir, name string) (*subject, error) {
	s := &subject{name: name}
	var servers []string
	if name != portalEmbedded {
		members, err := harness.StartEtcd(dir, 1)
		if err != nil {
			return nil, err
		}
		s.etcd = members[0]
		servers = []string{"--etcd-servers", s.etcd.ClientURL}
	}
	// Clients authenticate to both with a token: certificates cost the two servers different amounts.
	access, err := accessFlags(dir)
	if err != nil {
		s.stop()
		return nil, err
	}
	if name == kubernetes {
		s.api, err = harness.StartKubeAPIServer(dir, s.etcd.ClientURL, access...)
	} else {
		// kube-apiserver has no such controllers either.
		s.api, err = harness.StartPortal(dir, slices.Concat(servers, access, []string{"--controllers", "none"})...)
	}
	if err != nil {
		s.stop()
		return nil, err
	}
	s.sampler = report.Follow(s.api.Pid())
	return s, nil
}

func (s *subject) stop() {
	if s.sampler != nil {
		s.sampler.Stop()
	}
	if s.api != nil {
		s.api.Kill()
	}
	if s.etcd != nil {
		s.etcd.Kill()
	}
}

// config is that of a client in a process of its own: protobuf, HTTP/2, a separate connection.
func (s *subject) config() *rest.Config { return s.configOf(clientToken) }

// configOf is that of a client of another user.
func (s *subject) configOf(token string) *rest.Config {
	dialer := &net.Dialer{Timeout: 10 * time.Second}
	return &rest.Config{
		Host:            s.api.URL,
		BearerToken:     token,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		ContentConfig: rest.ContentConfig{
			ContentType:        runtime.ContentTypeProtobuf,
			AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
		},
		QPS:     -1,
		Timeout: 2 * time.Minute,
		// client-go shares a connection among clients with the same settings; a dialer of their own keeps them apart.
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, address)
		},
		// client-go retries after some failures. Here every failure counts.
		WrapTransport: func(inner http.RoundTripper) http.RoundTripper { return &failureCounter{inner, s} },
	}
}

func (s *subject) client() (*clientset.Clientset, error) { return clientset.NewForConfig(s.config()) }

// failureCounter counts failed requests before client-go can retry them.
type failureCounter struct {
	http.RoundTripper
	subject *subject
}

func (f *failureCounter) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := f.RoundTripper.RoundTrip(req)
	switch {
	case err != nil && req.Context().Err() == nil:
		f.subject.failed(fmt.Sprintf("%s %s: %v", req.Method, req.URL.Path, err))
	case err == nil && resp.StatusCode >= http.StatusBadRequest:
		f.subject.failed(fmt.Sprintf("%s %s: %s", req.Method, req.URL.Path, resp.Status))
	}
	return resp, err
}

func (s *subject) failed(what string) {
	s.failures.Add(1)
	s.failure.CompareAndSwap(nil, what)
}

// usage is what the server and the etcd beside it, if it has one, have used so far.
type usage struct{ Server, Etcd report.Usage }

func (s *subject) usage() (out usage, err error) {
	if out.Server, err = s.sampler.Read(); err != nil || s.etcd == nil {
		return out, err
	}
	out.Etcd, err = report.Read(s.etcd.Pid())
	return out, err
}

package connect

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/streaming/pkg/httpstream"
)

// proxied is what requests are passed on to.
type proxied int

const (
	podProxy proxied = iota
	serviceProxy
	nodeProxy
)

// proxyREST passes requests on to Pods, to Services' endpoints and to nodes.
type proxyREST struct {
	reach *Reach
	kind  proxied
}

var _ rest.Connecter = &proxyREST{}

// New returns empty options.
func (p *proxyREST) New() runtime.Object {
	switch p.kind {
	case podProxy:
		return &corev1.PodProxyOptions{}
	case serviceProxy:
		return &corev1.ServiceProxyOptions{}
	}
	return &corev1.NodeProxyOptions{}
}

// Destroy does nothing: there is no store.
func (*proxyREST) Destroy() {}

// NewConnectOptions returns the options, which have the rest of the path.
func (p *proxyREST) NewConnectOptions() (runtime.Object, bool, string) { return p.New(), true, "path" }

// ConnectMethods are those that are passed on.
func (*proxyREST) ConnectMethods() []string {
	return []string{
		http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodHead, http.MethodOptions,
	}
}

// Connect finds out where a request goes.
func (p *proxyREST) Connect(ctx context.Context, id string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	var at string
	switch o := options.(type) {
	case *corev1.PodProxyOptions:
		at = o.Path
	case *corev1.ServiceProxyOptions:
		at = o.Path
	case *corev1.NodeProxyOptions:
		at = o.Path
	default:
		return nil, fmt.Errorf("options of a proxy are wanted, not %T", options)
	}
	scheme, name, port, ok := target(id)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("%q: must be NAME, NAME:PORT or SCHEME:NAME:PORT", id))
	}
	var to *url.URL
	var transport http.RoundTripper = p.reach.backends
	var err error
	switch p.kind {
	case podProxy:
		to, err = p.reach.podLocation(ctx, scheme, name, port)
	case serviceProxy:
		to, err = p.reach.serviceLocation(ctx, scheme, name, port)
	default:
		to, transport, err = p.reach.nodeLocation(ctx, scheme, name, port)
	}
	if err != nil {
		return nil, err
	}
	to.Path = utilnet.JoinPreservingTrailingSlash(to.Path, at)
	pass := handler(to, transport, true, false, responder)
	if p.kind != nodeProxy {
		return pass, nil
	}
	// The node sees this server ask, not who asked it: what runs commands takes the right to create here, as it does there.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if httpstream.IsUpgradeRequest(r) || isCommand(at) {
			if err := p.reach.mayCreate(ctx); err != nil {
				responder.Error(err)
				return
			}
		}
		pass.ServeHTTP(w, r)
	}), nil
}

// isCommand says whether something is done in a Pod at a path of a node, kubelets' among them.
func isCommand(at string) bool {
	first, _, _ := strings.Cut(strings.TrimPrefix(path.Clean("/"+at), "/"), "/")
	return slices.Contains([]string{"exec", "attach", "run", "portForward", "cri", "checkpoint"}, first)
}

// podLocation is a Pod's own address. The port is a number, or that of its first container with one.
func (r *Reach) podLocation(ctx context.Context, scheme, name, port string) (*url.URL, error) {
	pod, err := r.pod(ctx, name)
	if err != nil {
		return nil, err
	}
	if port == "" {
		for i := range pod.Spec.Containers {
			if ports := pod.Spec.Containers[i].Ports; len(ports) > 0 {
				port = strconv.Itoa(int(ports[0].ContainerPort))
				break
			}
		}
	}
	if port, err = numbered(pod, port); err != nil {
		return nil, err
	}
	ip := ""
	if len(pod.Status.PodIPs) > 0 {
		ip = pod.Status.PodIPs[0].IP
	}
	addr, err := backend(ip)
	if err != nil {
		return nil, err
	}
	return location(scheme, addr.String(), port), nil
}

// numbered is the number of a Pod's port.
func numbered(pod *corev1.Pod, port string) (string, error) {
	if port == "" {
		return "", nil
	}
	if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 {
		return port, nil
	}
	for i := range pod.Spec.Containers {
		for _, p := range pod.Spec.Containers[i].Ports {
			if p.Name == port {
				return strconv.Itoa(int(p.ContainerPort)), nil
			}
		}
	}
	return "", apierrors.NewBadRequest(fmt.Sprintf("port %q: must be a number from 1 to 65535 or the name of one of the Pod's ports", port))
}

// serviceLocation is one of a Service's endpoints that are ready, and that are Pods of its namespace. Others could be anything that whoever
// may write EndpointSlices wants the server to reach.
func (r *Reach) serviceLocation(ctx context.Context, scheme, name, port string) (*url.URL, error) {
	namespace := request.NamespaceValue(ctx)
	obj, err := r.Get(ctx, "services", namespace, name, true)
	if err != nil {
		return nil, err
	}
	svc := obj.(*corev1.Service)
	if n, err := strconv.ParseInt(port, 10, 32); err == nil {
		i := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return int64(p.Port) == n })
		if i < 0 {
			return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", n, name))
		}
		port = svc.Spec.Ports[i].Name
	}
	list, err := r.Slices(namespace, name)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if len(list) == 0 {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", name))
	}
	family := corev1.IPv4Protocol
	if len(svc.Spec.IPFamilies) > 0 {
		family = svc.Spec.IPFamilies[0]
	}
	at, err := proxy.RandomEndpoint(name, list, port, family, func(e *discoveryv1.Endpoint) bool { return r.isPod(ctx, namespace, e) })
	if err != nil {
		return nil, err
	}
	if scheme == "" {
		scheme = "http"
	}
	return &url.URL{Scheme: scheme, Host: at}, nil
}

// isPod says whether an endpoint is a Pod, at an address that is the Pod's.
func (r *Reach) isPod(ctx context.Context, namespace string, e *discoveryv1.Endpoint) bool {
	if e.TargetRef == nil || e.TargetRef.Kind != "Pod" || e.TargetRef.Namespace != namespace || len(e.Addresses) == 0 {
		return false
	}
	obj, err := r.Get(ctx, "pods", namespace, e.TargetRef.Name, false)
	if err != nil {
		return false
	}
	pod := obj.(*corev1.Pod)
	for _, address := range e.Addresses {
		if _, err := backend(address); err != nil {
			return false
		}
		if !slices.ContainsFunc(pod.Status.PodIPs, func(ip corev1.PodIP) bool { return ip.IP == address }) {
			return false
		}
	}
	return true
}

// nodeLocation is where a node serves what kubelets do, which the server's certificate opens, or any other port of it.
func (r *Reach) nodeLocation(ctx context.Context, scheme, name, port string) (*url.URL, http.RoundTripper, error) {
	node, host, err := r.node(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	addr, err := backend(host)
	if err != nil {
		return nil, nil, err // names are not resolved: what they lead to could change between asking and connecting
	}
	if port == "" || port == portOf(node) {
		return location("https", addr.String(), portOf(node)), r.Nodes.Transport(node.Name, host, false), nil
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("port %q: must be a number from 1 to 65535", port))
	}
	return location(scheme, addr.String(), port), r.backends, nil
}

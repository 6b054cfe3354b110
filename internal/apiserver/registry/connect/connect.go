// Package connect answers requests that the server passes on: to nodes for logs, commands, terminals and forwarded ports of Pods, and to
// Pods, Services and nodes themselves. It decides where a request goes and what is refused; who may ask is decided before.
package connect

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilproxy "k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Reach is what passing requests on needs.
type Reach struct {
	// Get reads an object of the core group as it is now, or, if not live, from the cache.
	Get func(ctx context.Context, resource, namespace, name string, live bool) (metav1.Object, error)
	// Slices are the EndpointSlices of a Service.
	Slices func(namespace, service string) ([]*discoveryv1.EndpointSlice, error)
	// Nodes connects to nodes.
	Nodes *Nodes
	// Authorizer is asked once more where what a request does differs from what its method says.
	Authorizer authorizer.UnconditionalAuthorizer

	backends *http.Transport
}

// Subresources are the storage of what is below a resource of the core group.
func (r *Reach) Subresources(resource string) map[string]rest.Storage {
	switch resource {
	case "pods":
		return map[string]rest.Storage{
			"pods/log":         &logREST{r},
			"pods/exec":        &streamREST{reach: r, kind: exec},
			"pods/attach":      &streamREST{reach: r, kind: attach},
			"pods/portforward": &streamREST{reach: r, kind: portForward},
			"pods/proxy":       &proxyREST{reach: r, kind: podProxy},
		}
	case "services":
		return map[string]rest.Storage{"services/proxy": &proxyREST{reach: r, kind: serviceProxy}}
	case "nodes":
		return map[string]rest.Storage{"nodes/proxy": &proxyREST{reach: r, kind: nodeProxy}}
	}
	return nil
}

// Subresource says whether a request is one that the server passes on, rather than answers: it may take as long as it likes, and its body is
// not the API's.
func Subresource(info *request.RequestInfo) bool {
	if info == nil || !info.IsResourceRequest || info.APIGroup != corev1.GroupName {
		return false
	}
	switch info.Resource {
	case "pods":
		switch info.Subresource {
		case "log", "exec", "attach", "portforward", "proxy":
			return true
		}
	case "services", "nodes":
		return info.Subresource == "proxy"
	}
	return false
}

// New makes a Reach; its Nodes must be complete.
func New(r Reach) *Reach {
	r.backends = backendTransport()
	return &r
}

func (r *Reach) pod(ctx context.Context, name string) (*corev1.Pod, error) {
	obj, err := r.Get(ctx, "pods", request.NamespaceValue(ctx), name, true)
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Pod), nil
}

// node finds out where a node serves what kubelets do.
func (r *Reach) node(ctx context.Context, name string) (*corev1.Node, string, error) {
	obj, err := r.Get(ctx, "nodes", "", name, false)
	if apierrors.IsNotFound(err) {
		obj, err = r.Get(ctx, "nodes", "", name, true)
	}
	if err != nil {
		return nil, "", err
	}
	node := obj.(*corev1.Node)
	host := addressOf(node)
	if host == "" {
		return nil, "", apierrors.NewServiceUnavailable(fmt.Sprintf("node %s has no address in status.addresses", name))
	}
	return node, host, nil
}

// kubeletPort is where kubelets serve if their Node does not say.
const kubeletPort = 10250

func portOf(node *corev1.Node) string {
	port := int(node.Status.DaemonEndpoints.KubeletEndpoint.Port)
	if port <= 0 {
		port = kubeletPort
	}
	return strconv.Itoa(port)
}

// addressOf is the address of a node that this server uses: one that needs no name to be resolved, if there is one.
func addressOf(node *corev1.Node) string {
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName, corev1.NodeInternalDNS, corev1.NodeExternalDNS} {
		for _, a := range node.Status.Addresses {
			if a.Type == kind && a.Address != "" {
				return a.Address
			}
		}
	}
	return ""
}

// container is the one that is meant: the Pod's only one if none is named.
func container(pod *corev1.Pod, name string) (string, error) {
	var names []string
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			names = append(names, list[i].Name)
		}
	}
	for i := range pod.Spec.EphemeralContainers {
		names = append(names, pod.Spec.EphemeralContainers[i].Name)
	}
	if name == "" {
		if len(pod.Spec.Containers) == 1 {
			return pod.Spec.Containers[0].Name, nil
		}
		return "", apierrors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s, choose one of: %s", pod.Name, names))
	}
	for _, n := range names {
		if n == name {
			return name, nil
		}
	}
	return "", apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", name, pod.Name))
}

// backend is an address that a request may be passed on to: one that others have, too. Loopback is the server's own, and at link-local
// addresses clouds serve credentials.
func backend(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if addr = addr.Unmap(); err != nil || !addr.IsGlobalUnicast() || addr.IsLinkLocalUnicast() {
		return netip.Addr{}, apierrors.NewBadRequest("address not allowed")
	}
	return addr, nil
}

// target splits NAME, NAME:PORT and SCHEME:NAME:PORT.
func target(id string) (scheme, name, port string, ok bool) {
	switch parts := strings.Split(id, ":"); len(parts) {
	case 1:
		name = parts[0]
	case 2:
		name, port = parts[0], parts[1]
	case 3:
		scheme, name, port = parts[0], parts[1], parts[2]
		if scheme != "http" && scheme != "https" && scheme != "" {
			return "", "", "", false
		}
	default:
		return "", "", "", false
	}
	return scheme, name, port, name != ""
}

// location is a URL without a path.
func location(scheme, host, port string) *url.URL {
	if scheme == "" {
		scheme = "http"
	}
	u := &url.URL{Scheme: scheme, Host: host}
	switch {
	case port != "":
		u.Host = net.JoinHostPort(host, port)
	case strings.Contains(host, ":"):
		u.Host = "[" + host + "]"
	}
	return u
}

// mayCreate demands the right to create, of whoever comes with a method that needs another: a WebSocket begins with GET, and what follows
// changes things all the same.
func (r *Reach) mayCreate(ctx context.Context) error {
	attributes, err := filters.GetAuthorizerAttributes(ctx)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	if attributes.GetVerb() == "create" {
		return nil
	}
	decision, reason, err := r.Authorizer.Authorize(ctx, asCreate{attributes})
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	if decision == authorizer.DecisionAllow {
		return nil
	}
	if reason == "" {
		reason = "it takes the permission to create " + attributes.GetResource() + "/" + attributes.GetSubresource()
	}
	return apierrors.NewForbidden(schema.GroupResource{Group: attributes.GetAPIGroup(), Resource: attributes.GetResource()}, attributes.GetName(), errors.New(reason))
}

type asCreate struct{ authorizer.Attributes }

func (asCreate) GetVerb() string { return "create" }

func handler(to *url.URL, transport http.RoundTripper, wrap, upgrade bool, responder rest.Responder) *utilproxy.UpgradeAwareHandler {
	return utilproxy.NewUpgradeAwareHandler(to, transport, wrap, upgrade, utilproxy.NewErrorResponder(responder))
}

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/apiserver/pkg/util/webhook"
	corelisters "k8s.io/client-go/listers/core/v1"
	restclient "k8s.io/client-go/rest"
	"k8s.io/component-base/tracing"
)

// webhookCredentials are what the server shows to webhooks: nothing, unless it is the webhook itself.
func webhookCredentials(loopback *restclient.Config, tracer tracing.TracerProvider) webhook.AuthenticationInfoResolverWrapper {
	return webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, loopback, tracer)
}

// serviceResolver finds the address of a webhook that is given as a Service: that of a ready endpoint. A cluster IP would
// only do where this machine runs a proxy, which a server need not. It reads Services and EndpointSlices where the API
// itself keeps them.
type serviceResolver struct {
	services rest.Getter
	slices   rest.Lister
}

var _ webhook.ServiceResolver = &serviceResolver{}

// resolveTimeout bounds reads of the server's own caches.
const resolveTimeout = 5 * time.Second

// connect gives the resolver the storage that it reads.
func (r *serviceResolver) connect(version schema.GroupVersion, path string, storage rest.Storage) {
	switch {
	case version == corev1.SchemeGroupVersion && path == "services":
		r.services = storage.(rest.Getter)
	case version == discoveryv1.SchemeGroupVersion && path == "endpointslices":
		r.slices = storage.(rest.Lister)
	}
}

// ResolveEndpoint is where to connect to for a port of a Service.
func (r *serviceResolver) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	svc, err := r.service(namespace, name)
	if err != nil {
		return nil, err
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return &url.URL{Scheme: "https", Host: net.JoinHostPort(svc.Spec.ExternalName, strconv.Itoa(int(port)))}, nil
	}
	at, err := proxy.ResolveEndpoint(resolverServices{r, namespace}, r, namespace, name, port)
	if err != nil {
		return nil, fmt.Errorf("service %s/%s: %w", namespace, name, err)
	}
	return at, nil
}

func (r *serviceResolver) service(namespace, name string) (*corev1.Service, error) {
	ctx, cancel := context.WithTimeout(genericrequest.WithNamespace(context.Background(), namespace), resolveTimeout)
	defer cancel()
	obj, err := r.services.Get(ctx, name, &metav1.GetOptions{ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Service), nil
}

// GetEndpointSlices are those of a Service.
func (r *serviceResolver) GetEndpointSlices(namespace, name string) ([]*discoveryv1.EndpointSlice, error) {
	ctx, cancel := context.WithTimeout(genericrequest.WithNamespace(context.Background(), namespace), resolveTimeout)
	defer cancel()
	obj, err := r.slices.List(ctx, &internalversion.ListOptions{
		LabelSelector: labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: name}), ResourceVersion: "0",
	})
	if err != nil {
		return nil, err
	}
	list := obj.(*discoveryv1.EndpointSliceList)
	out := make([]*discoveryv1.EndpointSlice, len(list.Items))
	for i := range list.Items {
		out[i] = &list.Items[i]
	}
	return out, nil
}

// resolverServices is the resolver as k8s.io/apiserver wants to read Services.
type resolverServices struct {
	*serviceResolver
	namespace string
}

var _ corelisters.ServiceLister = resolverServices{}

// Services are those of a namespace.
func (s resolverServices) Services(namespace string) corelisters.ServiceNamespaceLister {
	return resolverServices{s.serviceResolver, namespace}
}

// Get reads one.
func (s resolverServices) Get(name string) (*corev1.Service, error) {
	return s.service(s.namespace, name)
}

// List is not needed: a webhook names one Service.
func (resolverServices) List(labels.Selector) ([]*corev1.Service, error) {
	return nil, errors.ErrUnsupported
}

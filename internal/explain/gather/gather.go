// Package gather reads the evidence for package explain: objects from the API, with read access only, and what nodes report about
// themselves through the API server. What may not be read is noted, and never an error. It decides nothing.
package gather

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
)

// Options are what to read, and from where.
type Options struct {
	Config *rest.Config
	// Client, if not nil, is used in place of one that is made from Config.
	Client kubernetes.Interface
	// Zone is the cluster's DNS zone.
	Zone string
	// Namespace is read alone if the others may not be read.
	Namespace string
	// Services, NAMESPACE/NAME, if there are any, are the only ones that nodes are asked about.
	Services []string
	// Focus, if not nil, decides from what the API has what nodes are asked for.
	Focus func(*explain.Evidence) explain.Focus
	// Probe has nodes connect to the Service, and ask DNS.
	Probe bool
	// NodeTimeout is how long a node may take to answer.
	NodeTimeout time.Duration
	// SkipNodes has no node asked.
	SkipNodes bool
	// Known has objects that somebody has read already, of the resources that are true in Covered: these are not listed.
	Known   *explain.Evidence
	Covered map[string]bool
	// ObjectsOnly reads neither Secrets nor Events nor the server's certificate, and asks no node: for those who look again and again.
	ObjectsOnly bool
}

// pageSize is how many objects one request asks for.
const pageSize = 1000

// handmadeEndpoints leaves out those that a controller writes: what it wrote is in EndpointSlices, too. (Before Kubernetes 1.33 they are not labelled.)
const handmadeEndpoints = "endpoints.kubernetes.io/managed-by!=endpoint-controller"

// maxEvents is how many Events are read at most: they only add words to findings.
const maxEvents = 5000

// gatherer fills evidence from several goroutines.
type gatherer struct {
	Options
	client kubernetes.Interface
	focus  explain.Focus

	mu  sync.Mutex
	out *explain.Evidence
	err error // the API server could not be reached at all
}

// Gather reads everything once.
func Gather(ctx context.Context, o Options) (*explain.Evidence, error) {
	client := o.Client
	if client == nil {
		config := rest.CopyConfig(o.Config)
		config.QPS = -1 // the server's own limits are what counts
		config.WarningHandler = rest.NoWarnings{}
		// Half of the time would go by with reading JSON.
		config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
		var err error
		if client, err = kubernetes.NewForConfig(config); err != nil {
			return nil, err
		}
	}
	if o.NodeTimeout == 0 {
		o.NodeTimeout = 4 * time.Second
	}
	g := &gatherer{Options: o, client: client, out: &explain.Evidence{
		Now: time.Now(), Zone: o.Zone, Unseen: map[string]string{}, Secrets: map[explain.Ref]bool{}, Reports: map[string]*explain.NodeReport{},
	}}
	if o.Known != nil {
		g.begin(o.Known)
	}
	if err := g.reach(ctx); err != nil {
		return nil, err
	}
	g.lists(ctx)
	if g.err != nil {
		return nil, g.err
	}
	g.balancers(ctx)
	if o.ObjectsOnly {
		for _, resource := range []string{"secrets", "events", "nodes/proxy"} {
			g.out.Unseen[resource] = "not looked at"
		}
		return g.out, nil
	}
	g.secrets(ctx)
	if !o.SkipNodes {
		if o.Focus != nil {
			g.focus = o.Focus(g.out)
		}
		g.nodes(ctx)
	}
	return g.out, nil
}

// begin takes over the objects that are known; all else is this look's own.
func (g *gatherer) begin(with *explain.Evidence) {
	out := *with
	out.Now, out.Zone, out.Unseen, out.Secrets, out.Reports = g.out.Now, g.out.Zone, g.out.Unseen, g.out.Secrets, g.out.Reports
	g.out = &out
}

// reach says in one line that the server can't be asked.
func (g *gatherer) reach(ctx context.Context) error {
	_, err := g.client.CoreV1().Services(orDefault(g.Namespace)).List(ctx, metav1.ListOptions{Limit: 1})
	if err == nil || apierrors.IsForbidden(err) {
		return nil
	}
	where := ""
	if g.Config != nil {
		where = " at " + g.Config.Host
	}
	return fmt.Errorf("ask the API server%s: %w", where, err)
}

func orDefault(namespace string) string {
	if namespace == "" {
		return metav1.NamespaceDefault
	}
	return namespace
}

// lists reads all resources at the same time.
func (g *gatherer) lists(ctx context.Context) {
	c, e := g.client, g.out
	var all sync.WaitGroup
	for _, read := range []func(){
		func() {
			list(ctx, g, "namespaces", "", func(_ string, o metav1.ListOptions) (*corev1.NamespaceList, error) {
				return c.CoreV1().Namespaces().List(ctx, o)
			},
				func(l *corev1.NamespaceList) { e.Namespaces = append(e.Namespaces, l.Items...) })
		},
		func() {
			list(ctx, g, "services", g.Namespace, func(n string, o metav1.ListOptions) (*corev1.ServiceList, error) {
				return c.CoreV1().Services(n).List(ctx, o)
			},
				func(l *corev1.ServiceList) { e.Services = append(e.Services, l.Items...) })
		},
		func() {
			list(ctx, g, "endpointslices", g.Namespace, func(n string, o metav1.ListOptions) (*discoveryv1.EndpointSliceList, error) {
				return c.DiscoveryV1().EndpointSlices(n).List(ctx, o)
			}, func(l *discoveryv1.EndpointSliceList) { e.Slices = append(e.Slices, l.Items...) })
		},
		func() {
			list(ctx, g, "endpoints", g.Namespace, func(n string, o metav1.ListOptions) (*corev1.EndpointsList, error) {
				o.LabelSelector = handmadeEndpoints
				fromCache(&o)
				return c.CoreV1().Endpoints(n).List(ctx, o)
			}, func(l *corev1.EndpointsList) { e.Endpoints = append(e.Endpoints, l.Items...) })
		},
		func() {
			list(ctx, g, "pods", g.Namespace, func(n string, o metav1.ListOptions) (*corev1.PodList, error) { return c.CoreV1().Pods(n).List(ctx, o) },
				func(l *corev1.PodList) { e.Pods = append(e.Pods, l.Items...) })
		},
		func() {
			list(ctx, g, "nodes", "", func(_ string, o metav1.ListOptions) (*corev1.NodeList, error) { return c.CoreV1().Nodes().List(ctx, o) },
				func(l *corev1.NodeList) { e.Nodes = append(e.Nodes, l.Items...) })
		},
		func() {
			list(ctx, g, "leases", "kube-system", func(n string, o metav1.ListOptions) (*coordinationv1.LeaseList, error) {
				if g.ObjectsOnly {
					n = metav1.NamespaceSystem // nodes' are many, and only tell people when a node last reported
				}
				fromCache(&o)
				return c.CoordinationV1().Leases(n).List(ctx, o)
			}, func(l *coordinationv1.LeaseList) { e.Leases = append(e.Leases, l.Items...) })
		},
		func() {
			list(ctx, g, "events", g.Namespace, func(n string, o metav1.ListOptions) (*corev1.EventList, error) {
				if g.ObjectsOnly || len(e.Events) >= maxEvents {
					return &corev1.EventList{}, nil
				}
				return c.CoreV1().Events(n).List(ctx, o)
			}, func(l *corev1.EventList) { e.Events = append(e.Events, l.Items...) })
		},
		func() {
			list(ctx, g, "deployments", g.Namespace, func(n string, o metav1.ListOptions) (*appsv1.DeploymentList, error) {
				return c.AppsV1().Deployments(n).List(ctx, o)
			},
				func(l *appsv1.DeploymentList) { e.Deployments = append(e.Deployments, l.Items...) })
		},
		func() {
			list(ctx, g, "replicasets", g.Namespace, func(n string, o metav1.ListOptions) (*appsv1.ReplicaSetList, error) {
				return c.AppsV1().ReplicaSets(n).List(ctx, o)
			},
				func(l *appsv1.ReplicaSetList) { e.ReplicaSets = append(e.ReplicaSets, l.Items...) })
		},
		func() {
			list(ctx, g, "statefulsets", g.Namespace, func(n string, o metav1.ListOptions) (*appsv1.StatefulSetList, error) {
				return c.AppsV1().StatefulSets(n).List(ctx, o)
			}, func(l *appsv1.StatefulSetList) { e.StatefulSets = append(e.StatefulSets, l.Items...) })
		},
		func() {
			list(ctx, g, "daemonsets", g.Namespace, func(n string, o metav1.ListOptions) (*appsv1.DaemonSetList, error) {
				return c.AppsV1().DaemonSets(n).List(ctx, o)
			},
				func(l *appsv1.DaemonSetList) { e.DaemonSets = append(e.DaemonSets, l.Items...) })
		},
		func() {
			list(ctx, g, "ingresses", g.Namespace, func(n string, o metav1.ListOptions) (*networkingv1.IngressList, error) {
				return c.NetworkingV1().Ingresses(n).List(ctx, o)
			}, func(l *networkingv1.IngressList) { e.Ingresses = append(e.Ingresses, l.Items...) })
		},
		func() {
			list(ctx, g, "ingressclasses", "", func(_ string, o metav1.ListOptions) (*networkingv1.IngressClassList, error) {
				return c.NetworkingV1().IngressClasses().List(ctx, o)
			}, func(l *networkingv1.IngressClassList) { e.IngressClasses = append(e.IngressClasses, l.Items...) })
		},
		func() {
			list(ctx, g, "ipaddresses", "", func(_ string, o metav1.ListOptions) (*networkingv1.IPAddressList, error) {
				return c.NetworkingV1().IPAddresses().List(ctx, o)
			}, func(l *networkingv1.IPAddressList) { e.IPAddresses = append(e.IPAddresses, l.Items...) })
		},
		func() {
			list(ctx, g, "servicecidrs", "", func(_ string, o metav1.ListOptions) (*networkingv1.ServiceCIDRList, error) {
				return c.NetworkingV1().ServiceCIDRs().List(ctx, o)
			}, func(l *networkingv1.ServiceCIDRList) { e.ServiceCIDRs = append(e.ServiceCIDRs, l.Items...) })
		},
	} {
		all.Go(read)
	}
	if !g.ObjectsOnly {
		all.Go(func() { g.server(ctx) })
	}
	all.Go(func() { g.reports(ctx) })
	all.Wait()
}

// lister is any list of objects.
type lister interface {
	runtime.Object
	GetContinue() string
}

// list reads a resource page by page: of all namespaces or, if that is forbidden, of one. A resource that the server does not have
// is as good as empty.
func list[L lister](ctx context.Context, g *gatherer, resource, namespace string, read func(namespace string, o metav1.ListOptions) (L, error), add func(L)) {
	where, o := "", metav1.ListOptions{Limit: pageSize}
	for ctx.Err() == nil && !g.Covered[resource] {
		page, err := read(where, o)
		switch {
		case apierrors.IsForbidden(err) && where == "" && namespace != "":
			where = namespace
			if resource == "services" {
				g.note(func() { g.out.Limited = namespace })
			}
			continue
		case apierrors.IsNotFound(err):
			return
		case err != nil:
			g.note(func() { g.out.Unseen[resource] = short(err) })
			return
		}
		forgetManagers(page)
		add(page)
		if o.Continue = page.GetContinue(); o.Continue == "" {
			return
		}
	}
}

// fromCache has the server answer with what it has at hand, for what is much to read, of which few are wanted, or which is not of this moment anyway. What
// it has at hand is milliseconds old.
func fromCache(o *metav1.ListOptions) {
	if o.Continue == "" {
		o.ResourceVersion = "0"
	}
}

// forgetManagers drops who has written which fields, which is up to half of an object and says nothing about Services.
func forgetManagers(page runtime.Object) {
	_ = meta.EachListItem(page, func(object runtime.Object) error { // it fails for what is no list
		if o, err := meta.Accessor(object); err == nil {
			o.SetManagedFields(nil)
		}
		return nil
	})
}

// short is an error without what a reader knows already.
func short(err error) string {
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Reason == metav1.StatusReasonForbidden {
		return "forbidden"
	}
	return err.Error()
}

func (g *gatherer) note(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
}

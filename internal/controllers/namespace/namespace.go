// Package namespace deletes the content of a deleted namespace, and finalizes it when nothing is left. It knows kinds
// only from discovery, and their objects only by their metadata.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
)

const (
	// A request that was admitted before the API server knew of the deletion may still be on its way.
	grace = 500 * time.Millisecond
	// A namespace that waits for finalizers, or for Pods to end, is checked again after this time.
	again = time.Second
)

// Deps are what the controller needs.
type Deps struct {
	Client     kubernetes.Interface
	Metadata   metadata.Interface
	Discovery  discovery.DiscoveryInterface
	Namespaces cache.SharedIndexInformer
	Workers    int
}

// Controller deletes the content of namespaces.
type Controller struct {
	Deps
	queue *queue.Queue
}

// New makes the controller; Run starts it once the informer it was given has synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{Deps: deps}
	c.queue = queue.New(queue.Options{Name: "namespace", FirstBackOff: 50 * time.Millisecond}, c.sync)
	changed := func(obj any) {
		if ns := obj.(*corev1.Namespace); ns.DeletionTimestamp != nil {
			c.queue.AddAfter(queue.Key{Name: ns.Name}, grace)
		}
	}
	_, err := deps.Namespaces.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    changed,
		UpdateFunc: func(_, obj any) { changed(obj) },
	})
	return c, err
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.queue.Run(ctx, max(c.Workers, 1))
	return nil
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	client := c.Client.CoreV1().Namespaces()
	ns, err := client.Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if ns.DeletionTimestamp == nil || len(ns.Spec.Finalizers) == 0 {
		return queue.Result{}, nil
	}
	progress := c.empty(ctx, ns.Name)
	if ctx.Err() != nil {
		return queue.Result{}, ctx.Err()
	}
	if next := ns.DeepCopy(); progress.describe(&next.Status) {
		updated, err := client.UpdateStatus(ctx, next, metav1.UpdateOptions{})
		if err != nil {
			return queue.Result{}, ignoreNotFound(err)
		}
		ns = updated
	}
	switch {
	case len(progress.failures) > 0 || progress.discovery != nil:
		return queue.Result{}, fmt.Errorf("namespace %s: %w", ns.Name, errors.Join(append(progress.failures, progress.discovery)...))
	case len(progress.remaining) > 0:
		return queue.Result{Again: again}, nil
	}
	return queue.Result{}, c.release(ctx, ns)
}

// release removes this controller's finalizer from the namespace. There may be others.
func (c *Controller) release(ctx context.Context, ns *corev1.Namespace) error {
	next := ns.DeepCopy()
	next.Spec.Finalizers = slices.DeleteFunc(next.Spec.Finalizers, func(f corev1.FinalizerName) bool { return f == corev1.FinalizerKubernetes })
	if len(next.Spec.Finalizers) == len(ns.Spec.Finalizers) {
		return nil
	}
	_, err := c.Client.CoreV1().Namespaces().Finalize(ctx, next, metav1.UpdateOptions{})
	return ignoreNotFound(err)
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// progress is how far the emptying of a namespace has come.
type progress struct {
	discovery  error
	failures   []error
	remaining  map[schema.GroupResource]int
	finalizers map[string]int
}

type kind struct {
	schema.GroupVersionResource
	collection bool // can be deleted as a whole
}

// Kinds in this order: Pods end before what they use goes, Services before the objects that controllers would make
// again for them, and events last, because deleting the rest makes some.
var order = []string{"services", "endpointslices", "endpoints", "", "events"}

func rank(resource string) int {
	if i := slices.Index(order, resource); i >= 0 && resource != "" {
		return i
	}
	return slices.Index(order, "")
}

// kinds are those that namespaces can have. An error may come with some of them: a broken group shouldn't keep the
// rest.
func (c *Controller) kinds() ([]kind, error) {
	lists, err := c.Discovery.ServerPreferredNamespacedResources()
	var out []kind
	for _, list := range lists {
		gv, parseErr := schema.ParseGroupVersion(list.GroupVersion)
		if parseErr != nil {
			err = errors.Join(err, parseErr)
			continue
		}
		for _, r := range list.APIResources {
			if slices.Contains(r.Verbs, "delete") && slices.Contains(r.Verbs, "list") && !strings.Contains(r.Name, "/") {
				out = append(out, kind{gv.WithResource(r.Name), slices.Contains(r.Verbs, "deletecollection")})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b kind) int { return rank(a.Resource) - rank(b.Resource) })
	return out, err
}

// empty deletes what it can of a namespace.
func (c *Controller) empty(ctx context.Context, namespace string) progress {
	p := progress{remaining: map[schema.GroupResource]int{}, finalizers: map[string]int{}}
	kinds, err := c.kinds()
	p.discovery = err
	if i := slices.IndexFunc(kinds, func(k kind) bool { return k.Group == "" && k.Resource == "pods" }); i >= 0 {
		c.emptyKind(ctx, kinds[i], namespace, &p)
		if len(p.remaining) > 0 || len(p.failures) > 0 {
			return p
		}
		kinds = slices.Delete(kinds, i, i+1)
	}
	for _, k := range kinds {
		if ctx.Err() != nil {
			return p
		}
		c.emptyKind(ctx, k, namespace, &p)
	}
	return p
}

func (c *Controller) emptyKind(ctx context.Context, k kind, namespace string, p *progress) {
	client := c.Metadata.Resource(k.GroupVersionResource).Namespace(namespace)
	list, err := client.List(ctx, metav1.ListOptions{})
	if err == nil && len(list.Items) > 0 {
		if err = c.deleteAll(ctx, client, k, list); err == nil {
			list, err = client.List(ctx, metav1.ListOptions{})
		}
	}
	if apierrors.IsMethodNotSupported(err) || apierrors.IsNotFound(err) {
		return // discovery lists what isn't served
	}
	if err != nil {
		p.failures = append(p.failures, fmt.Errorf("%s: %w", k.GroupResource(), err))
		return
	}
	if len(list.Items) > 0 {
		p.remaining[k.GroupResource()] = len(list.Items)
	}
	for i := range list.Items {
		for _, f := range list.Items[i].Finalizers {
			p.finalizers[f]++
		}
	}
}

// deleteAll deletes in the background: everything goes, so nothing needs to be orphaned or waited for.
func (c *Controller) deleteAll(ctx context.Context, client metadata.ResourceInterface, k kind, list *metav1.PartialObjectMetadataList) error {
	background := metav1.DeletePropagationBackground
	opts := metav1.DeleteOptions{PropagationPolicy: &background}
	if k.collection {
		return client.DeleteCollection(ctx, opts, metav1.ListOptions{})
	}
	for i := range list.Items {
		if err := client.Delete(ctx, list.Items[i].Name, opts); ignoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

func counts[K comparable](m map[K]int, format string) string {
	var words []string
	for _, k := range slices.Collect(maps.Keys(m)) {
		words = append(words, fmt.Sprintf(format, k, m[k]))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

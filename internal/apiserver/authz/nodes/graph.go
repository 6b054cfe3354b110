package nodes

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/tools/cache"
)

// object is what a node may need: a Pod, or something that a Pod refers to.
type object struct {
	kind            Kind
	namespace, name string
}

// Graph knows which nodes need which objects, because Pods of theirs refer to them. It may be read and changed at the same
// time; a question costs two look-ups in maps.
type Graph struct {
	synced chan struct{} // closed when all Pods are in it
	once   sync.Once
	source atomic.Pointer[Source] // where the Pods are read; nil before Run

	mu sync.RWMutex
	// pods are the Pods that have a node, and needed how many Pods of each node refer to an object.
	pods   map[object]placed
	needed map[object]map[string]int
}

// placed is a Pod on its node.
type placed struct {
	node       string
	references []Reference
}

// NewGraph returns one without Pods.
func NewGraph() *Graph {
	return &Graph{synced: make(chan struct{}), pods: map[object]placed{}, needed: map[object]map[string]int{}}
}

// Needs says whether a Pod on a node is, or refers to, an object. A node may have heard of its Pod a moment before the graph: before the
// answer is no, the Pods are looked at.
func (g *Graph) Needs(ctx context.Context, node string, kind Kind, namespace, name string) bool {
	at := object{kind, namespace, name}
	g.mu.RLock()
	needed := g.needed[at][node] > 0
	g.mu.RUnlock()
	return needed || g.look(ctx, node, at)
}

// look is Needs by the Pods of a node as they are in the API's cache, from which nodes hear of them.
func (g *Graph) look(ctx context.Context, node string, at object) bool {
	source := g.source.Load()
	if source == nil {
		return false
	}
	list, err := (*source).List(request.WithNamespace(ctx, at.namespace), &metainternalversion.ListOptions{
		ResourceVersion: "0", FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node),
	})
	pods, ok := list.(*corev1.PodList)
	if err != nil || !ok {
		return false
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Spec.NodeName == node && (at == object{Pod, pod.Namespace, pod.Name} || slices.Contains(granted(pod), Reference{at.kind, at.name})) {
			return true
		}
	}
	return false
}

// granted is what a Pod lets its node read. A node makes mirror Pods itself: one that grants something would be an escalation. They are
// denied when they are created, but an older version may have stored one.
func granted(pod *corev1.Pod) []Reference {
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror || pod.Spec.NodeName == "" {
		return nil
	}
	return References(pod)
}

// Source is where the Pods are read: the API's own storage, which costs no connection and no decoding.
type Source interface {
	rest.Lister
	rest.Watcher
}

// Run follows the Pods until ctx ends. It keeps what Graph says of them and not the Pods.
func (g *Graph) Run(ctx context.Context, pods Source) {
	g.source.Store(&pods)
	lw := listWatch{&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return pods.List(everywhere(ctx), options(o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := pods.Watch(everywhere(ctx), options(o))
			if err != nil {
				return nil, err
			}
			return watch.Filter(w, unwrap), nil
		},
	}}
	cache.NewReflectorWithOptions(lw, &corev1.Pod{}, store{g}, cache.ReflectorOptions{Name: "node-authorizer"}).RunWithContext(ctx)
}

// listWatch lists before it watches: the storage has no use for a list that comes as a watch.
type listWatch struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported says so to the reflector.
func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

// unwrap takes an object out of what carries its encodings to many watchers.
func unwrap(e watch.Event) (watch.Event, bool) {
	if shared, ok := e.Object.(runtime.CacheableObject); ok {
		e.Object = shared.GetObject()
	}
	return e, true
}

func everywhere(ctx context.Context) context.Context {
	return request.WithNamespace(ctx, metav1.NamespaceAll)
}

func options(o metav1.ListOptions) *metainternalversion.ListOptions {
	return &metainternalversion.ListOptions{
		ResourceVersion: o.ResourceVersion, ResourceVersionMatch: o.ResourceVersionMatch, AllowWatchBookmarks: o.AllowWatchBookmarks,
		Limit: o.Limit, Continue: o.Continue, TimeoutSeconds: o.TimeoutSeconds,
	}
}

// WaitSynced waits until the graph has all Pods; false if ctx ends before.
func (g *Graph) WaitSynced(ctx context.Context) bool {
	select {
	case <-g.synced:
		return true
	case <-ctx.Done():
		return false
	}
}

// set puts a Pod in its place, or takes it out if it has no node. g.mu is held.
func (g *Graph) set(pod *corev1.Pod) {
	at := object{Pod, pod.Namespace, pod.Name}
	next := placed{node: pod.Spec.NodeName, references: granted(pod)}
	if was, ok := g.pods[at]; ok {
		if was.node == next.node && slices.Equal(was.references, next.references) {
			return
		}
		g.remove(at)
	}
	if next.node == "" {
		return
	}
	g.pods[at] = next
	g.count(at, next.node, 1)
	for _, ref := range next.references {
		g.count(object{ref.Kind, pod.Namespace, ref.Name}, next.node, 1)
	}
}

// remove takes a Pod out, with what only it needed. g.mu is held.
func (g *Graph) remove(at object) {
	was, ok := g.pods[at]
	if !ok {
		return
	}
	delete(g.pods, at)
	g.count(at, was.node, -1)
	for _, ref := range was.references {
		g.count(object{ref.Kind, at.namespace, ref.Name}, was.node, -1)
	}
}

func (g *Graph) count(o object, node string, change int) {
	byNode := g.needed[o]
	if byNode == nil {
		byNode = make(map[string]int, 1)
		g.needed[o] = byNode
	}
	if byNode[node] += change; byNode[node] > 0 {
		return
	}
	delete(byNode, node)
	if len(byNode) == 0 {
		delete(g.needed, o)
	}
}

// store is a graph as a reflector fills it.
type store struct{ g *Graph }

var _ cache.ReflectorStore = store{}

func (s store) Add(obj any) error { return s.Update(obj) }

func (s store) Update(obj any) error {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("%T is no Pod", obj)
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.g.set(pod)
	return nil
}

func (s store) Delete(obj any) error {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("%T is no Pod", obj)
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.g.remove(object{Pod, pod.Namespace, pod.Name})
	return nil
}

// Replace makes the graph what a list says. Readers see each Pod as it was or as it is.
func (s store) Replace(list []any, _ string) error {
	listed := make(map[object]bool, len(list))
	for _, obj := range list {
		if err := s.Update(obj); err != nil {
			return err
		}
		pod := obj.(*corev1.Pod)
		listed[object{Pod, pod.Namespace, pod.Name}] = true
	}
	s.g.mu.Lock()
	for at := range s.g.pods {
		if !listed[at] {
			s.g.remove(at)
		}
	}
	s.g.mu.Unlock()
	s.g.once.Do(func() { close(s.g.synced) })
	return nil
}

func (store) Resync() error { return nil }

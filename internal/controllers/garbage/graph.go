package garbage

import (
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// object is what the collector keeps of an object: its identity and its owners.
type object struct {
	resource   schema.GroupVersionResource
	namespace  string
	name       string
	uid        types.UID
	owners     []metav1.OwnerReference
	deleting   bool // has a deletion timestamp
	foreground bool // waits for its dependents to go
	orphaning  bool // waits for its dependents to be orphaned
}

func objectOf(resource schema.GroupVersionResource, m *metav1.PartialObjectMetadata) *object {
	return &object{
		resource: resource, namespace: m.Namespace, name: m.Name, uid: m.UID,
		owners:     m.OwnerReferences,
		deleting:   m.DeletionTimestamp != nil,
		foreground: slices.Contains(m.Finalizers, metav1.FinalizerDeleteDependents),
		orphaning:  slices.Contains(m.Finalizers, metav1.FinalizerOrphanDependents),
	}
}

// blocks reports whether the object blocks the deletion of an owner in the foreground.
func (o *object) blocks(owner types.UID) bool {
	return slices.ContainsFunc(o.owners, func(r metav1.OwnerReference) bool {
		return r.UID == owner && r.BlockOwnerDeletion != nil && *r.BlockOwnerDeletion
	})
}

// graph holds the objects, and under every owner those that name it, whether the owner is there or not.
type graph struct {
	mu         sync.RWMutex
	objects    map[types.UID]*object
	dependents map[types.UID]map[types.UID]struct{}
}

func newGraph() *graph {
	return &graph{objects: map[types.UID]*object{}, dependents: map[types.UID]map[types.UID]struct{}{}}
}

func (g *graph) set(o *object) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unlink(g.objects[o.uid])
	g.objects[o.uid] = o
	for _, ref := range o.owners {
		if g.dependents[ref.UID] == nil {
			g.dependents[ref.UID] = map[types.UID]struct{}{}
		}
		g.dependents[ref.UID][o.uid] = struct{}{}
	}
}

func (g *graph) remove(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unlink(g.objects[uid])
	delete(g.objects, uid)
}

func (g *graph) unlink(o *object) {
	if o == nil {
		return
	}
	for _, ref := range o.owners {
		delete(g.dependents[ref.UID], o.uid)
		if len(g.dependents[ref.UID]) == 0 {
			delete(g.dependents, ref.UID)
		}
	}
}

func (g *graph) get(uid types.UID) *object {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.objects[uid]
}

// dependentsOf are the objects that name an owner.
func (g *graph) dependentsOf(owner types.UID) []*object {
	g.mu.RLock()
	defer g.mu.RUnlock()
	out := make([]*object, 0, len(g.dependents[owner]))
	for uid := range g.dependents[owner] {
		out = append(out, g.objects[uid])
	}
	return out
}

// inNamespace are the objects in a namespace.
func (g *graph) inNamespace(namespace string) []*object {
	g.mu.RLock()
	defer g.mu.RUnlock()
	var out []*object
	for _, o := range g.objects {
		if o.namespace == namespace {
			out = append(out, o)
		}
	}
	return out
}

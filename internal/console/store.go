package console

import (
	"context"
	"maps"
	"slices"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
)

// object is a pointer to one.
type object[T any] interface {
	*T
	runtime.Object
	metav1.Object
}

// storeOf keeps the objects of a kind by name, and as the list that evidence has.
type storeOf[T any, P object[T]] struct {
	resource string
	client   rest.Interface
	touch    func(resource, namespace string)
	count    func(more int64)
	set      func(*explain.Evidence, []T)

	mu    sync.Mutex
	all   map[string]P
	names []string // in order; nil: to be made
	list  []T      // nil: to be made
	ready chan struct{}
}

func newStore[T any, P object[T]](resource string, client func(*kubernetes.Clientset) rest.Interface, set func(*explain.Evidence, []T)) func(*objects) store {
	return func(o *objects) store {
		return &storeOf[T, P]{resource: resource, client: client(o.client), touch: o.touch, count: o.count, set: set, all: map[string]P{}, ready: make(chan struct{})}
	}
}

func (s *storeOf[T, P]) listed() <-chan struct{} { return s.ready }

func (s *storeOf[T, P]) exists(ctx context.Context, namespace string) bool {
	err := s.client.Get().NamespaceIfScoped(namespace, namespace != "").Resource(s.resource).Param("limit", "1").Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		s.replace(namespace, nil)
		return false
	}
	return true
}

func (s *storeOf[T, P]) follow(ctx context.Context, namespace string) {
	follow(ctx, s.client, s.resource, namespace, P(new(T)), sink[P]{put: s.put, drop: s.drop, replace: s.replace})
}

func objectName(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

func (s *storeOf[T, P]) put(o P) {
	s.change(func() {
		name := objectName(o)
		if s.all[name] == nil {
			s.names = nil
		}
		s.all[name] = o
	})
	s.touch(s.resource, o.GetNamespace())
}

// change changes which objects there are.
func (s *storeOf[T, P]) change(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.all)
	do()
	s.list = nil
	s.count(int64(len(s.all) - before))
}

func (s *storeOf[T, P]) drop(o P) {
	s.change(func() {
		s.names = nil
		delete(s.all, objectName(o))
	})
	s.touch(s.resource, o.GetNamespace())
}

func (s *storeOf[T, P]) replace(_ string, list []P) {
	touched := map[string]bool{}
	s.change(func() {
		before := s.all
		s.names = nil
		s.all = make(map[string]P, len(list))
		for _, o := range list {
			s.all[objectName(o)] = o
			if old := before[objectName(o)]; old == nil || old.GetResourceVersion() != o.GetResourceVersion() {
				touched[o.GetNamespace()] = true
			}
			delete(before, objectName(o))
		}
		for _, gone := range before {
			touched[gone.GetNamespace()] = true
		}
		select {
		case <-s.ready:
		default:
			close(s.ready)
		}
	})
	for namespace := range touched {
		s.touch(s.resource, namespace)
	}
}

// fill gives evidence the list, in the order in which the API lists.
func (s *storeOf[T, P]) fill(e *explain.Evidence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names == nil {
		s.names = slices.AppendSeq(make([]string, 0, len(s.all)), maps.Keys(s.all))
		slices.Sort(s.names)
	}
	if s.list == nil {
		s.list = make([]T, 0, len(s.all))
		for _, k := range s.names {
			s.list = append(s.list, *s.all[k])
		}
	}
	s.set(e, s.list)
}

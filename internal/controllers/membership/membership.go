// Package membership knows which Pods belong to which Service, and which Services a change of either affects. It
// knows selectors and labels, and nothing of what is written about a Service.
//
// One Pod's change costs work that grows with the Pod's labels and with the Services that share its most telling label,
// never with the number of other Services or Pods.
package membership

import (
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Key names a Service.
type Key = types.NamespacedName

// Index relates the Pods and Services of each namespace.
type Index struct {
	mu     sync.RWMutex
	spaces map[string]*space
}

// pair is one label of a Pod, or one requirement of a selector.
type pair struct{ label, value string }

// space is one namespace. Pods are filed under those of their labels that some selector asks for; a Service under one
// requirement of its selector, its anchor: a Pod without that label can't belong to it.
type space struct {
	pods     map[string]*corev1.Pod
	filed    map[pair]map[string]*corev1.Pod
	asked    map[string]int // label → how many selectors ask for it
	services map[string]service
	anchored map[pair]map[string]service
}

type service struct {
	selector map[string]string
	anchor   pair
}

// NewIndex makes an empty index.
func NewIndex() *Index { return &Index{spaces: map[string]*space{}} }

func (x *Index) space(namespace string) *space {
	s := x.spaces[namespace]
	if s == nil {
		s = &space{
			pods:     map[string]*corev1.Pod{},
			filed:    map[pair]map[string]*corev1.Pod{},
			asked:    map[string]int{},
			services: map[string]service{},
			anchored: map[pair]map[string]service{},
		}
		x.spaces[namespace] = s
	}
	return s
}

func (x *Index) drop(namespace string) {
	if s := x.spaces[namespace]; s != nil && len(s.pods) == 0 && len(s.services) == 0 {
		delete(x.spaces, namespace)
	}
}

// SetPod files a Pod as it is now.
func (x *Index) SetPod(pod *corev1.Pod) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.space(pod.Namespace)
	if old := s.pods[pod.Name]; old != nil && !maps.Equal(old.Labels, pod.Labels) {
		s.unfile(old)
	}
	s.pods[pod.Name] = pod
	for label, value := range pod.Labels {
		if s.asked[label] > 0 {
			s.file(pair{label, value}, pod)
		}
	}
}

// DeletePod forgets a Pod.
func (x *Index) DeletePod(namespace, name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.spaces[namespace]
	if s == nil || s.pods[name] == nil {
		return
	}
	s.unfile(s.pods[name])
	delete(s.pods, name)
	x.drop(namespace)
}

// SetService notes a Service's selector. One without a selector selects nothing, so it is forgotten.
func (x *Index) SetService(key Key, selector map[string]string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.space(key.Namespace)
	old, known := s.services[key.Name]
	if known && maps.Equal(old.selector, selector) {
		return
	}
	// The new one first, so that a label that both ask for isn't filed twice.
	for label := range selector {
		s.ask(label)
	}
	if known {
		s.unanchor(key.Name, old)
	}
	if len(selector) > 0 {
		next := service{selector: selector, anchor: s.rarest(selector)}
		s.services[key.Name] = next
		add(s.anchored, next.anchor, key.Name, next)
	}
	x.drop(key.Namespace)
}

// DeleteService forgets a Service.
func (x *Index) DeleteService(key Key) { x.SetService(key, nil) }

// Pods are those that a Service selects, as last filed.
func (x *Index) Pods(key Key) []*corev1.Pod {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.spaces[key.Namespace]
	if s == nil {
		return nil
	}
	svc, ok := s.services[key.Name]
	if !ok {
		return nil
	}
	fewest := s.filed[svc.anchor]
	for label, value := range svc.selector {
		if filed := s.filed[pair{label, value}]; len(filed) < len(fewest) {
			fewest = filed
		}
	}
	var members []*corev1.Pod
	for _, pod := range fewest {
		if matches(svc.selector, pod.Labels) {
			members = append(members, pod)
		}
	}
	return members
}

// Services appends to keys those whose selectors match the labels.
func (x *Index) Services(keys []Key, namespace string, labels map[string]string) []Key {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.spaces[namespace]
	if s == nil {
		return keys
	}
	for label, value := range labels {
		for name, svc := range s.anchored[pair{label, value}] {
			if matches(svc.selector, labels) {
				keys = append(keys, Key{Namespace: namespace, Name: name})
			}
		}
	}
	return keys
}

func (s *space) file(p pair, pod *corev1.Pod) { add(s.filed, p, pod.Name, pod) }

func (s *space) unfile(pod *corev1.Pod) {
	for label, value := range pod.Labels {
		remove(s.filed, pair{label, value}, pod.Name)
	}
}

// ask counts a selector's interest in a label; the first to ask has the namespace's Pods filed under it.
func (s *space) ask(label string) {
	s.asked[label]++
	if s.asked[label] > 1 {
		return
	}
	for _, pod := range s.pods {
		if value, ok := pod.Labels[label]; ok {
			s.file(pair{label, value}, pod)
		}
	}
}

func (s *space) unanchor(name string, svc service) {
	delete(s.services, name)
	remove(s.anchored, svc.anchor, name)
	for label := range svc.selector {
		if s.asked[label]--; s.asked[label] > 0 {
			continue
		}
		delete(s.asked, label)
		for _, pod := range s.pods {
			if value, ok := pod.Labels[label]; ok {
				remove(s.filed, pair{label, value}, pod.Name)
			}
		}
	}
}

// rarest is the requirement that the fewest Services have as their anchor.
func (s *space) rarest(selector map[string]string) pair {
	var best pair
	fewest := -1
	for label, value := range selector {
		p := pair{label, value}
		n := len(s.anchored[p])
		if fewest < 0 || n < fewest || n == fewest && p.label < best.label {
			best, fewest = p, n
		}
	}
	return best
}

func matches(selector, labels map[string]string) bool {
	for label, value := range selector {
		if have, ok := labels[label]; !ok || have != value {
			return false
		}
	}
	return true
}

func add[V any](m map[pair]map[string]V, p pair, name string, v V) {
	inner := m[p]
	if inner == nil {
		inner = map[string]V{}
		m[p] = inner
	}
	inner[name] = v
}

func remove[V any](m map[pair]map[string]V, p pair, name string) {
	if inner := m[p]; inner != nil {
		delete(inner, name)
		if len(inner) == 0 {
			delete(m, p)
		}
	}
}

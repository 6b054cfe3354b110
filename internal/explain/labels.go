package explain

import (
	"fmt"
	"maps"
	"slices"
)

// labelSet are the labels of some Pods, or of those that a workload would make.
type labelSet struct {
	labels       map[string]string
	who, example string
}

// generated are labels that controllers add.
var generated = []string{"pod-template-hash", "controller-revision-hash", "statefulset.kubernetes.io/pod-name", "apps.kubernetes.io/pod-index", "pod-template-generation"}

// spaceLabels are the labels in use in a namespace, with indexes: a namespace may have thousands of sorts of Pods.
type spaceLabels struct {
	sets []labelSet
	with map[pair][]int
	// values are those of each key.
	values map[string][]string
}

const (
	// fewSets is how many sorts of Pods are compared with each other.
	fewSets = 200
	// fewAlike is how many sets with the same label are looked at.
	fewAlike = 50
)

// labelsOf are made when they are first asked for: most namespaces have no fault.
func (v *View) labelsOf(namespace string) *spaceLabels {
	out := v.sets[namespace]
	if out == nil {
		out = v.makeLabels(namespace)
		v.sets[namespace] = out
	}
	return out
}

func (v *View) makeLabels(namespace string) *spaceLabels {
	out := &spaceLabels{with: map[pair][]int{}, values: map[string][]string{}}
	seen := map[string]int{}
	numbers := []int{}
	for _, p := range v.inSpace[namespace] {
		if ended(p) {
			continue
		}
		labels := maps.Clone(p.Labels)
		maps.DeleteFunc(labels, func(k, _ string) bool { return slices.Contains(generated, k) })
		if len(labels) == 0 {
			continue
		}
		text := pairs(labels)
		i, ok := seen[text]
		if !ok {
			i = len(out.sets)
			seen[text] = i
			out.add(labelSet{labels: labels, example: "Pod " + p.Name})
			numbers = append(numbers, 0)
		}
		numbers[i]++
	}
	for i, n := range numbers {
		out.sets[i].who = fmt.Sprintf("%d Pods have", n)
		if n == 1 {
			out.sets[i].who = out.sets[i].example + " has"
		}
	}
	for _, w := range v.workloads[namespace] {
		text := pairs(w.Template.Labels)
		if _, ok := seen[text]; !ok && text != "" {
			seen[text] = len(out.sets)
			out.add(labelSet{labels: w.Template.Labels, who: "the Pods of " + w.Ref.String() + " have", example: w.Ref.String()})
		}
	}
	return out
}

func (l *spaceLabels) add(set labelSet) {
	for k, value := range set.labels {
		at := pair{k, value}
		if len(l.with[at]) == 0 {
			l.values[k] = append(l.values[k], value)
		}
		l.with[at] = append(l.with[at], len(l.sets))
	}
	l.sets = append(l.sets, set)
}

// candidates are the sets that a selector could mean: with one of its labels, with one that is almost that, or named as the Service.
func (l *spaceLabels) candidates(s *Service) (out []int) {
	seen := map[int]bool{}
	take := func(at pair) {
		list := l.with[at]
		for _, i := range list[:min(len(list), fewAlike)] {
			if !seen[i] {
				seen[i] = true
				out = append(out, i)
			}
		}
	}
	for _, k := range slices.Sorted(maps.Keys(s.Spec.Selector)) {
		value := s.Spec.Selector[k]
		take(pair{k, value})
		take(pair{k, s.Name})
		for _, other := range l.values[k] {
			if near(other, value) {
				take(pair{k, other})
			}
		}
		for key := range l.values {
			take(pair{key, value})
			if near(key, k) {
				take(pair{key, value})
				for _, other := range l.values[key] {
					if near(other, value) {
						take(pair{key, other})
					}
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// checkSelectors looks at Services whose selector matches no Pod: is it a typo, another namespace, or is nobody there.
func checkSelectors(v *View) (out []Finding) {
	if !v.sees("pods") {
		return nil
	}
	for _, s := range v.subjects {
		if s.selects() && len(s.Pods) == 0 {
			out = append(out, v.unmatched(s))
		}
	}
	return out
}

// unmatched is why a selector finds nothing, the most probable reason.
func (v *View) unmatched(s *Service) Finding {
	f := Finding{Severity: Broken, Sure: Certain, Object: s.ref(), Field: "spec.selector"}
	if w, ok := v.maker(s.Namespace, s.Spec.Selector); ok {
		return v.emptyWorkload(f, s, w)
	}
	if c := v.closest(s); c.likely {
		f.Code = "selector-typo"
		f.Verdict = fmt.Sprintf("%s selects no Pod: spec.selector asks for %s, and %s %s", s.ref(), c.asked(), c.who, c.has())
		f.Evidence = []string{fmt.Sprintf("spec.selector is %s", pairs(s.Spec.Selector)), fmt.Sprintf("%s: %s", c.example, pairs(c.labels))}
		f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": c.patch()}})}
		return f
	}
	if other := v.elsewhere(s); other != "" {
		f.Code = "selector-namespace"
		f.Verdict = fmt.Sprintf("%s selects no Pod: Pods with %s are in the namespace %s, and a selector never reaches into another namespace", s.ref(), pairs(s.Spec.Selector), other)
		f.Evidence = []string{fmt.Sprintf("%s in %s have these labels, none in %s", count(len(v.matching(other, s.Spec.Selector)), "Pod", "Pods"), other, s.Namespace)}
		if v.Service(other, s.Name) == nil {
			f.Fix = append(f.Fix, moved(s, other)...)
		}
		return f
	}
	f.Code = "selector-no-pods"
	f.Verdict = fmt.Sprintf("%s selects no Pod: none in the namespace %s has the labels %s", s.ref(), s.Namespace, pairs(s.Spec.Selector))
	f.Evidence = v.labelsInUse(s)
	f.Fix = []string{kubectl(s.Namespace, "get pods --show-labels")}
	return f
}

// maker is the workload whose Pods the selector would match.
func (v *View) maker(namespace string, selector map[string]string) (Workload, bool) {
	for _, w := range v.workloads[namespace] {
		if matches(selector, w.Template.Labels) {
			return w, true
		}
	}
	return Workload{}, false
}

// candidate are Pods that differ from a selector.
type candidate struct {
	selector, labels map[string]string
	// wrong are the selector's pairs that the labels don't have.
	wrong   []string
	key     string // of the labels, for the only wrong pair
	who     string
	example string
	likely  bool
	score   int
}

func (c candidate) asked() string {
	out := map[string]string{}
	for _, k := range c.wrong {
		out[k] = c.selector[k]
	}
	return pairs(out)
}

func (c candidate) has() string {
	if c.key != "" {
		return fmt.Sprintf("%s=%s", c.key, c.labels[c.key])
	}
	var have, lack []string
	for _, k := range c.wrong {
		if value, ok := c.labels[k]; ok {
			have = append(have, k+"="+value)
		} else {
			lack = append(lack, "no label "+k)
		}
	}
	return strings.Join(append(have, lack...), " and ")
}

// patch is what a merge patch of the selector must say.
func (c candidate) patch() map[string]any {
	out := map[string]any{}
	for _, k := range c.wrong {
		out[k] = nil
		if value, ok := c.labels[k]; ok && c.key == "" {
			out[k] = value
		}
	}
	if c.key != "" {
		out[c.key] = c.labels[c.key]
	}
	return out
}

// closest finds the labels in the namespace that the selector most probably means.
func (v *View) closest(s *Service) (best candidate) {
	space := v.labelsOf(s.Namespace)
	for _, i := range space.candidates(s) {
		c := judge(s, space.sets[i].labels)
		c.who, c.example = space.sets[i].who, space.sets[i].example
		if c.score > best.score {
			best = c
		}
	}
	if best.likely || len(space.sets) > fewSets {
		return best
	}
	// Pods with the selector's keys that no Service selects, and only one sort of them.
	var orphans []candidate
	for i := range space.sets {
		c := judge(s, space.sets[i].labels)
		c.who, c.example = space.sets[i].who, space.sets[i].example
		if c.allKeys() && !v.selected(s.Namespace, c.labels) {
			orphans = append(orphans, c)
		}
	}
	if len(orphans) == 1 {
		best = orphans[0]
		best.likely = true
	}
	return best
}

// allKeys: the labels have all keys of the selector, with other values.
func (c candidate) allKeys() bool {
	return !slices.ContainsFunc(c.wrong, func(k string) bool { _, ok := c.labels[k]; return !ok })
}

// selected says whether a Service of the namespace selects Pods with these labels.
func (v *View) selected(namespace string, labels map[string]string) bool {
	return slices.ContainsFunc(v.inNamespace[namespace], func(s *Service) bool { return s.selects() && matches(s.Spec.Selector, labels) })
}

// judge says how probable it is that a selector means these labels. A score of 0 is: not at all.
func judge(s *Service, labels map[string]string) candidate {
	c := candidate{selector: s.Spec.Selector, labels: labels}
	for _, k := range slices.Sorted(maps.Keys(s.Spec.Selector)) {
		if got, ok := labels[k]; !ok || got != s.Spec.Selector[k] {
			c.wrong = append(c.wrong, k)
		}
	}
	agree := len(s.Spec.Selector) - len(c.wrong)
	c.score = 10 * agree
	if len(c.wrong) == 1 {
		k := c.wrong[0]
		value, ok := labels[k]
		switch {
		case ok && near(value, s.Spec.Selector[k]):
			c.score, c.likely = c.score+100, true
		case !ok:
			if c.key = similarKey(k, s.Spec.Selector[k], labels); c.key != "" {
				c.score, c.likely = c.score+90, true
			} else if agree > 0 {
				c.score, c.likely = c.score+30, true // Pods with all the others lack this one
			}
		case agree > 0:
			c.score, c.likely = c.score+40, true
		}
	}
	// Labels that bear the Service's own name are what a Service is usually for.
	for _, k := range c.wrong {
		if labels[k] == s.Name {
			c.score, c.likely = c.score+50, true
		}
	}
	if !c.likely && agree > 0 && len(c.wrong) < len(s.Spec.Selector) {
		c.likely = true
	}
	return c
}

// similarKey is a key of the labels that could be meant by k: written a little differently, or with the same value.
func similarKey(k, value string, labels map[string]string) string {
	for _, other := range slices.Sorted(maps.Keys(labels)) {
		if near(other, k) || labels[other] == value {
			return other
		}
	}
	return ""
}

// elsewhere is another namespace with Pods that the selector would match, and that no Service there is for.
func (v *View) elsewhere(s *Service) string {
	spaces := map[string]int{}
	var fewest []*corev1.Pod
	first := true
	for k, value := range s.Spec.Selector {
		if list := v.anywhere[pair{k, value}]; first || len(list) < len(fewest) {
			fewest, first = list, false
		}
	}
	for _, p := range fewest[:min(len(fewest), fewAlike)] {
		if p.Namespace != s.Namespace && !ended(p) && matches(s.Spec.Selector, p.Labels) && !v.selected(p.Namespace, p.Labels) {
			spaces[p.Namespace]++
		}
	}
	names := slices.Sorted(maps.Keys(spaces))
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(spaces[b], spaces[a]) })
	if len(names) == 0 {
		return ""
	}
	return names[0]
}

// moved makes the Service in another namespace.
func moved(s *Service, namespace string) []string {
	if len(s.Spec.Ports) == 0 && !s.headless() {
		return nil
	}
	object := plainService(s, namespace)
	if s.headless() {
		object["spec"].(map[string]any)["clusterIP"] = corev1.ClusterIPNone
	}
	return []string{fmt.Sprintf("echo '%s' | kubectl create -f -", compact(object))}
}

// labelsInUse lists what Pods of the namespace are labelled with.
func (v *View) labelsInUse(s *Service) (out []string) {
	sets := v.labelsOf(s.Namespace).sets
	if len(sets) == 0 {
		return []string{"there are no labelled Pods in the namespace " + s.Namespace}
	}
	for _, set := range sets[:min(len(sets), 5)] {
		out = append(out, fmt.Sprintf("%s: %s", set.example, pairs(set.labels)))
	}
	return out
}

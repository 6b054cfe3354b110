package explain

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// changePod changes the specification of a Pod, with paths that begin there, where it comes from: in the template of its workload. A Pod that nobody
// made from a template is made again.
func (v *View) changePod(p *corev1.Pod, ops ...operation) []string {
	w, made := v.workload(p)
	prefix := "/spec"
	if made {
		prefix = "/spec/template/spec"
	}
	for i := range ops {
		ops[i].Path = prefix + ops[i].Path
	}
	if !made {
		return []string{again(p, "json", ops)}
	}
	return append([]string{jsonPatch(w, ops...)}, replaced(p, w)...)
}

// templatePatch is changePod with fields of the specification.
func (v *View) templatePatch(p *corev1.Pod, spec map[string]any) []string {
	w, made := v.workload(p)
	if !made {
		return []string{again(p, "merge", map[string]any{"spec": spec})}
	}
	return append([]string{mergePatch(w, map[string]any{"spec": map[string]any{"template": map[string]any{"spec": spec}}})}, replaced(p, w)...)
}

// containersPatch is templatePatch for fields of containers, which are found by their names: what is null is taken away, whether it is there or not.
func (v *View) containersPatch(p *corev1.Pod, spec map[string]any) []string {
	w, made := v.workload(p)
	if !made {
		return []string{again(p, "strategic", map[string]any{"spec": spec})}
	}
	patch := kubectl(w.Namespace, "patch %s %s -p '%s'", strings.ToLower(w.Kind), w.Name, compact(map[string]any{"spec": map[string]any{"template": map[string]any{"spec": spec}}}))
	return append([]string{patch}, replaced(p, w)...)
}

// again makes a Pod again with a change: most of a Pod can't be changed.
func again(p *corev1.Pod, kind string, patch any) string {
	return fmt.Sprintf("kubectl get pod %s -n %s -o json | kubectl patch --local -f - --type=%s -p '%s' -o json | kubectl replace --force -f -", p.Name, p.Namespace, kind, compact(patch))
}

// replaced are the commands that have a Pod follow its workload's template, where that does not do so by itself: a StatefulSet waits for a Pod that does
// not become ready, and a ReplicaSet leaves those that it has alone.
func replaced(p *corev1.Pod, w Ref) []string {
	switch w.Kind {
	case "StatefulSet":
		if ready, _, _ := podReady(p); ready {
			return nil
		}
		return []string{kubectl(p.Namespace, "delete pod %s --ignore-not-found", p.Name)}
	case "ReplicaSet", "ReplicationController":
		return []string{kubectl(p.Namespace, "delete pod %s --ignore-not-found", p.Name)}
	}
	return nil
}

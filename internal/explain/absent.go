package explain

import (
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

var (
	// In the words of kubelets and of Portal's nodes.
	absentObject = regexp.MustCompile(`(?i)(configmap|secret) "?([a-z0-9.-]+)"? not found`)
	absentKey    = regexp.MustCompile(`(?i)couldn't find key ([-._a-zA-Z0-9]+) in (configmap|secret) (?:[a-z0-9-]+/)?([a-z0-9.-]+)`)
	lacksKey     = regexp.MustCompile(`(?i)(configmap|secret) ([a-z0-9.-]+) (?:has no key )?"([-._a-zA-Z0-9]+)"`)
)

// unstarted are commands for what a message says keeps a container from being started.
func (v *View) unstarted(p *corev1.Pod, container, message string) []string {
	if strings.Contains(message, "runAsNonRoot") || strings.Contains(message, "will run as root") {
		null := map[string]any{"runAsNonRoot": nil}
		return v.containersPatch(p, map[string]any{"securityContext": null, "containers": []map[string]any{{"name": container, "securityContext": null}}})
	}
	return absent(p, message)
}

// absent are commands that make what a message says a Pod waits for: an object with the keys that the Pod asks for, or a key of it. Its values are
// for people to fill in; the Pod starts with empty ones.
func absent(p *corev1.Pod, message string) []string {
	if m := absentKey.FindStringSubmatch(message); m != nil {
		return []string{addKey(p.Namespace, m[2], m[3], m[1])}
	}
	if m := lacksKey.FindStringSubmatch(message); m != nil {
		return []string{addKey(p.Namespace, m[1], m[2], m[3])}
	}
	m := absentObject.FindStringSubmatch(message)
	if m == nil {
		return nil
	}
	kind, name := strings.ToLower(m[1]), m[2]
	command := "create configmap " + name
	if kind == "secret" {
		command = "create secret generic " + name
	}
	for _, key := range usedKeys(p, kind, name) {
		command += " --from-literal=" + key + "="
	}
	return []string{kubectl(p.Namespace, "%s", command)}
}

func addKey(namespace, kind, name, key string) string {
	field := "data"
	if strings.EqualFold(kind, "secret") {
		field = "stringData"
	}
	return mergePatch(Ref{kind, namespace, name}, map[string]any{field: map[string]string{key: ""}})
}

// usedKeys are the keys of a ConfigMap or Secret that a Pod can't start without.
func usedKeys(p *corev1.Pod, kind, name string) (out []string) {
	add := func(key string, optional *bool) {
		if (optional == nil || !*optional) && !slices.Contains(out, key) {
			out = append(out, key)
		}
	}
	items := func(list []corev1.KeyToPath, optional *bool) {
		for _, i := range list {
			add(i.Key, optional)
		}
	}
	for _, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		for _, e := range c.Env {
			if e.ValueFrom == nil {
				continue
			}
			if r := e.ValueFrom.ConfigMapKeyRef; r != nil && kind == "configmap" && r.Name == name {
				add(r.Key, r.Optional)
			}
			if r := e.ValueFrom.SecretKeyRef; r != nil && kind == "secret" && r.Name == name {
				add(r.Key, r.Optional)
			}
		}
	}
	for i := range p.Spec.Volumes {
		if m := p.Spec.Volumes[i].ConfigMap; m != nil && kind == "configmap" && m.Name == name {
			items(m.Items, m.Optional)
		}
		if s := p.Spec.Volumes[i].Secret; s != nil && kind == "secret" && s.SecretName == name {
			items(s.Items, s.Optional)
		}
	}
	return out
}

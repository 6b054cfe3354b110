// Package spec turns what a Pod's specification says into what a process needs: environment, rights, limits, and the files that every
// container finds in /etc. It is pure: objects that a Pod refers to are asked from whoever has them, and nothing is written.
package spec

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"portal/internal/serviceenv"
)

// Objects are those that a Pod refers to, of its own namespace. A missing one is a MissingError.
type Objects interface {
	ConfigMap(name string) (*corev1.ConfigMap, error)
	Secret(name string) (*corev1.Secret, error)
}

// MissingError says that an object does not exist.
type MissingError struct{ Kind, Name string }

func (e *MissingError) Error() string { return fmt.Sprintf("%s %q not found", e.Kind, e.Name) }

// Facts are what a Pod can ask about itself that its specification does not say.
type Facts struct {
	PodIPs, HostIPs []netip.Addr
	Allocatable     corev1.ResourceList // the node's
	Services        []serviceenv.Var
	// Hostname is the Pod's.
	Hostname string
	// File reads a file in a volume. A missing one is a MissingError.
	File func(volume, path string) (string, error)
}

// Env is a container's environment: that of its image, of Services, and its own, where a later value replaces an earlier one. vars are those
// of them that a Pod's author knows, Services' and its own: $(NAME) can mean no others.
func Env(pod *corev1.Pod, c *corev1.Container, image []string, f Facts, objects Objects) (list []string, vars map[string]string, err error) {
	e := &environment{values: map[string]string{}}
	for _, v := range image {
		if name, value, ok := strings.Cut(v, "="); ok {
			e.set(name, value)
		}
	}
	if !e.has("PATH") {
		e.set("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	}
	e.set("HOSTNAME", f.Hostname)
	services, vars := map[string]string{}, map[string]string{}
	for _, v := range f.Services {
		services[v.Name], vars[v.Name] = v.Value, v.Value
		e.set(v.Name, v.Value)
	}
	own := map[string]string{}
	for _, from := range c.EnvFrom {
		if err := envFrom(from, objects, own); err != nil {
			return nil, nil, err
		}
	}
	for _, v := range c.Env {
		value, present, err := valueOf(pod, c, v, f, objects, own, services)
		if err != nil {
			return nil, nil, fmt.Errorf("env %s: %w", v.Name, err)
		}
		if present {
			own[v.Name] = value
		}
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		e.set(name, own[name])
	}
	maps.Copy(vars, own)
	return e.list(), vars, nil
}

type environment struct {
	names  []string
	values map[string]string
}

func (e *environment) has(name string) bool { _, ok := e.values[name]; return ok }

func (e *environment) set(name, value string) {
	if !e.has(name) {
		e.names = append(e.names, name)
	}
	e.values[name] = value
}

func (e *environment) list() (out []string) {
	for _, name := range e.names {
		out = append(out, name+"="+e.values[name])
	}
	return out
}

// envFrom adds all that a ConfigMap or Secret has.
func envFrom(from corev1.EnvFromSource, objects Objects, own map[string]string) error {
	switch {
	case from.ConfigMapRef != nil:
		m, err := objects.ConfigMap(from.ConfigMapRef.Name)
		if optional(err, from.ConfigMapRef.Optional) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("envFrom: %w", err)
		}
		for key, value := range m.Data {
			own[from.Prefix+key] = value
		}
	case from.SecretRef != nil:
		s, err := objects.Secret(from.SecretRef.Name)
		if optional(err, from.SecretRef.Optional) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("envFrom: %w", err)
		}
		for key, value := range s.Data {
			own[from.Prefix+key] = string(value)
		}
	}
	return nil
}

// optional says whether something is missing that may be.
func optional(err error, allowed *bool) bool {
	var missing *MissingError
	return errors.As(err, &missing) && allowed != nil && *allowed
}

// valueOf is a variable's value, and whether it is to be set at all.
func valueOf(pod *corev1.Pod, c *corev1.Container, v corev1.EnvVar, f Facts, objects Objects, own, services map[string]string) (string, bool, error) {
	from := v.ValueFrom
	switch {
	case v.Value != "" || from == nil:
		return Expand(v.Value, own, services), true, nil
	case from.FieldRef != nil:
		value, err := Field(pod, from.FieldRef.FieldPath, f)
		return value, true, err
	case from.ResourceFieldRef != nil:
		value, err := Resource(pod, c, from.ResourceFieldRef, f)
		return value, true, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		m, err := objects.ConfigMap(ref.Name)
		if err == nil {
			if value, ok := m.Data[ref.Key]; ok {
				return value, true, nil
			}
			err = &MissingError{"key of ConfigMap " + ref.Name, ref.Key}
		}
		if optional(err, ref.Optional) {
			return "", false, nil
		}
		return "", false, err
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		s, err := objects.Secret(ref.Name)
		if err == nil {
			if value, ok := s.Data[ref.Key]; ok {
				return string(value), true, nil
			}
			err = &MissingError{"key of Secret " + ref.Name, ref.Key}
		}
		if optional(err, ref.Optional) {
			return "", false, nil
		}
		return "", false, err
	case from.FileKeyRef != nil:
		return fromFile(from.FileKeyRef, f)
	}
	return "", false, errors.New("valueFrom: is of a kind that this node does not know")
}

// Expand replaces $(NAME) by a variable's value, in the first map that has it; $$ is a single $. What is not known stays as it is.
func Expand(text string, from ...map[string]string) string {
	out, _ := expand(text, from...)
	return out
}

// expand is Expand, and says which names are not known.
func expand(text string, from ...map[string]string) (expanded string, unknown []string) {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] != '$' || i+1 == len(text) {
			out.WriteByte(text[i])
			continue
		}
		switch text[i+1] {
		case '$':
			out.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(text[i:], ')')
			if end < 0 {
				out.WriteString(text[i:])
				return out.String(), unknown
			}
			name := text[i+2 : i+end]
			if k := slices.IndexFunc(from, func(m map[string]string) bool { _, ok := m[name]; return ok }); k >= 0 {
				out.WriteString(from[k][name])
			} else {
				unknown = append(unknown, name)
				out.WriteString(text[i : i+end+1])
			}
			i += end
		default:
			out.WriteByte('$')
		}
	}
	return out.String(), unknown
}

// Field is a field of the Pod, by its path.
func Field(pod *corev1.Pod, path string, f Facts) (string, error) {
	if base, key, ok := subscript(path); ok {
		switch base {
		case "metadata.labels":
			return pod.Labels[key], nil
		case "metadata.annotations":
			return pod.Annotations[key], nil
		}
		return "", fmt.Errorf("fieldRef %s: can't be asked for", path)
	}
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return quoted(pod.Labels), nil
	case "metadata.annotations":
		return quoted(pod.Annotations), nil
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return firstOf(f.HostIPs), nil
	case "status.hostIPs":
		return joined(f.HostIPs), nil
	case "status.podIP":
		return firstOf(f.PodIPs), nil
	case "status.podIPs":
		return joined(f.PodIPs), nil
	}
	return "", fmt.Errorf("fieldRef %s: can't be asked for", path)
}

func subscript(path string) (base, key string, ok bool) {
	if !strings.HasSuffix(path, "']") {
		return "", "", false
	}
	return strings.Cut(strings.TrimSuffix(path, "']"), "['")
}

// quoted writes labels line by line, as files of the downward API have them.
func quoted(m map[string]string) string {
	var lines []string
	for k, v := range m {
		lines = append(lines, k+"="+strconv.Quote(v))
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func firstOf(list []netip.Addr) string {
	if len(list) == 0 {
		return ""
	}
	return list[0].String()
}

func joined(list []netip.Addr) string {
	var out []string
	for _, a := range list {
		out = append(out, a.String())
	}
	return strings.Join(out, ",")
}

// Resource is a limit or request of a container, in units of the divisor, rounded up. A limit that is not set is what the node has.
func Resource(pod *corev1.Pod, c *corev1.Container, ref *corev1.ResourceFieldSelector, f Facts) (string, error) {
	if ref.ContainerName != "" && ref.ContainerName != c.Name {
		found := false
		for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range list {
				if list[i].Name == ref.ContainerName {
					c, found = &list[i], true
				}
			}
		}
		if !found {
			return "", fmt.Errorf("resourceFieldRef.containerName %q: there is no such container", ref.ContainerName)
		}
	}
	kind, name, _ := strings.Cut(ref.Resource, ".")
	var value resource.Quantity
	switch kind {
	case "limits":
		q, ok := c.Resources.Limits[corev1.ResourceName(name)]
		if !ok {
			q = f.Allocatable[corev1.ResourceName(name)]
		}
		value = q
	case "requests":
		value = c.Resources.Requests[corev1.ResourceName(name)]
	default:
		return "", fmt.Errorf("resourceFieldRef.resource %q: can't be asked for", ref.Resource)
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if name == "cpu" {
		return strconv.FormatInt(ceil(value.MilliValue(), divisor.MilliValue()), 10), nil
	}
	return strconv.FormatInt(ceil(value.Value(), divisor.Value()), 10), nil
}

func ceil(a, b int64) int64 { return (a + b - 1) / max(b, 1) }

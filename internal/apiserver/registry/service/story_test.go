package service

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// A story is told in YAML: a Service's spec, or what of it changes.

// service is what a client sends who writes this spec. "metadata" and "status" may stand beside the spec's fields.
func service(t testing.TB, spec string) *corev1.Service {
	t.Helper()
	fields := map[string]any{}
	if err := yaml.Unmarshal([]byte(spec), &fields); err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	whole := map[string]any{"metadata": map[string]any{}, "spec": fields}
	for _, part := range []string{"metadata", "status"} {
		if value, ok := fields[part]; ok {
			whole[part] = value
			delete(fields, part)
		}
	}
	if meta := whole["metadata"].(map[string]any); meta["name"] == nil && meta["generateName"] == nil {
		meta["name"] = "s"
	}
	svc, err := decode(must(json.Marshal(whole)))
	if err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	svc.Namespace = "ns"
	return svc
}

// created is a Service that nobody objects to.
func (c *cluster) created(t testing.TB, spec string) *corev1.Service {
	t.Helper()
	svc, errs := c.create(service(t, spec))
	if svc == nil {
		t.Fatalf("create %s: %v", spec, errs)
	}
	return svc
}

// merged is a stored Service with a merge patch.
func (c *cluster) merged(t testing.TB, name, change string) *corev1.Service {
	t.Helper()
	fields := map[string]any{}
	if err := yaml.Unmarshal([]byte(change), &fields); err != nil {
		t.Fatalf("%s: %v", change, err)
	}
	patch := map[string]any{"spec": fields}
	for _, part := range []string{"metadata", "status"} {
		if value, ok := fields[part]; ok {
			patch[part] = value
			delete(fields, part)
		}
	}
	svc, err := c.patch(name, "MP", must(json.Marshal(patch)))
	if err != nil {
		t.Fatalf("%s: %v", change, err)
	}
	return svc
}

// shows is the part of a spec that want speaks of, in want's words.
func shows(t testing.TB, svc *corev1.Service, want string) string {
	t.Helper()
	fields, asked := map[string]any{}, map[string]any{}
	if err := json.Unmarshal(must(json.Marshal(svc.Spec)), &fields); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(want), &asked); err != nil {
		t.Fatalf("%s: %v", want, err)
	}
	for key := range fields {
		if _, ok := asked[key]; !ok {
			delete(fields, key)
		}
	}
	for key := range asked {
		if _, ok := fields[key]; !ok {
			fields[key] = nil
		}
	}
	return string(must(json.Marshal(fields)))
}

// wantSpec compares what want speaks of; null is a field that isn't there.
func wantSpec(t testing.TB, svc *corev1.Service, want string) {
	t.Helper()
	if got, want := shows(t, svc, want), string(must(yaml.YAMLToJSON([]byte(want)))); got != want {
		t.Errorf("want %s\n got %s", want, got)
	}
}

// wantCauses compares causes, written "field Reason; field Reason", in any order.
func wantCauses(t testing.TB, got []string, want string) {
	t.Helper()
	wanted := []string{}
	for cause := range strings.SplitSeq(want, ";") {
		if cause = strings.TrimSpace(cause); cause != "" {
			wanted = append(wanted, cause)
		}
	}
	slices.Sort(wanted)
	if !slices.Equal(got, wanted) {
		t.Errorf("want causes %q\n          got %q", wanted, got)
	}
}

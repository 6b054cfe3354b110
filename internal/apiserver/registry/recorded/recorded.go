// Package recorded replays, through a resource's rules and without a server, requests that kube-apiserver was once
// asked, and compares the answers. The recordings are in test/recorded.
package recorded

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	"portal/internal/apiserver/registry/registrytest"
)

// file is where the recordings are, seen from the repository's root.
const file = "test/recorded/api/cases.json"

// recording is some requests in a namespace of its own and what they were answered.
type recording struct {
	Name  string
	Steps [][]json.RawMessage // verb, path, body
	Want  []answer
}

type answer struct {
	Code   int
	Causes [][2]string
	Object map[string]any
}

// Replay replays the recordings whose name begins with prefix. empty gives an object of the resource they are about.
func Replay(t *testing.T, prefix string, rules *registrytest.Rules, empty func() runtime.Object) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root(t), file))
	if err != nil {
		t.Fatal(err)
	}
	var all []recording
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	played := 0
	for _, r := range all {
		if strings.HasPrefix(r.Name, prefix) {
			played++
			t.Run(r.Name, func(t *testing.T) { r.play(t, rules, empty) })
		}
	}
	if played == 0 {
		t.Errorf("there is no recording %s…", prefix)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above this folder")
		}
		dir = filepath.Dir(dir)
	}
}

func (r recording) play(t *testing.T, rules *registrytest.Rules, empty func() runtime.Object) {
	var stored runtime.Object
	for i, step := range r.Steps {
		var verb string
		if err := json.Unmarshal(step[0], &verb); err != nil {
			t.Fatal(err)
		}
		obj, causes := empty(), []string(nil)
		switch verb {
		case "POST":
			decode(t, step[2], obj)
			causes = rules.Create(t, obj)
		case "PUT":
			var body struct {
				Replace json.RawMessage `json:"$replace"`
			}
			decode(t, step[2], &body)
			decode(t, body.Replace, obj)
			inNamespace(t, obj)
			causes = rules.Update(t, obj, stored.DeepCopyObject())
		case "MP":
			before, err := json.Marshal(stored)
			if err != nil {
				t.Fatal(err)
			}
			after, err := jsonpatch.MergePatch(before, step[2])
			if err != nil {
				t.Fatal(err)
			}
			decode(t, after, obj)
			causes = rules.Update(t, obj, stored.DeepCopyObject())
		default:
			t.Fatalf("step %d: %s is not replayed here", i, verb)
		}
		r.Want[i].check(t, i, causes, obj)
		if len(causes) == 0 {
			stored = obj
		}
	}
}

func decode(t *testing.T, data json.RawMessage, into any) {
	t.Helper()
	text := strings.ReplaceAll(string(data), "{ns}", namespace)
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatal(err)
	}
	if obj, ok := into.(runtime.Object); ok {
		inNamespace(t, obj)
	}
}

// namespace stands for the one that a recording had to itself.
const namespace = "recorded"

func inNamespace(t *testing.T, obj runtime.Object) {
	t.Helper()
	m, err := meta.Accessor(obj)
	if err != nil {
		t.Fatal(err)
	}
	m.SetNamespace(namespace)
}

func (want answer) check(t *testing.T, step int, causes []string, obj runtime.Object) {
	t.Helper()
	var refused []string
	for _, cause := range want.Causes {
		refused = append(refused, cause[0]+" "+cause[1])
	}
	slices.Sort(refused)
	if !slices.Equal(refused, causes) {
		t.Errorf("step %d: refused because of %q, want %q", step, causes, refused)
	}
	if len(causes) > 0 || len(refused) > 0 {
		return
	}
	data, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	is, should := plain(got), plain(want.Object)
	if is != should {
		t.Errorf("step %d: the object is\n%s\nwant\n%s", step, is, should)
	}
}

// plain is an object as text, without what differs from one run to the next.
func plain(obj map[string]any) string {
	delete(obj, "kind")
	delete(obj, "apiVersion")
	if m, ok := obj["metadata"].(map[string]any); ok {
		for _, name := range []string{"uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "namespace"} {
			delete(m, name)
		}
	}
	data, _ := json.MarshalIndent(obj, "", " ")
	return string(data)
}

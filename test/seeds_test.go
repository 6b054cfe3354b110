package test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/jsonpath"
	"sigs.k8s.io/yaml"

	"portal/test/harness"
)

// seedBlock is an example of an object in one of the documents that say what must work.
type seedBlock struct {
	id   string // file:line of its first line
	text string
}

// quotes are what a word processor made of the examples' quotation marks.
var quotes = strings.NewReplacer("“", `"`, "”", `"`, "″", `"`)

// fence is a Markdown code fence.
var fence = regexp.MustCompile("^\\s*```")

// seedBlocks are all examples of objects in a document: whatever stands in a code block and is YAML or JSON with an
// object's fields.
func seedBlocks(t *testing.T, path string) (out []seedBlock) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var block []string
	inside, first := false, 0
	for i, line := range strings.Split(string(data), "\n") {
		switch {
		case !fence.MatchString(line):
			block = append(block, line)
			continue
		case inside && strings.TrimSpace(line) == "```":
			if text := strings.Join(block, "\n"); isObject(text) {
				out = append(out, seedBlock{id: fmt.Sprintf("%s:%d", filepath.Base(path)[:3], first), text: text})
			}
		}
		// A document that was cut begins in the middle of a block; a fence that names a language always opens one.
		inside = !inside || strings.TrimSpace(line) != "```"
		first, block = i+2, nil
	}
	return out
}

// isObject reports whether a block has fields of an object. A malformed one counts, so that its failure is noticed.
func isObject(text string) bool {
	return regexp.MustCompile(`(?m)^\s*["“]?(kind|metadata|spec)["”]?\s*:`).MatchString(text)
}

// complete mends the quotation marks, and makes a fragment ("[...] metadata: ...") a Service that has what it shows.
func complete(t *testing.T, text string) (object map[string]any) {
	t.Helper()
	text = quotes.Replace(text)
	text = strings.ReplaceAll(text, "[...]", "")
	if err := yaml.Unmarshal([]byte(text), &object); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if object["kind"] != nil {
		return object
	}
	object["apiVersion"], object["kind"] = "v1", "Service"
	meta, _ := object["metadata"].(map[string]any)
	if meta == nil {
		meta = map[string]any{}
		object["metadata"] = meta
	}
	if meta["name"] == nil {
		meta["name"] = "my-service"
	}
	spec, _ := object["spec"].(map[string]any)
	if spec == nil {
		spec = map[string]any{}
		object["spec"] = spec
	}
	spec["type"] = "LoadBalancer"
	spec["ports"] = []any{map[string]any{"port": 80, "targetPort": 9376}}
	return object
}

// seedServer is a server that holds the addresses of the documents' examples: 10.0.171.239, 10.0.0.11.
func seedServer(t *testing.T) *harness.API {
	return startPortal(t, "--controllers", "none", "--service-cluster-ip-range", "10.0.0.0/16,fd00:96::/112")
}

// TestSeeds applies every example of the documents unchanged, and requires the result that the document promises.
func TestSeeds(t *testing.T) {
	t.Parallel()
	folder := shared(t, "seeds")
	files, err := filepath.Glob(filepath.Join(folder, "*.txt"))
	if err != nil || len(files) != 5 {
		t.Fatalf("%d documents, %v: want 5", len(files), err)
	}
	for variant, kubectl := range kubectls(t) {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			api := seedServer(t)
			if _, err := connect(t, api.Kubeconfig).CoreV1().Namespaces().Create(context.Background(),
				&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			unused := map[string]bool{}
			for id := range seedAnswers {
				unused[id] = true
			}
			for _, file := range files {
				for _, block := range seedBlocks(t, file) {
					delete(unused, block.id)
					t.Run(block.id, func(t *testing.T) { applySeed(t, api, kubectl, block) })
				}
			}
			for id := range unused {
				t.Errorf("the table has an answer for %s, where there is no example", id)
			}
		})
	}
}

// applySeed applies one example with kubectl, compares what is stored, and removes it.
func applySeed(t *testing.T, api *harness.API, kubectl []string, block seedBlock) {
	want, known := seedAnswers[block.id]
	if !known {
		t.Fatalf("an example that the table does not know:\n%s", block.text)
	}
	object := complete(t, block.text)
	text, err := yaml.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if isWhole(block.text) {
		text = []byte(quotes.Replace(block.text)) // as it stands
	}
	file := filepath.Join(t.TempDir(), "example.yaml")
	apply := func(text string) (string, error) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args := append(slices.Clone(kubectl[1:]), "apply", "-f", file)
		return harness.Run(context.Background(), []string{"KUBECONFIG=" + api.Kubeconfig}, kubectl[0], args...)
	}
	out, err := apply(string(text))
	if want.refused != "" {
		if err == nil || !strings.Contains(out, want.refused) {
			t.Fatalf("want it refused with %q, got: %v\n%s", want.refused, err, out)
		}
		_, err = apply(want.mend.Replace(string(text)))
	}
	if err != nil {
		t.Fatal(err)
	}
	found := takeAway(t, connect(t, api.Kubeconfig), object)
	for path, expected := range want.fields {
		value := at(t, found, path)
		if match, err := regexp.MatchString("^(?:"+expected+")$", value); err != nil || !match {
			t.Errorf("%s is %q, want %s", path, value, expected)
		}
	}
}

// takeAway reads an object and deletes it, so that the next example finds its name and addresses free.
func takeAway(t *testing.T, client *kubernetes.Clientset, like map[string]any) (found map[string]any) {
	t.Helper()
	meta := like["metadata"].(map[string]any)
	resource := strings.TrimSuffix(strings.ToLower(like["kind"].(string)), "s") + "s"
	space, _ := meta["namespace"].(string)
	if space == "" {
		space = metav1.NamespaceDefault
	}
	core := client.CoreV1().RESTClient()
	raw, err := core.Get().Namespace(space).Resource(resource).Name(meta["name"].(string)).SetHeader("Accept", "application/json").DoRaw(context.Background())
	if err == nil {
		err = json.Unmarshal(raw, &found)
	}
	if err == nil {
		err = core.Delete().Namespace(space).Resource(resource).Name(meta["name"].(string)).Do(context.Background()).Error()
	}
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// at is what kubectl would print for a JSONPath.
func at(t *testing.T, object map[string]any, path string) string {
	t.Helper()
	parser := jsonpath.New("").AllowMissingKeys(true)
	if err := parser.Parse("{" + path + "}"); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := parser.Execute(&out, object); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// isWhole says that an example is an object by itself.
func isWhole(text string) bool { return regexp.MustCompile(`(?m)^\s*["“]?kind`).MatchString(text) }

// kubectls are the kubectls to try: the machine's, and the one built in.
func kubectls(t *testing.T) map[string][]string {
	t.Helper()
	need(t, harness.Portal(), "build")
	out := map[string][]string{"portal-kubectl": {harness.Portal(), "kubectl"}}
	if path := machineKubectl(t); path != "" {
		out["kubectl"] = []string{path}
	}
	return out
}

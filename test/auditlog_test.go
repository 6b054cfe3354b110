package test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"portal/test/harness"
)

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: ["system:apiserver"]
- level: RequestResponse
  users: ["alice"]
  resources: [{group: "", resources: [configmaps]}]
- level: Request
  users: ["bob"]
- level: Metadata
  resources: [{group: ""}]
- level: None
`

// auditedServer runs a server with users alice, who may do everything, and bob, who may do nothing.
func auditedServer(t *testing.T, policy string, flags ...string) (*harness.API, string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"policy.yaml": policy, "tokens.csv": "alices,alice,1,system:masters\nbobs,bob,2,\n"} {
		replaceFile(t, filepath.Join(dir, name), text)
	}
	return startPortal(t, append([]string{"--audit-policy-file", filepath.Join(dir, "policy.yaml"), "--token-auth-file", filepath.Join(dir, "tokens.csv")}, flags...)...), dir
}

func readEvents(t *testing.T, file string) []auditv1.Event {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []auditv1.Event
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		var event auditv1.Event
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		out = append(out, event)
	}
	return out
}

// What the policy asks for is in the log, by user and resource, and nothing more.
func TestAuditLog(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "logs", "audit.log")
	api, _ := auditedServer(t, auditPolicy, "--audit-log-path", log)
	kubectl := func(token string, args ...string) {
		args = append([]string{"kubectl", "--server", api.URL, "--insecure-skip-tls-verify", "--token", token}, args...)
		_, _ = harness.Run(t.Context(), []string{"KUBECONFIG=/dev/null"}, harness.Portal(), args...)
	}
	kubectl("alices", "create", "configmap", "map", "--from-literal=where=in-the-garden")
	kubectl("alices", "create", "secret", "generic", "chest", "--from-literal=where=under-the-oak")
	kubectl("bobs", "create", "secret", "generic", "chest2", "--from-literal=where=under-the-elm")
	kubectl("alices", "get", "endpointslices")
	if code, _ := admin(t, api).ask(t, "GET", "/api/v1/namespaces/default/secrets/chest", ""); code != http.StatusOK {
		t.Error(code)
	}
	who := func(name, verb, resource string) *auditv1.Event {
		t.Helper()
		for _, event := range readEvents(t, log) {
			if event.User.Username == name && event.Verb == verb && event.ObjectRef != nil && event.ObjectRef.Resource == resource {
				return &event
			}
		}
		return nil
	}
	if e := who("alice", "create", "configmaps"); e == nil || e.Level != auditv1.LevelRequestResponse || e.RequestObject == nil ||
		e.ResponseObject == nil || !strings.Contains(string(e.ResponseObject.Raw), "in-the-garden") || e.ResponseStatus.Code != http.StatusCreated {
		t.Errorf("alice's ConfigMap: %+v", e)
	}
	if e := who("alice", "create", "secrets"); e == nil || e.Level != auditv1.LevelMetadata || e.RequestObject != nil || e.ResponseObject != nil ||
		e.ObjectRef.Name != "chest" || e.ObjectRef.Namespace != "default" {
		t.Errorf("alice's Secret: %+v", e)
	}
	if e := who("bob", "create", "secrets"); e == nil || e.Level != auditv1.LevelRequest || e.ResponseStatus.Code != http.StatusForbidden {
		t.Errorf("bob's attempt: %+v", e)
	}
	if e := who("portal-admin", "get", "secrets"); e == nil || e.Level != auditv1.LevelMetadata {
		t.Errorf("the administrator's look: %+v", e)
	}
	for _, event := range readEvents(t, log) {
		if event.User.Username == "system:apiserver" {
			t.Errorf("logged against the policy: %+v", event)
			break
		}
	}
	if e := who("alice", "list", "endpointslices"); e != nil {
		t.Errorf("logged against the policy: %+v", e)
	}
	data, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"under-the-oak", "dW5kZXItdGhlLW9haw", "alices", "bobs"} {
		if strings.Contains(string(data), text) {
			t.Errorf("the log holds %q", text)
		}
	}
	if info, err := os.Stat(log); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the log's mode: %v %v", info.Mode(), err)
	}
}

// The log is rotated at its size, as many old ones are kept as asked for, and none can be read by others.
func TestAuditLogRotation(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	log := filepath.Join(dir, "audit.log")
	api, _ := auditedServer(t, auditPolicy, "--audit-log-path", log, "--audit-log-maxsize", "1", "--audit-log-maxbackup", "2", "--audit-log-compress")
	alice := somebody(api, "alices")
	for i := range 12 {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"large-%d"},"data":{"x":%q}}`, i, strings.Repeat("x", 250_000))
		if code, answer := alice.ask(t, "POST", "/api/v1/namespaces/default/configmaps", body); code != http.StatusCreated {
			t.Fatal(code, answer)
		}
	}
	waitFor(t, "two compressed old logs are left", func() bool {
		old, err := filepath.Glob(filepath.Join(dir, "audit-*.log.gz"))
		plain, _ := filepath.Glob(filepath.Join(dir, "audit-*.log"))
		return err == nil && len(old) == 2 && len(plain) == 0
	})
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err != nil || info.Mode().Perm() != 0o600 || info.Size() > 1<<20 {
			t.Errorf("%s: %v, %d bytes, %v", entry.Name(), info.Mode(), info.Size(), err)
		}
	}
}

// The webhook gets events in batches, and those that it did not take again.
func TestAuditWebhook(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var sizes []int
	seen := map[string]bool{}
	refusals := 2
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if refusals > 0 {
			refusals--
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		var list auditv1.EventList
		if err := json.NewDecoder(r.Body).Decode(&list); err != nil {
			t.Error(err)
		}
		sizes = append(sizes, len(list.Items))
		for _, event := range list.Items {
			if event.ObjectRef != nil && event.Verb == "create" {
				seen[event.ObjectRef.Name] = true
			}
		}
	}))
	defer hook.Close()
	config := filepath.Join(t.TempDir(), "webhook.kubeconfig")
	replaceFile(t, config, `apiVersion: v1
kind: Config
clusters: [{name: hook, cluster: {server: "`+hook.URL+`"}}]
contexts: [{name: hook, context: {cluster: hook, user: ""}}]
current-context: hook
`)
	api, _ := auditedServer(t, auditPolicy, "--audit-webhook-config-file", config, "--audit-webhook-batch-max-wait", "1s",
		"--audit-webhook-batch-max-size", "10", "--audit-webhook-initial-backoff", "100ms")
	alice := somebody(api, "alices")
	for i := range 25 {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"}}`, i)
		if code, answer := alice.ask(t, "POST", "/api/v1/namespaces/default/configmaps", body); code != http.StatusCreated {
			t.Fatal(code, answer)
		}
	}
	waitFor(t, "all events arrive", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) >= 25
	})
	mu.Lock()
	defer mu.Unlock()
	largest := 0
	for _, n := range sizes {
		largest = max(largest, n)
	}
	if largest < 2 || largest > 10 {
		t.Errorf("batches of %v events, want up to 10", sizes)
	}
}

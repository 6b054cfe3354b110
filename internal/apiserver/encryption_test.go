package apiserver

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"portal/internal/store"
)

func write(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const encryptionHead = "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\n"

// An error in the configuration names flag, file, line and field, and contains no key.
func TestEncryptionConfigMistakes(t *testing.T) {
	key := base64.StdEncoding.EncodeToString([]byte("0123456789abcdef0123456789abcdef"))
	for name, c := range map[string]struct{ text, want string }{
		"no YAML":          {"a: b\nc: d: e", "line 2"},
		"empty":            {"", "is missing"},
		"another kind":     {"apiVersion: v1\nkind: ConfigMap\n", "ConfigMap"},
		"nothing":          {encryptionHead, "resources: is missing"},
		"unknown field":    {encryptionHead + "resources:\n- resources: [secrets]\n  provider: []\n", "line 5: resources[0].provider: there is no such field"},
		"short key":        {encryptionHead + "resources:\n- resources: [secrets]\n  providers:\n  - aesgcm:\n      keys:\n      - name: a\n        secret: " + key[:8] + "\n", "line 9: resources[0].providers[0].aesgcm.keys[0].secret: is wrong"},
		"two providers":    {encryptionHead + "resources:\n- resources: [secrets]\n  providers:\n  - identity: {}\n    secretbox: {keys: [{name: a, secret: " + key + "}]}\n", "line 6: resources[0].providers[0]: is wrong"},
		"masked":           {encryptionHead + "resources:\n- resources: ['*.*', secrets]\n  providers: [{identity: {}}]\n", "line 4: resources[0].resources"},
		"old service":      {encryptionHead + "resources:\n- resources: [secrets]\n  providers:\n  - kms: {name: a, endpoint: 'unix:///a'}\n", "line 6: resources[0].providers[0].kms.apiVersion: is wrong: must be v2"},
		"service over TCP": {encryptionHead + "resources:\n- resources: [secrets]\n  providers:\n  - kms: {apiVersion: v2, name: a, endpoint: 'http://a'}\n", "line 6: resources[0].providers[0].kms.endpoint: is wrong"},
	} {
		file := write(t, c.text)
		err := EncryptionOptions{ConfigFile: file}.validate()
		if err == nil || !strings.HasPrefix(err.Error(), "--encryption-provider-config "+file) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), key[:8]) {
			t.Errorf("%s: the key is in the error: %v", name, err)
		}
	}
	if err := (EncryptionOptions{Reload: true}).validate(); err == nil || !strings.Contains(err.Error(), "automatic-reload: needs") {
		t.Error(err)
	}
	if err := (EncryptionOptions{ConfigFile: "/does/not/exist"}).validate(); err == nil || !strings.Contains(err.Error(), "--encryption-provider-config: ") {
		t.Error(err)
	}
}

// Which key a resource has follows the entry that counts: its own, its group's, everything's.
func TestEncryptionConfigEntries(t *testing.T) {
	box := func(name string) string {
		return "[{secretbox: {keys: [{name: " + name + ", secret: " + base64.StdEncoding.EncodeToString(make([]byte, 32)) + "}]}}]"
	}
	file := write(t, encryptionHead+"resources:\n- {resources: [secrets], providers: "+box("a")+"}\n- {resources: ['*.networking.k8s.io'], providers: "+
		box("b")+"}\n- {resources: ['*.*'], providers: "+box("c")+"}\n")
	config, err := readEncryptionConfig(EncryptionOptions{ConfigFile: file})
	if err != nil {
		t.Fatal(err)
	}
	for resource, want := range map[string]string{"secrets": "a", "ipaddresses.networking.k8s.io": "b", "services": "c", "widgets.example.com": "c"} {
		for _, key := range []string{"a", "b", "c"} {
			if got := config.has(schema.ParseGroupResource(resource), store.Header{Provider: "secretbox", Key: key}); got != (key == want) {
				t.Errorf("%s has key %s: %v", resource, key, got)
			}
		}
	}
}

// A full etcd can be opened with the keys that it knows and with a new one, which is registered when there is room again.
func TestEncryptionOfAFullEtcd(t *testing.T) {
	ctx := t.Context()
	opts := store.DefaultOptions()
	opts.Dir, opts.QuotaBytes = t.TempDir(), 8<<20
	s, err := store.Open(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	box := func(name string) string {
		return "{name: " + name + ", secret: " + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte(name), 32)) + "}"
	}
	withKeys := func(keys ...string) *encryption {
		t.Helper()
		file := write(t, encryptionHead+"resources:\n- {resources: [secrets], providers: [{secretbox: {keys: ["+strings.Join(keys, ", ")+"]}}]}\n")
		e, err := openEncryption(ctx, s, EncryptionOptions{ConfigFile: file})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.close)
		return e
	}
	has := func(e *encryption, want store.Header) bool {
		t.Helper()
		keys, _, err := e.view(e.transformers).RegisteredKeys(ctx, e.config.entries, nil)
		if err != nil {
			t.Fatal(err)
		}
		return slices.Contains(keys, want)
	}
	withKeys(box("a"))
	for i := 0; err == nil && i < 1000; i++ {
		_, err = s.Client().Put(ctx, fmt.Sprint(store.Prefix, "/old/", i), string(make([]byte, 300_000)))
	}
	if !store.IsNoSpace(err) {
		t.Fatalf("etcd is not full: %v", err)
	}
	e := withKeys(box("a"))
	if err := e.look(ctx); err != nil {
		t.Errorf("nothing has to be registered, and yet: %v", err)
	}
	e = withKeys(box("b"), box("a"))
	added := store.Header{Provider: "secretbox", Key: "b"}
	if has(e, added) {
		t.Error("a full etcd has accepted the new key")
	}
	if _, err := s.Client().Delete(ctx, store.Prefix+"/old/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); s.Writable() != nil || e.look(ctx) != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("etcd has room again: %v, %v", s.Writable(), e.look(ctx))
		}
	}
	if !has(e, added) {
		t.Error("the new key is not registered although there is room")
	}
}

// An error in the audit flags names the flag; one in the policy, its line and field.
func TestAuditMistakes(t *testing.T) {
	const head = "apiVersion: audit.k8s.io/v1\nkind: Policy\n"
	for text, want := range map[string]string{
		head:                            "rules: at least one is needed",
		"kind: Policy\nrules: []\n":     "apiVersion",
		head + "rules:\n- level: All\n": "line 4: rules[0].level: is not supported",
		head + "rules:\n- level: None\n- lvel: None\n":                                               "line 5: rules[1].lvel: there is no such field",
		head + "rules:\n- level: None\n  omitStages: [Never]\n":                                      "line 5: rules[0].omitStages[0]: is wrong",
		head + "rules:\n- level: None\n  nonResourceURLs: [healthz]\n":                               "line 5: rules[0].nonResourceURLs[0]: is wrong",
		head + "rules:\n- level: None\n  resources:\n  - {group: 'a/v1'}\n":                          "line 6: rules[0].resources.group: is wrong",
		head + "rules:\n- level: 5\n":                                                                "line 4",
		head + "rules: None\n":                                                                       "line 3",
		"apiVersion: audit.k8s.io/v1beta1\nkind: Policy\nrules:\n- level: None\n":                    "audit.k8s.io/v1beta1",
		"apiVersion: audit.k8s.io/v1\nkind: Event\nlevel: None\nauditID: a\nstage: Panic\nverb: x\n": "Policy",
	} {
		options := DefaultAuditOptions()
		options.PolicyFile, options.LogOptions.Path = write(t, text), "-"
		if err := options.validate(); err == nil || !strings.HasPrefix(err.Error(), "--audit-policy-file ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	policy := write(t, head+"rules:\n- level: Metadata\n")
	for flag, change := range map[string]func(AuditOptions){
		"--audit-policy-file: needs":         func(o AuditOptions) { o.LogOptions.Path = "" },
		"--audit-log-path: needs":            func(o AuditOptions) { o.PolicyFile = "" },
		"--audit-webhook-config-file: needs": func(o AuditOptions) { o.PolicyFile, o.LogOptions.Path, o.WebhookOptions.ConfigFile = "", "", "x" },
		"--audit-log-mode":                   func(o AuditOptions) { o.LogOptions.BatchOptions.Mode = "often" },
		"--audit-log-format":                 func(o AuditOptions) { o.LogOptions.Format = "xml" },
		"--audit-log-maxsize":                func(o AuditOptions) { o.LogOptions.MaxSize = -1 },
		"--audit-log-version":                func(o AuditOptions) { o.LogOptions.GroupVersionString = "v2" },
		"--audit-webhook-config-file ":       func(o AuditOptions) { o.WebhookOptions.ConfigFile = "/does/not/exist" },
		"--audit-webhook-batch-max-size": func(o AuditOptions) {
			o.WebhookOptions.ConfigFile, o.WebhookOptions.BatchOptions.BatchConfig.MaxBatchSize = "x", 0
		},
		"--audit-webhook-batch-throttle-qps": func(o AuditOptions) {
			o.WebhookOptions.ConfigFile, o.WebhookOptions.BatchOptions.BatchConfig.ThrottleQPS = "x", 0
		},
		"--audit-log-truncate-max-event-size": func(o AuditOptions) { o.LogOptions.TruncateOptions.TruncateConfig.MaxEventSize = 0 },
		"--audit-policy-file: open":           func(o AuditOptions) { o.PolicyFile = "/does/not/exist" },
	} {
		options := DefaultAuditOptions()
		options.PolicyFile, options.LogOptions.Path = policy, "-"
		if err := options.validate(); err != nil {
			t.Fatal(err)
		}
		if change(options); options.validate() == nil || !strings.Contains(options.validate().Error(), flag) {
			t.Errorf("%v, want %q", options.validate(), flag)
		}
	}
	if err := DefaultAuditOptions().validate(); err != nil {
		t.Error(err)
	}
}

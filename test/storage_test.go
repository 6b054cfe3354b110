package test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// fillStorage creates large ConfigMaps in a namespace until the storage refuses them for good.
func fillStorage(t *testing.T, who *caller, namespace string) {
	t.Helper()
	began := time.Now().UnixNano()
	data := strings.Repeat("x", 500_000)
	for i := range 200 {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"large-%d-%d"},"data":{"x":%q}}`, began, i, data)
		code, answer := who.ask(t, "POST", "/api/v1/namespaces/"+namespace+"/configmaps", body)
		if code == http.StatusCreated {
			continue
		}
		if code != http.StatusInsufficientStorage {
			t.Fatalf("create %d: %d, want 507: %.300s", i, code, answer)
		}
		// It is full if it still is without its history, of which a restart drops more.
		if ready, _ := who.ask(t, "GET", "/readyz", ""); ready != http.StatusOK {
			if code, answer := who.ask(t, "POST", "/portal/v1/storage/defrag", ""); code != http.StatusOK {
				t.Fatalf("defrag: %d %s", code, answer)
			}
			if ready, _ := who.ask(t, "GET", "/readyz", ""); ready != http.StatusOK {
				return
			}
		}
		time.Sleep(200 * time.Millisecond) // history is being compacted
	}
	t.Fatal("the storage never became full")
}

func waitFor(t *testing.T, what string, try func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !try(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// A full storage: the server says so and why, serves reads and deletions, comes back after a restart, deletes a whole
// namespace, and accepts writes again, all by itself.
func TestFullStorage(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	dir := t.TempDir()
	quota := []string{"--etcd-quota-bytes", "16000000"}
	api, err := harness.StartPortal(dir, quota...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Kill() })
	who := admin(t, api)
	if code, answer := who.ask(t, "POST", "/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"big"}}`); code != http.StatusCreated {
		t.Fatal(code, answer)
	}
	if code, answer := who.ask(t, "POST", services, serviceBody("web", `{"type":"NodePort","ports":[{"port":80}]}`)); code != http.StatusCreated {
		t.Fatal(code, answer)
	}
	fillStorage(t, who, "big")
	said := func(who *caller) {
		t.Helper()
		code, answer := somebody(api, "").ask(t, "GET", "/readyz?verbose", "")
		if code != http.StatusInternalServerError || !strings.Contains(answer, "storage-writable failed: etcd is full") || !strings.Contains(answer, "--etcd-quota-bytes") {
			t.Errorf("/readyz?verbose: %d %s", code, answer)
		}
		if code, answer := who.ask(t, "GET", "/livez", ""); code != http.StatusOK {
			t.Errorf("/livez: %d %s", code, answer)
		}
		if _, answer := who.ask(t, "GET", "/metrics", ""); !strings.Contains(answer, "portal_storage_writes_refused 1") {
			t.Error("no metric says that writes are refused")
		}
		waitFor(t, "the log says that writes are refused, and why", func() bool {
			log, err := os.ReadFile(api.Log)
			if err != nil {
				t.Fatal(err)
			}
			_, line, found := strings.Cut(string(log), "storage refuses writes")
			line, _, _ = strings.Cut(line, "\n")
			return found && strings.Contains(line, "etcd is full") && strings.Contains(line, "--etcd-quota-bytes")
		})
	}
	said(who)
	// It starts again: without the one check it is ready.
	restart := func() {
		t.Helper()
		if err := api.Stop(20 * time.Second); err != nil {
			t.Fatal(err)
		}
		again, err := harness.Start(dir, "portal", harness.Portal(), append([]string{"server", "--data-dir", filepath.Join(dir, "data"), "--listen", strings.TrimPrefix(api.URL, "https://")}, quota...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(again.Kill)
		api.Process = again
		if err := harness.WaitURL(api.URL+"/readyz?exclude=storage-writable", 30*time.Second); err != nil {
			t.Fatal(err, again.Tail())
		}
		who = admin(t, api)
	}
	restart()
	// The history that a restart drops may have been all that it took to be full.
	for range 5 {
		if code, _ := who.ask(t, "GET", "/readyz", ""); code != http.StatusOK {
			break
		}
		fillStorage(t, who, "big")
		restart()
	}
	said(who)
	if code, answer := who.ask(t, "GET", services+"/web", ""); code != http.StatusOK {
		t.Errorf("a read: %d %s", code, answer)
	}
	if code, answer := who.ask(t, "DELETE", services+"/web", ""); code != http.StatusOK {
		t.Errorf("deleting a Service with claims: %d %s", code, answer)
	}
	if code, answer := who.ask(t, "DELETE", "/api/v1/namespaces/big", ""); code != http.StatusOK {
		t.Errorf("deleting a namespace: %d %s", code, answer)
	}
	waitFor(t, "the namespace is gone", func() bool {
		code, _ := who.ask(t, "GET", "/api/v1/namespaces/big", "")
		return code == http.StatusNotFound
	})
	waitFor(t, "the server is ready", func() bool {
		code, _ := who.ask(t, "GET", "/readyz", "")
		return code == http.StatusOK
	})
	if code, answer := who.ask(t, "POST", services, serviceBody("after", `{"ports":[{"port":80}]}`)); code != http.StatusCreated {
		t.Errorf("a write afterwards: %d %s", code, answer)
	}
}

// An external etcd at its quota is reported in the same way, and `portal storage defrag` mends it.
func TestFullExternalEtcd(t *testing.T) {
	t.Parallel()
	need(t, harness.Peer("etcd"), "peers")
	members, err := harness.StartEtcdWith(t.TempDir(), 1, "--quota-backend-bytes", "16000000")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(members[0].Kill)
	etcd := members[0].ClientURL
	api := startPortal(t, "--etcd-servers", etcd, "--controllers", "none")
	who := admin(t, api)
	data := strings.Repeat("x", 500_000)
	waitFor(t, "the storage is full", func() bool {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"large-"},"data":{"x":%q}}`, data)
		who.ask(t, "POST", "/api/v1/namespaces/default/configmaps", body)
		code, answer := who.ask(t, "GET", "/readyz", "")
		return code != http.StatusOK && strings.Contains(answer, "portal storage defrag")
	})
	if code, answer := who.ask(t, "DELETE", "/api/v1/namespaces/default/configmaps", ""); code != http.StatusOK {
		t.Fatal(code, answer)
	}
	if out, err := harness.Run(context.Background(), nil, harness.Portal(), "storage", "status", "--etcd-servers", etcd); err == nil || !strings.Contains(out, "NOSPACE") {
		t.Errorf("the status of a full etcd says nothing of it: %v\n%s", err, out)
	}
	snapshot := filepath.Join(t.TempDir(), "snapshot")
	if out, err := harness.Run(context.Background(), nil, harness.Portal(), "storage", "snapshot", snapshot, "--etcd-servers", etcd); err != nil {
		t.Errorf("a snapshot of a full etcd: %v\n%s", err, out)
	} else if info, err := os.Stat(snapshot); err != nil || info.Size() == 0 || info.Mode().Perm() != 0o600 {
		t.Errorf("the snapshot: %v %v", info, err)
	}
	out, err := harness.Run(context.Background(), nil, harness.Portal(), "storage", "defrag", "--etcd-servers", etcd)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out, "NOSPACE") {
		t.Errorf("the alarm is still there:\n%s", out)
	}
	waitFor(t, "the server is ready", func() bool {
		code, _ := who.ask(t, "GET", "/readyz", "")
		return code == http.StatusOK
	})
	if code, answer := who.ask(t, "POST", services, serviceBody("after", `{"ports":[{"port":80}]}`)); code != http.StatusCreated {
		t.Errorf("a write afterwards: %d %s", code, answer)
	}
}

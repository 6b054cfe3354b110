package test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"portal/internal/store"
	"portal/test/harness"
)

// encryptionConfig writes a configuration whose secretbox keys are in the given order; "identity" is that provider.
func encryptionConfig(t *testing.T, file, resource string, keys ...string) {
	t.Helper()
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: ['" + resource + "']\n  providers:\n"
	for _, key := range keys {
		if key == "identity" {
			text += "  - identity: {}\n"
			continue
		}
		name := strings.TrimSuffix(key, "!") // another key of that name
		secret := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte(key), 32)[:32])
		text += fmt.Sprintf("  - secretbox: {keys: [{name: %s, secret: %s}]}\n", name, secret)
	}
	replaceFile(t, file, text)
}

func replaceFile(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

func storageStatus(t *testing.T, args ...string) store.Status {
	t.Helper()
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"storage", "status", "-o", "json"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	var status store.Status
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		t.Fatal(err, out)
	}
	return status
}

// keysInUse are the names of the keys that anything of a resource is encrypted with.
func keysInUse(status store.Status, resource string) []string {
	var out []string
	for _, u := range status.Encryption.Usage {
		if resource == "" || u.Resource == resource {
			out = append(out, strings.TrimPrefix(u.Provider+"/"+u.Key+u.KeyID, "secretbox/"))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// filesWith are etcd's files that contain a text.
func filesWith(t *testing.T, dir, text string) []string {
	t.Helper()
	var out []string
	read := 0
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if read += len(data); bytes.Contains(data, []byte(text)) {
			out = append(out, path)
		}
		return err
	})
	if err != nil || read == 0 {
		t.Fatalf("%d bytes read in %s: %v", read, dir, err)
	}
	return out
}

func secret(name, value string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"treasure": value}}
}

func nodePort(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}},
	}}
}

// What Secrets and claims say is nowhere in etcd's files, neither in the database nor in the write-ahead log.
func TestEncryptionOnDisk(t *testing.T) {
	t.Parallel()
	for _, encrypted := range []bool{true, false} {
		t.Run(fmt.Sprintf("encrypted=%v", encrypted), func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "encryption.yaml")
			encryptionConfig(t, file, "*.*", "one")
			args := []string{"--encryption-provider-config", file}
			if !encrypted {
				args = nil // so that we know that looking finds something
			}
			api := startPortal(t, args...)
			client := connect(t, api.Kubeconfig)
			if _, err := client.CoreV1().Secrets("default").Create(t.Context(), secret("chest", "under the third oak"), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			service, err := client.CoreV1().Services("default").Create(t.Context(), nodePort("holder"), metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			look := func(when string) {
				for what, text := range map[string]string{
					"the Secret": "under the third oak", "the claim on a port": `"name":"holder"`, "the claim on an address": "ipallocator.k8s.io",
					"the Service, and its claim": string(service.UID),
				} {
					if found := filesWith(t, filepath.Join(filepath.Dir(api.Kubeconfig), "etcd"), text); (len(found) > 0) == encrypted {
						t.Errorf("%s, %s is in %v", when, what, found)
					}
				}
			}
			look("running")
			if out, err := harness.Run(t.Context(), nil, harness.Portal(), "audit", "--kubeconfig", api.Kubeconfig); err != nil || !strings.Contains(out, "all sound") {
				t.Errorf("portal audit: %v", err)
			}
			snapshot := filepath.Join(t.TempDir(), "snapshot")
			if _, err := harness.Run(t.Context(), nil, harness.Portal(), "storage", "snapshot", snapshot, "--kubeconfig", api.Kubeconfig); err != nil {
				t.Error(err)
			}
			if err := api.Stop(20 * time.Second); err != nil {
				t.Fatal(err)
			}
			look("stopped")
			if !encrypted {
				return
			}
			// A snapshot is as encrypted. Without the keys a restored one can't be judged, and is not repaired to pieces.
			if len(filesWith(t, filepath.Dir(snapshot), "under the third oak")) > 0 {
				t.Error("the snapshot holds the Secret")
			}
			restored := t.TempDir()
			restore := []string{"storage", "restore", snapshot, "--data-dir"}
			out, err := harness.Run(t.Context(), nil, harness.Portal(), append(restore, filepath.Join(restored, "a"))...)
			if err == nil || !strings.Contains(out, `could not be checked: --encryption-provider-config: `) || !strings.Contains(out, `secretbox key "one"`) {
				t.Errorf("restore without the keys: %v %s", err, out)
			}
			out, err = harness.Run(t.Context(), nil, harness.Portal(), append(restore, filepath.Join(restored, "b"), "--encryption-provider-config", file)...)
			if err != nil || !strings.Contains(out, "2 Services, 2 addresses and 1 port claimed") || !strings.Contains(out, "all sound") {
				t.Errorf("restore: %v %s", err, out)
			}
		})
	}
}

// secretsLoad creates and changes Secrets and Services until it is stopped, and knows what the server has acknowledged.
type secretsLoad struct {
	mu      sync.Mutex
	secrets map[string]string
	// unsure are the last changes, which were under way at the end: they may have happened or not.
	unsure  map[string]string
	created map[string]bool
	failed  []error
	writes  atomic.Int64
}

func (l *secretsLoad) run(ctx context.Context, t *testing.T, api *harness.API, worker int) {
	client := connect(t, api.Kubeconfig)
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("w%d-%d", worker, i)
		_, err := client.CoreV1().Secrets("default").Create(ctx, secret(name, "first"), metav1.CreateOptions{})
		l.took(ctx, err, func() { l.secrets[name] = "first" })
		if i%3 == 0 && i < 1000 { // there are 2,768 node ports
			_, err = client.CoreV1().Services("default").Create(ctx, nodePort(name), metav1.CreateOptions{})
			l.took(ctx, err, func() { l.created[name] = true })
		}
		old := fmt.Sprintf("w%d-%d", worker, i/2)
		value := fmt.Sprintf("changed %d", i)
		err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			current, err := client.CoreV1().Secrets("default").Get(ctx, old, metav1.GetOptions{})
			if err == nil {
				current.Data["treasure"] = []byte(value)
				_, err = client.CoreV1().Secrets("default").Update(ctx, current, metav1.UpdateOptions{})
			}
			return err
		})
		l.took(ctx, err, func() { l.secrets[old] = value })
		if err != nil {
			l.mu.Lock()
			l.unsure[old] = value
			l.mu.Unlock()
		}
	}
}

// took notes an acknowledged write.
func (l *secretsLoad) took(ctx context.Context, err error, note func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		note()
		l.writes.Add(1)
	case ctx.Err() == nil:
		l.failed = append(l.failed, err)
	}
}

// verify compares everything acknowledged with what the server has.
func (l *secretsLoad) verify(t *testing.T, api *harness.API) {
	t.Helper()
	client := connect(t, api.Kubeconfig)
	secrets, err := client.CoreV1().Secrets("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]string{}
	for _, s := range secrets.Items {
		have[s.Name] = string(s.Data["treasure"])
	}
	for name, value := range l.secrets {
		if have[name] != value && (l.unsure[name] == "" || have[name] != l.unsure[name]) {
			t.Errorf("Secret %s is %q, want %q", name, have[name], value)
		}
	}
	services, err := client.CoreV1().Services("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range services.Items {
		delete(l.created, s.Name)
	}
	if len(l.created) > 0 {
		t.Errorf("Services are missing: %v", l.created)
	}
	if out, err := harness.Run(t.Context(), nil, harness.Portal(), "audit", "--kubeconfig", api.Kubeconfig); err != nil || !strings.Contains(out, "all sound") {
		t.Errorf("portal audit: %v", err)
	}
}

// A new key takes the place of the old one while clients write, in the order of the documentation. Nothing is lost, and a file
// that drops the old key too early is not taken.
func TestEncryptionKeyRotationUnderLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "encryption.yaml")
	encryptionConfig(t, file, "*.*", "one")
	need(t, harness.Portal(), "build")
	flags := []string{"--encryption-provider-config", file, "--encryption-provider-config-automatic-reload"}
	api, err := harness.StartPortal(dir, flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Kill() })
	var l secretsLoad
	l.secrets, l.unsure, l.created = map[string]string{}, map[string]string{}, map[string]bool{}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var workers sync.WaitGroup
	for i := range 4 {
		workers.Go(func() { l.run(ctx, t, api, i) })
	}
	status := func() store.Status { return storageStatus(t, "--kubeconfig", api.Kubeconfig) }
	taken := func(n int) {
		t.Helper()
		waitFor(t, "the changed file is taken", func() bool {
			log, _ := os.ReadFile(api.Log)
			return strings.Count(string(log), "took the changed encryption configuration") == n
		})
	}
	encryptionConfig(t, file, "*.*", "one", "two")
	taken(1)
	encryptionConfig(t, file, "*.*", "two", "one")
	taken(2)
	waitFor(t, "Secrets are encrypted with two", func() bool { return slices.Equal(keysInUse(status(), "secrets"), []string{"one", "two"}) })

	encryptionConfig(t, file, "*.*", "two")
	waitFor(t, "the file that drops a key in use is refused", func() bool {
		problems := strings.Join(status().Encryption.Problems, "\n")
		return strings.Contains(problems, `secretbox key "one"`) && strings.Contains(problems, "was not taken")
	})
	encryptionConfig(t, file, "*.*", "two", "one")
	before := l.writes.Load()
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "storage", "reencrypt", "--kubeconfig", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d writes meanwhile; %s", l.writes.Load()-before, out[strings.LastIndex(strings.TrimSpace(out), "\n")+1:])
	if got := keysInUse(status(), ""); !slices.Equal(got, []string{"two"}) {
		t.Errorf("after reencrypt keys %v are in use: %+v", got, status().Encryption.Usage)
	}
	encryptionConfig(t, file, "*.*", "two")
	taken(3)
	before = l.writes.Load()
	waitFor(t, "clients go on writing", func() bool { return l.writes.Load() > before+20 })
	stop()
	workers.Wait()
	for _, err := range l.failed {
		t.Errorf("a write failed: %v", err)
	}
	l.verify(t, api)
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	if api, err = harness.StartPortal(dir, flags...); err != nil {
		t.Fatal(err)
	}
	l.verify(t, api)
	if api.Stop(20*time.Second) != nil || len(filesWith(t, filepath.Join(dir, "data", "etcd", "member", "snap"), "k8s:enc:secretbox:v1:one:")) > 0 {
		t.Error("the old key's ciphertext is still in the database")
	}
}

// endsWith starts a server that must end by itself, with one line.
func endsWith(t *testing.T, dir string, want []string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), harness.Portal(), append([]string{"server", "--data-dir", filepath.Join(dir, "data"), "--listen", "127.0.0.1:0"}, args...)...)
	var out bytes.Buffer
	cmd.Stderr, cmd.WaitDelay = &out, time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait()
	if !timer.Stop() || cmd.ProcessState.ExitCode() != 1 || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("%v: exit status %d: %s", args, cmd.ProcessState.ExitCode(), out.String())
	}
	for _, text := range want {
		if !strings.Contains(out.String(), text) {
			t.Errorf("%v: %q is not in: %s", args, text, out.String())
		}
	}
}

// A wrong key, a dropped one and no configuration at all are one line that names resource and key, and change nothing.
func TestEncryptionWrongKeys(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "encryption.yaml")
	need(t, harness.Portal(), "build")
	encryptionConfig(t, file, "secrets", "one", "identity")
	api, err := harness.StartPortal(dir, "--encryption-provider-config", file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Kill() })
	client := connect(t, api.Kubeconfig)
	for i := range 3 {
		if _, err := client.CoreV1().Secrets("default").Create(t.Context(), secret(fmt.Sprintf("s%d", i), "x"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	before := storageStatus(t, "--data-dir", data)
	pki, err := os.ReadDir(filepath.Join(data, "pki"))
	if err != nil {
		t.Fatal(err)
	}
	encryptionConfig(t, file, "secrets", "one!", "identity")
	endsWith(t, dir, []string{"3 of secrets", `secretbox key "one"`, "does not decrypt them", file, "/registry/secrets/default/s0"}, "--encryption-provider-config", file)
	encryptionConfig(t, file, "secrets", "two", "identity")
	endsWith(t, dir, []string{"3 of secrets", `secretbox key "one"`, "does not give them", file}, "--encryption-provider-config", file)
	encryptionConfig(t, file, "configmaps", "one", "identity")
	endsWith(t, dir, []string{"3 of secrets", `secretbox key "one"`, "does not give them", file}, "--encryption-provider-config", file)
	endsWith(t, dir, []string{"3 of secrets", `secretbox key "one"`, "--encryption-provider-config"})
	encryptionConfig(t, file, "*.", "one")
	endsWith(t, dir, []string{"not encrypted", "identity: {}", file}, "--encryption-provider-config", file)
	if after := storageStatus(t, "--data-dir", data); after.Revision != before.Revision || after.Keys != before.Keys {
		t.Errorf("%d keys at revision %d, and %d at %d before", after.Keys, after.Revision, before.Keys, before.Revision)
	}
	if now, err := os.ReadDir(filepath.Join(data, "pki")); err != nil || len(now) != len(pki) {
		t.Errorf("files were written: %v %v", now, err)
	}
	encryptionConfig(t, file, "secrets", "one", "identity")
	if api, err = harness.StartPortal(dir, "--encryption-provider-config", file); err != nil {
		t.Fatal(err)
	}
	if list, err := connect(t, api.Kubeconfig).CoreV1().Secrets("default").List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) != 3 {
		t.Errorf("with the right key: %v %v", list, err)
	}
}

// damage flips a bit of what is stored at a key.
func damage(t *testing.T, dir, key string) {
	t.Helper()
	opts := store.DefaultOptions()
	opts.Dir = dir
	s, err := store.Attach(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	resp, err := s.Client().Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatal(err, resp)
	}
	value := resp.Kvs[0].Value
	value[len(value)-1] ^= 1
	if _, err := s.Client().Put(t.Context(), key, string(value)); err != nil {
		t.Fatal(err)
	}
}

// One damaged object: the server starts, errors name the object, everything else works, and an administrator can delete it.
func TestEncryptionDamagedObject(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "encryption.yaml")
	need(t, harness.Portal(), "build")
	encryptionConfig(t, file, "*.*", "one")
	api, err := harness.StartPortal(dir, "--encryption-provider-config", file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Kill() })
	client := connect(t, api.Kubeconfig)
	for _, name := range []string{"good", "bad"} {
		if _, err := client.CoreV1().Secrets("default").Create(t.Context(), secret(name, "x"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	damage(t, filepath.Join(dir, "data", "etcd"), "/registry/secrets/default/bad")
	again, err := harness.Start(dir, "portal", harness.Portal(), "server", "--data-dir", filepath.Join(dir, "data"), "--listen",
		strings.TrimPrefix(api.URL, "https://"), "--encryption-provider-config", file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Kill)
	api.Process = again
	if err := harness.WaitURL(api.URL+"/livez", 30*time.Second); err != nil {
		t.Fatal(err, again.Tail())
	}
	who := admin(t, api)
	const secrets = "/api/v1/namespaces/default/secrets"
	for _, path := range []string{secrets, secrets + "/bad"} {
		waitFor(t, path+" fails with the key of what is damaged", func() bool {
			code, answer := who.ask(t, "GET", path, "")
			return code == http.StatusInternalServerError && strings.Contains(answer, "secrets/default/bad")
		})
	}
	if code, answer := who.ask(t, "GET", secrets+"/good", ""); code != http.StatusOK {
		t.Errorf("another Secret: %d %s", code, answer)
	}
	if code, answer := who.ask(t, "POST", services, serviceBody("web", `{"ports":[{"port":80}]}`)); code != http.StatusCreated {
		t.Errorf("another resource: %d %s", code, answer)
	}
	found := storageStatus(t, "--kubeconfig", api.Kubeconfig).Encryption.Usage
	i := slices.IndexFunc(found, func(u store.Usage) bool { return u.Unreadable == 1 && u.Example == "/registry/secrets/default/bad" })
	if i < 0 {
		t.Errorf("portal storage status does not show it: %+v", found)
	}
	if code, answer := who.ask(t, "DELETE", secrets+"/bad", ""); code < 400 {
		t.Errorf("deleted in the ordinary way: %d %s", code, answer)
	}
	const anyway = `{"apiVersion":"v1","kind":"DeleteOptions","ignoreStoreReadErrorWithClusterBreakingPotential":true}`
	if code, answer := who.ask(t, "DELETE", secrets+"/good", anyway); code < 400 {
		t.Errorf("an intact Secret was deleted as a damaged one: %d %s", code, answer)
	}
	if code, answer := who.ask(t, "DELETE", secrets+"/bad", anyway); code != http.StatusOK {
		t.Errorf("delete: %d %s", code, answer)
	}
	waitFor(t, "Secrets can be listed again", func() bool {
		code, answer := who.ask(t, "GET", secrets, "")
		return code == http.StatusOK && strings.Contains(answer, "good")
	})
	if err := api.WaitReady(30 * time.Second); err != nil {
		t.Error(err)
	}
}

// Servers of one etcd with different keys notice it: one that can't read what is there refuses to start, and one that can't
// read what another begins to write says so.
func TestEncryptionOfSeveralServers(t *testing.T) {
	t.Parallel()
	etcd := startEtcd(t, 1)[0]
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one.yaml"), filepath.Join(dir, "two.yaml")
	encryptionConfig(t, one, "secrets", "one", "identity")
	encryptionConfig(t, two, "secrets", "two", "identity")
	first := startPortal(t, "--etcd-servers", etcd.ClientURL, "--encryption-provider-config", one)
	client := connect(t, first.Kubeconfig)
	if _, err := client.CoreV1().Secrets("default").Create(t.Context(), secret("a", "x"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	second := t.TempDir()
	copyAuthority(t, filepath.Dir(first.Kubeconfig), filepath.Join(second, "data"))
	endsWith(t, second, []string{"1 of secrets", `secretbox key "one"`, two}, "--etcd-servers", etcd.ClientURL, "--encryption-provider-config", two)
	endsWith(t, second, []string{"1 of secrets", `secretbox key "one"`}, "--etcd-servers", etcd.ClientURL)
	encryptionConfig(t, two, "secrets", "two", "one", "identity")
	other, err := harness.StartPortal(second, "--etcd-servers", etcd.ClientURL, "--encryption-provider-config", two)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Kill)
	if _, err := connect(t, other.Kubeconfig).CoreV1().Secrets("default").Create(t.Context(), secret("b", "x"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first server notices", func() bool {
		_, metrics := admin(t, first).ask(t, "GET", "/metrics", "")
		return strings.Contains(metrics, "portal_encryption_keys_missing 1")
	})
	if problems := storageStatus(t, "--kubeconfig", first.Kubeconfig).Encryption.Problems; !strings.Contains(strings.Join(problems, "\n"), `secretbox key "two"`) {
		t.Errorf("the first server's problems: %q", problems)
	}
	waitFor(t, "it is not ready", func() bool {
		code, _ := admin(t, first).ask(t, "GET", "/readyz/encryption-keys", "")
		return code == http.StatusInternalServerError
	})
}

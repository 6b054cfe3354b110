package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/service"
	"portal/internal/audit"
	"portal/internal/store"
	"portal/test/harness"
)

// portalSays runs a command of the binary, which must end with a status.
func portalSays(t *testing.T, status int, args ...string) string {
	t.Helper()
	need(t, harness.Portal(), "build")
	out, err := harness.Run(t.Context(), nil, harness.Portal(), args...)
	if exitStatus(err) != status {
		t.Fatalf("portal %s: exit status %d, want %d:\n%s", strings.Join(args, " "), exitStatus(err), status, out)
	}
	return out
}

// portalJSON is portalSays for what it prints for programs.
func portalJSON(t *testing.T, status int, into any, args ...string) {
	t.Helper()
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), harness.Portal(), args...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if exitStatus(err) != status {
		t.Fatalf("portal %s: exit status %d, want %d:\n%s", strings.Join(args, " "), exitStatus(err), status, said.String())
	}
	if err := json.Unmarshal(out, into); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
}

// TestRestoreExternalEtcd: an etcd cluster of its own is looked after by `portal storage`, and made anew on each member's machine from a
// snapshot, with what the snapshot has and no more, at a revision that nobody has seen.
func TestRestoreExternalEtcd(t *testing.T) {
	t.Parallel()
	members := startEtcd(t, 3)
	var urls []string
	for _, m := range members {
		urls = append(urls, m.ClientURL)
	}
	servers := strings.Join(urls, ",")
	dir, port := t.TempDir(), harness.FreePort()
	start := func() *harness.API {
		t.Helper()
		need(t, harness.Portal(), "build")
		api, err := harness.StartPortalAt(dir, port, "--etcd-servers", servers, "--controllers", "none")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.Kill)
		return api
	}
	status := func(command string) (out store.Status) {
		t.Helper()
		portalJSON(t, 0, &out, "storage", command, "--etcd-servers", servers, "-o", "json")
		leaders := 0
		for _, m := range out.Members {
			if m.Leader {
				leaders++
			}
			if m.Error != "" || m.Version == "" || m.SizeBytes == 0 {
				t.Errorf("storage %s: %+v", command, m)
			}
		}
		if out.Mode != "external" || len(out.Members) != 3 || leaders != 1 || out.Keys == 0 {
			t.Errorf("storage %s: %+v", command, out)
		}
		return out
	}
	api := start()
	client := connect(t, api.Kubeconfig)
	create := func(name string) *corev1.Service {
		t.Helper()
		s, err := client.CoreV1().Services("default").Create(t.Context(), nodePort(name), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	kept := create("kept")
	before := status("status")
	if after := status("defrag"); after.Keys < before.Keys { // more there may be: the server writes, too
		t.Errorf("storage defrag: %d keys of %d are left", after.Keys, before.Keys)
	}
	file := filepath.Join(t.TempDir(), "snapshot")
	if out := portalSays(t, 0, "storage", "snapshot", file, "--etcd-servers", servers); !strings.Contains(out, "; checked") {
		t.Errorf("storage snapshot: %s", out)
	}
	create("later")
	latest := status("status").Revision

	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	for _, m := range members {
		_ = m.Stop(20 * time.Second) // an etcd ends by the signal, and not with 0
		if err := os.Rename(m.DataDir, m.DataDir+".old"); err != nil {
			t.Fatal(err)
		}
	}
	// What would make a storage that no member can use is refused, and nothing is made.
	for _, args := range [][]string{
		{"--etcd-servers", servers},
		{"--etcd-data-dir", members[0].DataDir},
		{"--etcd-name", members[0].Member, "--etcd-initial-cluster", members[0].Cluster},
		{"--etcd-data-dir", members[0].DataDir, "--etcd-name", members[0].Member, "--etcd-initial-cluster", members[0].Cluster},
	} {
		if out := portalSays(t, 2, append([]string{"storage", "restore", file}, args...)...); strings.Count(out, "\n") != 1 || !strings.Contains(out, "--etcd-data-dir") {
			t.Errorf("restore %v: %s", args, out)
		}
	}
	restore := func(m *harness.Etcd, status int, name string) string {
		t.Helper()
		return portalSays(t, status, "storage", "restore", file, "--etcd-data-dir", m.DataDir, "--etcd-name", name, "--etcd-initial-cluster", m.Cluster, "--etcd-peer-urls", m.PeerURL)
	}
	if out := restore(members[0], 1, "other"); strings.Count(out, "\n") != 1 {
		t.Errorf("a member that is not in the cluster: %s", out)
	}
	for _, m := range members {
		if out := restore(m, 0, m.Member); !strings.Contains(out, "restored") || !strings.Contains(out, "portal audit") {
			t.Errorf("restore: %s", out)
		}
		if err := m.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Kill)
	}
	for _, m := range members {
		if err := m.WaitHealthy(time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if now := status("status"); now.Revision < before.Revision+1_000_000_000 || now.Revision <= latest {
		t.Errorf("the revision is %d, it was %d", now.Revision, latest)
	}
	api = start()
	client = connect(t, api.Kubeconfig)
	got, err := client.CoreV1().Services("default").Get(t.Context(), kept.Name, metav1.GetOptions{})
	if err != nil || got.UID != kept.UID || got.Spec.ClusterIP != kept.Spec.ClusterIP || got.Spec.Ports[0].NodePort != kept.Spec.Ports[0].NodePort {
		t.Errorf("%+v %v, want %+v", got, err, kept)
	}
	if _, err := client.CoreV1().Services("default").Get(t.Context(), "later", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a Service that is not in the snapshot: %v", err)
	}
	create("later")
	if out := portalSays(t, 0, "audit", "--kubeconfig", api.Kubeconfig); !strings.Contains(out, "all sound") {
		t.Error(out)
	}
}

// TestRestoreBrokenClaims: of claims in a snapshot that fit no Service, those that can be repaired are, and the report says which; what is
// left is the administrator's, and the exit status says so. Either way the storage is restored.
func TestRestoreBrokenClaims(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	client := connect(t, api.Kubeconfig)
	made := map[string]*corev1.Service{}
	for _, name := range []string{"whole", "bereft", "gone"} {
		s, err := client.CoreV1().Services("default").Create(t.Context(), nodePort(name), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		made[name] = s
	}
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	data, dir := filepath.Dir(api.Kubeconfig), t.TempDir()
	// edit changes what is stored as nobody should, and takes a snapshot of it.
	edit := func(name string, change func(*clientv3.Client)) (file string) {
		t.Helper()
		options := store.DefaultOptions()
		options.Dir = filepath.Join(data, "etcd")
		opened, err := store.Open(t.Context(), options)
		if err != nil {
			t.Fatal(err)
		}
		change(opened.Client())
		opened.Close()
		file = filepath.Join(dir, name)
		portalSays(t, 0, "storage", "snapshot", file, "--data-dir", data)
		return file
	}
	repairable := edit("repairable", func(etcd *clientv3.Client) {
		for _, key := range []string{service.AddressPrefix + made["bereft"].Spec.ClusterIP, "/services/specs/default/gone"} {
			if r, err := etcd.Delete(t.Context(), store.Prefix+key); err != nil || r.Deleted != 1 {
				t.Errorf("%s: %v %v", key, r, err)
			}
		}
	})
	lost := store.Prefix + service.AddressPrefix + "10.96.255.77"
	hopeless := edit("hopeless", func(etcd *clientv3.Client) {
		if _, err := etcd.Put(t.Context(), lost, "nothing that can be read"); err != nil {
			t.Error(err)
		}
	})

	out := portalSays(t, 0, "storage", "restore", repairable, "--data-dir", filepath.Join(dir, "data"))
	for _, line := range []string{
		fmt.Sprintf("Service default/bereft has %s without a claim to it: another Service could be given the same: repaired", made["bereft"].Spec.ClusterIP),
		fmt.Sprintf("%s is claimed for Service default/gone, which does not exist: repaired", made["gone"].Spec.ClusterIP),
		fmt.Sprintf("port %d is claimed for Service default/gone with UID %s, which does not exist: repaired", made["gone"].Spec.Ports[0].NodePort, made["gone"].UID),
	} {
		if !strings.Contains(out, "\n"+line+"\n") {
			t.Errorf("no line says %q:\n%s", line, out)
		}
	}
	if !strings.Contains(out, ": restored ") || !strings.HasSuffix(out, ": all sound\n") {
		t.Errorf("the report:\n%s", out)
	}
	if err := os.CopyFS(filepath.Join(dir, "data", "pki"), os.DirFS(filepath.Join(data, "pki"))); err != nil {
		t.Fatal(err)
	}
	again, err := harness.StartPortal(dir, "--controllers", "none")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Kill)
	kept, err := connect(t, again.Kubeconfig).CoreV1().Services("default").Get(t.Context(), "bereft", metav1.GetOptions{})
	if err != nil || kept.Spec.ClusterIP != made["bereft"].Spec.ClusterIP {
		t.Errorf("the repaired Service: %+v %v", kept, err)
	}
	checkAddresses(t, connect(t, again.Kubeconfig))

	out = portalSays(t, 1, "storage", "restore", hopeless, "--data-dir", filepath.Join(dir, "hopeless-data"))
	if !strings.Contains(out, ": restored ") || !strings.Contains(out, "\nIPAddressUnreadable ") || !strings.Contains(out, "delete "+lost) ||
		!strings.HasSuffix(out, "portal: 1 problem is left for the administrator to repair\n") {
		t.Errorf("the report:\n%s", out)
	}
	var report struct{ Audit *audit.Report }
	portalJSON(t, 1, &report, "storage", "restore", hopeless, "--data-dir", filepath.Join(dir, "json-data"), "-o", "json")
	if a := report.Audit; a == nil || len(a.Repairs) != 3 || len(a.Findings) != 1 || a.Findings[0].Problem != audit.IPAddressUnreadable {
		t.Errorf("as JSON: %+v", a)
	}
}

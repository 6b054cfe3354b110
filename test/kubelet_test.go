//go:build peers

package test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"portal/test/harness"
)

// kubeletConfig lets a kubelet run beside whatever else is on the machine: it makes no cgroups, no rules, and asks for nothing that
// its container runtime, which has none, would have to do. The static Pod can't run, but its mirror can be created.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
healthzBindAddress: 127.0.0.1
containerRuntimeEndpoint: unix://%[1]s/runtime.sock
staticPodPath: %[1]s/static
podLogsDir: %[1]s/logs
volumePluginDir: %[1]s/plugins
rotateCertificates: true
serverTLSBootstrap: true
cgroupsPerQOS: false
enforceNodeAllocatable: []
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
resolvConf: ""
evictionHard: {imagefs.available: "0%%", nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.inodesFree: "0%%", memory.available: "0%%"}
nodeStatusUpdateFrequency: 1s
`

const staticPod = `apiVersion: v1
kind: Pod
metadata: {name: static, namespace: default}
spec:
  hostNetwork: true
  containers: [{name: c, image: example.com/none}]
`

// kernelSettings are what a kubelet sets where they differ. They are the machine's, so the kubelet of the test is shown these instead.
var kernelSettings = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// TestPeersKubelet has a real kubelet join with a bootstrap token: it gets its certificates, registers its Node, renews its Lease
// and creates a mirror Pod, and is never refused anything.
func TestPeersKubelet(t *testing.T) {
	rootNeeded(t)
	if !inNamespace(t) {
		return
	}
	network(t)
	dir := t.TempDir()
	ownSettings(t, dir)
	portal, client := nodeCluster(t)
	for _, sub := range []string{"static", "logs", "plugins", "root", "pki"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = syscall.Unmount(filepath.Join(dir, "root"), syscall.MNT_DETACH) }) // the kubelet mounts it on itself
	write(t, filepath.Join(dir, "kubelet.yaml"), fmt.Sprintf(kubeletConfig, dir))
	write(t, filepath.Join(dir, "static", "static.yaml"), staticPod)
	tokenConfig(t, portal, bootstrapToken, filepath.Join(dir, "bootstrap.kubeconfig"))
	startPeer(t, dir, "runtime", filepath.Join(dir, "runtime.sock"))
	const name = "kubelet-1"
	kubelet := startPeer(t, dir, "kubelet", "--config", filepath.Join(dir, "kubelet.yaml"), "--root-dir", filepath.Join(dir, "root"),
		"--cert-dir", filepath.Join(dir, "pki"), "--bootstrap-kubeconfig", filepath.Join(dir, "bootstrap.kubeconfig"),
		"--kubeconfig", filepath.Join(dir, "kubelet.kubeconfig"), "--hostname-override", name, "--node-ip", nodeAddress, "-v", "2")

	until := func(what string, done func() error) {
		t.Helper()
		var err error
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			if err = done(); err == nil {
				return
			}
			select {
			case <-kubelet.Done():
				t.Fatalf("%s: the kubelet ended: %s", what, kubelet.Tail())
			default:
			}
		}
		t.Errorf("%s: %v\n%s", what, err, kubelet.Tail())
	}
	until("its client certificate", func() error { return hasCertificate(t, client, nodeClient, "bootstrapper") })
	until("its Node", func() error {
		_, err := client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		return err
	})
	var first metav1.MicroTime
	until("its Lease, renewed", func() error {
		lease, err := client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), name, metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case lease.Spec.RenewTime == nil:
			return fmt.Errorf("never renewed")
		case first.IsZero():
			first = *lease.Spec.RenewTime
		}
		if !lease.Spec.RenewTime.After(first.Time) {
			return fmt.Errorf("renewed at %s only", first)
		}
		return nil
	})
	until("its reports", func() error {
		node, err := client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		if err == nil && (len(node.Status.Conditions) == 0 || node.Status.NodeInfo.KubeletVersion == "") {
			err = fmt.Errorf("status is %v", node.Status)
		}
		return err
	})
	until("the mirror of its static Pod", func() error {
		_, err := client.CoreV1().Pods("default").Get(t.Context(), "static-"+name, metav1.GetOptions{})
		return err
	})
	until("its serving certificate, once approved", func() error {
		list, err := client.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, r := range list.Items {
			if r.Spec.SignerName != certificatesv1.KubeletServingSignerName || len(r.Status.Conditions) > 0 {
				continue
			}
			r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: "True"}}
			if _, err := client.CertificatesV1().CertificateSigningRequests().UpdateApproval(t.Context(), r.Name, &r, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		return hasCertificate(t, client, certificatesv1.KubeletServingSignerName, "system:node:"+name)
	})
	kubelet.Kill()
	log, err := os.ReadFile(kubelet.Log)
	if err != nil {
		t.Fatal(err)
	}
	refused := regexp.MustCompile(`(?i)forbidden|err="?unauthorized`)
	for line := range strings.Lines(string(log)) {
		if refused.MatchString(line) {
			t.Error(strings.TrimSpace(line))
		}
	}
}

// hasCertificate says whether a requestor has a certificate of a signer.
func hasCertificate(t *testing.T, client kubernetes.Interface, signer, requestor string) error {
	t.Helper()
	list, err := client.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, r := range list.Items {
		if r.Spec.SignerName == signer && r.Spec.Username == requestor && len(r.Status.Certificate) > 0 {
			return nil
		}
	}
	return fmt.Errorf("none of %d requests is %s's and signed by %s", len(list.Items), requestor, signer)
}

// ownSettings covers the machine's settings in this mount namespace.
func ownSettings(t *testing.T, dir string) {
	t.Helper()
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	for name, value := range kernelSettings {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		write(t, file, value+"\n")
		if err := syscall.Mount(file, "/proc/sys/"+name, "", syscall.MS_BIND, ""); err != nil {
			t.Fatalf("/proc/sys/%s: %v", name, err)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// tokenConfig writes how somebody with a token reaches the server.
func tokenConfig(t *testing.T, portal *harness.API, token, path string) {
	t.Helper()
	config, err := clientcmd.LoadFromFile(portal.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for name := range config.AuthInfos {
		config.AuthInfos[name] = &api.AuthInfo{Token: token}
	}
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
}

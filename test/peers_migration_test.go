//go:build peers

package test

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/test/harness"
)

// TestPeersMigration does what docs/proxy.md says of the way from kube-proxy to Portal and back, word for word, in each mode of kube-proxy, as a
// service of the machine and in Pods as kubeadm makes them. Services answer all the time, and after each step all is as promised.
func TestPeersMigration(t *testing.T) {
	rootNeeded(t)
	need(t, harness.Peer("kube-proxy"), "peers")
	blocks := documented(t, "docs/proxy.md", "Migrating from kube-proxy")
	kubeadm := slices.IndexFunc(blocks, func(b string) bool { return strings.HasPrefix(b, "kubectl ") })
	if kubeadm < 0 {
		t.Fatal("docs/proxy.md says nothing of kubeadm")
	}
	for _, m := range []struct {
		name, mode, portal string
		blocks             []string
	}{
		{"iptables-service", "iptables", "iptables", blocks[:kubeadm]},
		{"nftables-service", "nftables", "nftables", blocks[:kubeadm]},
		{"default-kubeadm", "", "nftables", blocks[kubeadm:]},
		{"nftables-kubeadm", "nftables", "nftables", blocks[kubeadm:]},
	} {
		t.Run(m.name, func(t *testing.T) {
			if os.Getenv(insideNamespace) == "" {
				t.Parallel()
			}
			if inNamespace(t) {
				newMigration(t, m.mode, m.portal, strings.HasSuffix(m.name, "kubeadm")).follow(t, m.blocks)
			}
		})
	}
}

// proxyMigration is a node with kube-proxy on it, and rules of others.
type proxyMigration struct {
	*proxyLab
	// rules are those that kube-proxy left, theirs those of others.
	rules, theirs string
	// pod is the Pod that the proxy is in, if it is in one.
	pod   string
	vigil *vigil
	// commands counts those that were begun.
	commands atomic.Int32
}

// A Service whose endpoints change while no proxy runs, and one that is created then.
const movedService, newService, lateService = "10.96.0.110", "10.96.0.111", "10.96.0.112"

// newMigration starts kube-proxy and asks for Services from then on. All is where the document says: this is in a mount namespace of its own.
func newMigration(t *testing.T, mode, portal string, kubeadm bool) *proxyMigration {
	t.Helper()
	for _, args := range []string{"--make-rprivate /", "-t tmpfs tmpfs /var/lib", "-t tmpfs tmpfs /run", "-t tmpfs tmpfs /usr/local/bin"} {
		if out, err := exec.Command("mount", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("mount %s: %v %s", args, err, out)
		}
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("ip link set lo up: %v %s", err, out)
	}
	m := &proxyMigration{proxyLab: newProxyLab(t, portal, "--controllers", "daemonset", "--allow-privileged")}
	for name, path := range map[string]string{"portal": harness.Portal(), "kube-proxy": harness.Peer("kube-proxy")} {
		if err := os.Symlink(path, filepath.Join("/usr/local/bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", "/usr/local/bin:"+os.Getenv("PATH"))
	t.Setenv("KUBECONFIG", m.api.Kubeconfig)
	m.theirs = m.others(t)
	node := "" // Pods have it in their command
	if !kubeadm {
		node = m.Facts().Node
	}
	m.configure(t, mode, node)
	targets := m.steady(t)
	far := m.FarPods(intent.IPv4)
	m.serve(t, "moved", movedService, far[0])
	if kubeadm {
		m.kubectlOfNode(t)
		m.sh(t, "kubectl create -f "+m.file(t, "kubeadm.yaml", kubeadmDaemonSet))
		m.during(t, "kubectl -n kube-system rollout status daemonset kube-proxy --timeout=60s")
	} else {
		m.launch(t, "kube-proxy --config "+proxyFolder+"/config.conf")
	}
	m.kubeProxySynced(t, mode)
	m.answers(t, "before", movedService, far[0])
	m.vigil = m.proxyLab.vigil(t, targets)
	return m
}

// others adds the rules of others to those that there are, and returns them all.
func (m *proxyMigration) others(t *testing.T) string {
	t.Helper()
	m.foreign(t)
	for _, tool := range []string{"iptables", "ip6tables"} { // as kubelets do
		m.run(t, tool, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
		for _, table := range []string{"mangle", "nat", "filter"} {
			m.run(t, tool, "-t", table, "-N", "KUBE-KUBELET-CANARY")
		}
	}
	return m.left(t)
}

var (
	// The tables that iptables-nft-save shows, and those of Portal.
	shownOtherwise = regexp.MustCompile(`(?ms)^table ip6? (portal|nat|filter|mangle) \{.*?^\}\n`)
	// Comments, chains that are always there, what both kube-proxy and kubelets have, and Portal's chains.
	notOthers = regexp.MustCompile(`(?m)^(#.*|:[A-Z]+ ACCEPT.*|.*\bKUBE-FIREWALL\b.*|.*\bPORTAL-.*|\s*)\n`)
)

// left is what the kernel has, but Portal's rules and KUBE-FIREWALL.
func (m *proxyMigration) left(t *testing.T) string {
	t.Helper()
	return notOthers.ReplaceAllString(m.all(t), "")
}

// all is what the kernel has, but Portal's tables.
func (m *proxyMigration) all(t *testing.T) string {
	t.Helper()
	text := shownOtherwise.ReplaceAllString(m.sh(t, "nft -s list ruleset 2>/dev/null"), "")
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		text += tool + "\n" + m.sh(t, tool+"-save 2>/dev/null") // warnings would be in the middle of lines
	}
	return regexp.MustCompile(`\[\d+:\d+\]|(?m)^#.*$`).ReplaceAllString(text, "")
}

// kubeProxysOwn are the lines of what there is that name kube-proxy's chains and tables.
func (m *proxyMigration) kubeProxysOwn(t *testing.T) (out string) {
	t.Helper()
	for line := range strings.Lines(m.left(t)) {
		if strings.Contains(line, "KUBE-") && !strings.Contains(line, "CANARY") && !strings.Contains(line, "HINT") || strings.Contains(line, "kube-proxy {") {
			out += line
		}
	}
	return out
}

// account is what kubeadm makes for kube-proxy.
const account = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "kubeadm:node-proxier"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:node-proxier"}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
`

// configuration has what kube-proxy's is filled with by kubeadm. Limits of connection tracking are left alone: they would be this machine's.
const configuration = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16,fd00:244::/32
configSyncPeriod: 0s
conntrack: {maxPerCore: 0, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: NODE
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: MODE
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: PORTS
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
`

const (
	proxyFolder   = "/var/lib/kube-proxy"
	accountFolder = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// kubeadmDaemonSet is as much of kubeadm's DaemonSet as matters to a proxy.
const kubeadmDaemonSet = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system, labels: {k8s-app: kube-proxy}}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  updateStrategy: {type: RollingUpdate}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      hostNetwork: true
      serviceAccountName: kube-proxy
      tolerations: [{operator: Exists}]
      containers:
      - name: kube-proxy
        image: registry.k8s.io/kube-proxy:v1.37.1
        command: [/usr/local/bin/kube-proxy, --config=/var/lib/kube-proxy/config.conf, --hostname-override=$(NODE_NAME)]
        env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        securityContext: {privileged: true}
        volumeMounts: [{name: kube-proxy, mountPath: /var/lib/kube-proxy}]
      volumes: [{name: kube-proxy, configMap: {name: kube-proxy}}]
`

// configure makes the account, and the files that a Pod of kubeadm's has; as a service kube-proxy has them, too.
func (m *proxyMigration) configure(t *testing.T, mode, node string) {
	t.Helper()
	m.sh(t, "portal kubectl create -f "+m.file(t, "account.yaml", account))
	token, err := m.client.CoreV1().ServiceAccounts("kube-system").CreateToken(t.Context(), "kube-proxy", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(m.api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range config.Clusters {
		m.file(t, accountFolder+"/ca.crt", string(c.CertificateAuthorityData))
		c.CertificateAuthority, c.CertificateAuthorityData = accountFolder+"/ca.crt", nil
	}
	m.file(t, accountFolder+"/token", token.Status.Token)
	for _, u := range config.AuthInfos {
		u.ClientCertificateData, u.ClientKeyData, u.TokenFile = nil, nil, accountFolder+"/token"
	}
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	m.file(t, proxyFolder+"/kubeconfig.conf", string(kubeconfig))
	ports := "null"
	if mode == "iptables" { // which serves them at all addresses, otherwise than this laboratory expects
		ports = "[primary]"
	}
	m.file(t, proxyFolder+"/config.conf", strings.NewReplacer("MODE", fmt.Sprintf("%q", mode), "NODE", fmt.Sprintf("%q", node), "PORTS", ports).Replace(configuration))
}

// file writes a file, in the test's folder if its name has none, and returns its path.
func (m *proxyMigration) file(t *testing.T, path, text string) string {
	t.Helper()
	if !filepath.IsAbs(path) {
		path = filepath.Join(m.dir, path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, path, text)
	return path
}

// sh runs commands on the node as a person types them.
func (m *proxyMigration) sh(t *testing.T, script string) string {
	t.Helper()
	out, err := m.try(script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (m *proxyMigration) try(script string) (string, error) {
	// With all that it starts, it ends when this test does, however that is.
	p, err := m.begin("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec", script)
	if err != nil {
		return "", err
	}
	err = p.Wait(time.Minute)
	out, _ := os.ReadFile(p.Log)
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", script, err, out)
	}
	return string(out), err
}

// begin starts a program on the node. Others can ask from there meanwhile.
func (m *proxyMigration) begin(path string, args ...string) (*harness.Process, error) {
	return harness.StartIn(m.Node.Namespace(), m.dir, fmt.Sprintf("command-%d", m.commands.Add(1)), path, args...)
}

// launch runs a command that doesn't end, as the proxy of this node.
func (m *proxyMigration) launch(t *testing.T, command string) {
	t.Helper()
	var err error
	m.proxy, err = m.begin("sh", "-c", "exec "+command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.proxy.Kill)
}

// halt ends the proxy of this node as its service manager or kubelet would. Its rules stay.
func (m *proxyMigration) halt(t *testing.T) {
	t.Helper()
	// Without the elements of sets, some of which are clients.
	rules := func() string { return m.sh(t, "nft -s -t list ruleset 2>/dev/null") }
	before := rules()
	if err := m.proxy.Stop(20 * time.Second); err != nil && m.rules != "" { // kube-proxy, before, ends by the signal
		t.Errorf("Portal does not end well: %v\n%s", err, m.proxy.Tail())
	}
	if after := rules(); after != before {
		t.Errorf("with the proxy its rules changed, from\n%s\nto\n%s", before, after)
	}
}

// ours are Portal's tables.
func (m *proxyMigration) ours(t *testing.T) string {
	t.Helper()
	return strings.Join(ours.FindAllString(m.run(t, "nft", "list", "ruleset"), -1), "")
}

// kubectlOfNode is a kubectl that finds a Pod's container without a kubelet: it runs on this node, with its log in a file, and /portal is what is mounted there.
func (m *proxyMigration) kubectlOfNode(t *testing.T) {
	t.Helper()
	m.file(t, "/usr/local/bin/kubectl", `#!/bin/sh
case " $* " in
*" logs "*) exec cat `+m.dir+`/pod.log ;;
*" exec "*)
	while [ "$1" != -- ]; do shift; done
	[ "$2" = /portal ] || exit 127
	shift 2
	exec portal "$@" ;;
esac
exec portal kubectl "$@"
`)
	if err := os.Chmod("/usr/local/bin/kubectl", 0o755); err != nil {
		t.Fatal(err)
	}
	m.sh(t, "kubectl -n kube-system create configmap kube-proxy --from-file "+proxyFolder)
}

// during runs commands and is this node's kubelet as long as they run.
func (m *proxyMigration) during(t *testing.T, script string) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := m.try(script)
		done <- err
	}()
	for {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		case <-time.After(100 * time.Millisecond):
			m.kubelet(t)
		}
	}
}

// kubelet ends and starts the proxy as its Pods say.
func (m *proxyMigration) kubelet(t *testing.T) {
	t.Helper()
	pods := m.client.CoreV1().Pods("kube-system")
	list, err := pods.List(t.Context(), metav1.ListOptions{LabelSelector: "k8s-app=kube-proxy"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		switch {
		case p.DeletionTimestamp != nil:
			if m.pod == p.Name {
				m.halt(t)
				m.between(t)
				m.pod = ""
			}
			err = pods.Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		case p.Spec.NodeName == "":
			err = pods.Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: m.Facts().Node}}, metav1.CreateOptions{})
		case p.Status.Phase == corev1.PodPending && m.pod == "":
			m.launch(t, containerCommand(t, &p))
			m.pod = p.Name
			_ = os.Remove(filepath.Join(m.dir, "pod.log"))
			if err := os.Symlink(m.proxy.Log, filepath.Join(m.dir, "pod.log")); err != nil {
				t.Fatal(err)
			}
			p.Status.Phase = corev1.PodRunning
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.ContainersReady, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}}
			_, err = pods.UpdateStatus(t.Context(), &p, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// containerCommand is the command of a Pod's container, with files of the machine where they are mounted from.
func containerCommand(t *testing.T, p *corev1.Pod) string {
	t.Helper()
	c := p.Spec.Containers[0]
	if !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == proxyFolder }) {
		t.Errorf("the Pod's container has no configuration: %v", c.VolumeMounts)
	}
	words := slices.Clone(c.Command)
	for _, mount := range c.VolumeMounts {
		i := slices.IndexFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
		if mount.MountPath == words[0] && p.Spec.Volumes[i].HostPath != nil {
			words[0] = p.Spec.Volumes[i].HostPath.Path
		}
	}
	return strings.ReplaceAll(strings.Join(words, " "), "$(NODE_NAME)", p.Spec.NodeName)
}

// serve creates a Service with one endpoint.
func (m *proxyMigration) serve(t *testing.T, name, ip string, endpoint netip.Addr) {
	t.Helper()
	m.create(t, labService(name, func(s *corev1.ServiceSpec) { s.ClusterIP = ip }), labSlice(name, intent.IPv4, []netip.Addr{endpoint}, nil))
}

// answers demands that a Service is answered by an endpoint within a minute.
func (m *proxyMigration) answers(t *testing.T, when, ip string, want netip.Addr) {
	t.Helper()
	eventually(t, 10*time.Second, when+", "+ip+" is answered by "+want.String(), func() string {
		who, err := m.Client.Ask(intent.TCP, netip.Addr{}, netip.AddrPortFrom(netip.MustParseAddr(ip), 80), vigilPatience)
		if err != nil {
			return err.Error()
		}
		if who.Addr() != want {
			return "it is answered by " + who.String()
		}
		return ""
	})
}

// kubeProxySynced waits for the metric that the document names.
func (m *proxyMigration) kubeProxySynced(t *testing.T, mode string) {
	t.Helper()
	eventually(t, 30*time.Second, "kube-proxy has synced", func() string {
		if _, _, err := m.get("/metrics"); err != nil {
			return err.Error() + "\n" + m.proxy.Tail()
		}
		for _, family := range []string{"IPv4", "IPv6"} {
			if m.metric(t, `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="`+family+`"}`) == 0 {
				return family + " not yet\n" + m.proxy.Tail()
			}
		}
		return ""
	})
	if _, body, _ := m.get("/proxyMode"); mode != "" && string(body) != mode {
		t.Fatalf("kube-proxy has the mode %s, not %s", body, mode)
	}
}

// between is when kube-proxy has ended and Portal not begun, or the other way round.
func (m *proxyMigration) between(t *testing.T) {
	t.Helper()
	far := m.FarPods(intent.IPv4)
	if m.rules != "" {
		return // on the way back
	}
	if m.rules = m.kubeProxysOwn(t); m.rules == "" {
		t.Fatal("kube-proxy left nothing")
	}
	m.update(t, labSlice("moved", intent.IPv4, []netip.Addr{far[1]}, nil))
	m.serve(t, "new", newService, far[1])
	m.answers(t, "with the rules of kube-proxy alone", movedService, far[0])
}

// follow does step after step.
func (m *proxyMigration) follow(t *testing.T, blocks []string) {
	var done []string
	for _, block := range blocks {
		step := ""
		switch {
		case block == "systemctl stop kube-proxy\n":
			step = "stop"
			m.halt(t)
			m.between(t)
		case strings.HasPrefix(block, "portal proxy --config "):
			step = "start"
			m.launch(t, block)
			m.besideOldRules(t)
		case strings.HasPrefix(block, "kubectl -n kube-system patch "):
			step = "replace"
			m.during(t, block)
			m.besideOldRules(t)
		case strings.HasPrefix(block, "kubectl -n kube-system logs "):
			step = "look"
			eventually(t, 30*time.Second, "the log has it", func() string {
				if _, err := m.try(block); err != nil {
					return err.Error() + "\n" + m.proxy.Tail()
				}
				return ""
			})
		case strings.Contains(block, "portal proxy --cleanup-foreign\n"):
			step = "clean"
			m.cleanForeign(t, block)
		case block == "systemctl start kube-proxy\n":
			step = "back"
			m.halt(t)
			m.launch(t, "kube-proxy --config "+proxyFolder+"/config.conf")
			m.kubeProxySynced(t, "")
		case strings.HasPrefix(block, "kubectl -n kube-system rollout undo "):
			step = "back"
			m.during(t, block)
			m.kubeProxySynced(t, "")
		case block == "portal proxy --cleanup\n":
			step = "forget"
			m.cleanOwn(t, block)
		default:
			t.Fatalf("what is to be done here?\n%s", block)
		}
		t.Logf("%s %s", time.Now().Format("15:04:05"), step)
		done = append(done, step)
	}
	want := "stop start clean back forget"
	if m.pod != "" {
		want = "replace look clean back forget"
	}
	if got := strings.Join(done, " "); got != want {
		t.Errorf("the steps are %s, not %s", got, want)
	}
	m.vigil.end(t)
}

// besideOldRules is what the document says of Portal beside rules that kube-proxy left.
func (m *proxyMigration) besideOldRules(t *testing.T) {
	sorts := "iptables chains"
	if strings.Contains(m.rules, "kube-proxy {") {
		sorts = "nftables tables"
	}
	eventually(t, 30*time.Second, "Portal reports the old rules", func() string {
		st := m.state()
		if st == nil {
			return m.proxy.Tail()
		}
		log, _ := os.ReadFile(m.proxy.Log)
		for _, line := range []string{"found rules of kube-proxy", sorts, "first sync done"} {
			if !strings.Contains(string(log), line) {
				return line + " is not in its log:\n" + string(log)
			}
		}
		count := 0
		for _, l := range st.Foreign {
			count += l.Count
			if l.What != sorts {
				t.Fatalf("it found %v where kube-proxy had %s", l, sorts)
			}
		}
		if n := m.metric(t, "portal_proxy_foreign_rules"); count == 0 || n != float64(count) {
			return fmt.Sprintf("/state has %v, and the metrics %v", st.Foreign, n)
		}
		return ""
	})
	m.settled(t, 30*time.Second)
	m.answers(t, "beside the old rules", newService, m.FarPods(intent.IPv4)[1])
	if now := m.kubeProxysOwn(t); now != m.rules {
		t.Errorf("kube-proxy left\n%s\nand there is\n%s", m.rules, now)
	}
}

// cleanForeign removes the old rules, and nothing else.
func (m *proxyMigration) cleanForeign(t *testing.T, block string) {
	const localnet = "/proc/sys/net/ipv4/conf/all/route_localnet"
	before := m.run(t, "cat", localnet)
	firewall := strings.Count(m.all(t), "-j KUBE-FIREWALL")
	out := m.sh(t, block)
	t.Log(strings.TrimSpace(out))
	if !strings.HasPrefix(out, "removed ") {
		t.Errorf("it does not say what it removed: %q", out)
	}
	if now := m.left(t); now != m.theirs {
		t.Errorf("others had\n%s\nand there is\n%s", m.theirs, now)
	}
	if now := strings.Count(m.all(t), "-j KUBE-FIREWALL"); now != firewall {
		t.Errorf("%d of %d rules lead to KUBE-FIREWALL", now, firewall)
	}
	if now := m.run(t, "cat", localnet); now != before {
		t.Errorf("route_localnet was %s and is %s", before, now)
	}
	var snap *plan.Snapshot
	snap, _ = m.settled(t, 30*time.Second)
	m.answers(t, "without the old rules", movedService, m.FarPods(intent.IPv4)[1])
	m.Judge(t, snap)
	took := eventually(t, 20*time.Second, "Portal notices", func() string {
		if st := m.state(); st == nil || len(st.Foreign) > 0 || m.metric(t, "portal_proxy_foreign_rules") != 0 {
			return fmt.Sprint(st.Foreign)
		}
		return ""
	})
	t.Logf("noticed after another %s", took.Round(time.Second))
	if out := m.sh(t, block); out != "kube-proxy left nothing here\n" {
		t.Errorf("again, it says %q", out)
	}
	log, err := os.ReadFile(m.proxy.Log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		if !strings.Contains(line, "INFO") && !strings.Contains(line, "found rules of kube-proxy") {
			t.Errorf("Portal complains: %s", line)
		}
	}
}

// cleanOwn removes Portal's rules beside kube-proxy, which goes on.
func (m *proxyMigration) cleanOwn(t *testing.T, block string) {
	rules := m.kubeProxysOwn(t)
	if rules == "" {
		t.Error("kube-proxy is back and has no rules")
	}
	if out := m.sh(t, block); out != "" {
		t.Errorf("it says %q", out)
	}
	if tables, rest := m.ours(t), m.all(t); tables != "" || strings.Contains(rest, "PORTAL-") {
		t.Errorf("there is still\n%s%s", tables, rest)
	}
	if now := m.kubeProxysOwn(t); now != rules {
		t.Errorf("kube-proxy had\n%s\nand has\n%s", rules, now)
	}
	far := m.FarPods(intent.IPv4)
	m.answers(t, "with kube-proxy again", movedService, far[1])
	m.serve(t, "late", lateService, far[0])
	m.answers(t, "with kube-proxy again", lateService, far[0])
}

package spec

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/serviceenv"
)

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "a", "EMPTY": "", "NESTED": "$(A)"}
	for in, want := range map[string]string{
		"": "", "plain": "plain", "$(A)": "a", "x$(A)y$(A)": "xaya", "$$(A)": "$(A)", "$$$(A)": "$a", "$(B)": "$(B)", "$(": "$(", "$(A": "$(A", "$": "$", "$$": "$",
		"$A": "$A", "a$": "a$", "$(EMPTY)!": "!", "$(NESTED)": "$(A)", "$()": "$()", "$(A)$(B)$(A)": "a$(B)a", "$$$$": "$$",
	} {
		if got := Expand(in, vars); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if got := Expand("$(A)", map[string]string{"A": "first"}, vars); got != "first" {
		t.Error(got)
	}
}

type objects struct{}

func (objects) ConfigMap(name string) (*corev1.ConfigMap, error) {
	if name == "config" {
		return &corev1.ConfigMap{Data: map[string]string{"key": "from config", "other": "o"}}, nil
	}
	return nil, &MissingError{"ConfigMap", name}
}

func (objects) Secret(name string) (*corev1.Secret, error) {
	if name == "secret" {
		return &corev1.Secret{Data: map[string][]byte{"password": []byte("hidden")}}, nil
	}
	return nil, &MissingError{"Secret", name}
}

func testPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "shop", UID: "u", Labels: map[string]string{"b": "2", "a": "1"}, Annotations: map[string]string{"example.com/x": `say "hi"`}},
		Spec:       corev1.PodSpec{NodeName: "n", ServiceAccountName: "sa", Containers: []corev1.Container{{Name: "c"}, {Name: "d", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"memory": resource.MustParse("64Mi")}}}}},
	}
}

var facts = Facts{
	PodIPs: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}, HostIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
	Allocatable: corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("1Gi")},
	Services:    []serviceenv.Var{{Name: "WEB_SERVICE_HOST", Value: "10.96.0.1"}, {Name: "OWN", Value: "service"}},
}

func TestEnv(t *testing.T) {
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	pod := testPod()
	c := &pod.Spec.Containers[0]
	c.Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("250m")}
	c.EnvFrom = []corev1.EnvFromSource{
		{Prefix: "C_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}},
		{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "none"}, Optional: ptr.To(true)}},
	}
	c.Env = []corev1.EnvVar{
		{Name: "FIRST", Value: "1"}, {Name: "SECOND", Value: "$(FIRST)$(WEB_SERVICE_HOST)$(LATER)"}, {Name: "LATER", Value: "l"}, {Name: "OWN", Value: "mine"},
		{Name: "NAME", ValueFrom: field("metadata.name")}, {Name: "LABEL", ValueFrom: field("metadata.labels['a']")}, {Name: "IPS", ValueFrom: field("status.podIPs")}, {Name: "HOST_IP", ValueFrom: field("status.hostIP")},
		{Name: "CPU", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}},
		{Name: "REQUEST", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "requests.cpu", Divisor: resource.MustParse("1m")}}},
		{Name: "ROUNDED", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "requests.cpu"}}},
		{Name: "MEMORY", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: "d", Resource: "limits.memory", Divisor: resource.MustParse("1Mi")}}},
		{Name: "PASSWORD", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "secret"}, Key: "password"}}},
		{Name: "ABSENT", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}, Key: "none", Optional: ptr.To(true)}}},
	}
	named := facts
	named.Hostname = "p"
	env, vars, err := Env(pod, c, []string{"PATH=/image", "OWN=image", "IMAGES=x"}, named, objects{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		got[name] = value
	}
	if _, known := vars["IMAGES"]; known || vars["PATH"] != "" || vars["OWN"] != "mine" || vars["C_key"] != "from config" || vars["WEB_SERVICE_HOST"] != "10.96.0.1" {
		t.Errorf("$(NAME) can mean %v", vars)
	}
	if len(got) != len(env) {
		t.Errorf("a name is there twice: %v", env)
	}
	for name, want := range map[string]string{
		"PATH": "/image", "HOSTNAME": "p", "WEB_SERVICE_HOST": "10.96.0.1", "OWN": "mine", "FIRST": "1", "SECOND": "110.96.0.1$(LATER)", "NAME": "p", "LABEL": "1",
		"IPS": "10.0.0.2,fd00::2", "HOST_IP": "192.0.2.1", "CPU": "2", "REQUEST": "250", "ROUNDED": "1", "MEMORY": "64", "PASSWORD": "hidden", "C_key": "from config", "C_other": "o",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	if _, ok := got["ABSENT"]; ok {
		t.Error("ABSENT is set")
	}
	for want, bad := range map[string]*corev1.EnvVarSource{
		`ConfigMap "none" not found`:    {ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "none"}, Key: "k"}},
		`key of Secret secret "none"`:   {SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "secret"}, Key: "none"}},
		"fieldRef spec.nothing":         field("spec.nothing"),
		`there is no such container`:    {ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: "none", Resource: "limits.cpu"}},
		"of a kind that this node does": {},
	} {
		_, _, err := Env(pod, &corev1.Container{Env: []corev1.EnvVar{{Name: "BAD", ValueFrom: bad}}}, nil, facts, objects{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "env BAD") {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestField(t *testing.T) {
	pod := testPod()
	for path, want := range map[string]string{
		"metadata.namespace": "shop", "metadata.uid": "u", "metadata.labels": "a=\"1\"\nb=\"2\"", "metadata.annotations": `example.com/x="say \"hi\""`,
		"metadata.annotations['example.com/x']": `say "hi"`, "spec.nodeName": "n", "spec.serviceAccountName": "sa", "status.podIP": "10.0.0.2", "status.hostIPs": "192.0.2.1",
	} {
		if got, err := Field(pod, path, facts); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", path, got, err, want)
		}
	}
}

func TestProcess(t *testing.T) {
	image := Image{Entrypoint: []string{"/entry", "$$(V)"}, Cmd: []string{"$(V)"}, WorkingDir: "/image", UID: ptr.To[int64](10), GID: ptr.To[int64](20)}
	for _, c := range []struct {
		name      string
		container corev1.Container
		shared    corev1.PodSecurityContext
		want      string
	}{
		{"the image's", corev1.Container{}, corev1.PodSecurityContext{}, "[/entry $$(V) $(V)] /image 10:20 [20]"},
		{"args", corev1.Container{Args: []string{"$(V)"}}, corev1.PodSecurityContext{}, "[/entry $$(V) v] /image 10:20 [20]"},
		{"command", corev1.Container{Command: []string{"c", "$(V)"}, WorkingDir: "/w"}, corev1.PodSecurityContext{}, "[c v] /w 10:20 [20]"},
		{"the Pod's user", corev1.Container{}, corev1.PodSecurityContext{RunAsUser: ptr.To[int64](5), SupplementalGroups: []int64{7, 20}, FSGroup: ptr.To[int64](9)}, "[/entry $$(V) $(V)] /image 5:20 [20 7 9]"},
		{"its own user", corev1.Container{SecurityContext: &corev1.SecurityContext{RunAsUser: ptr.To[int64](6), RunAsGroup: ptr.To[int64](8)}}, corev1.PodSecurityContext{RunAsUser: ptr.To[int64](5)}, "[/entry $$(V) $(V)] /image 6:8 [8]"},
	} {
		pod := testPod()
		pod.Spec.SecurityContext = &c.shared
		p, err := ProcessOf(pod, &c.container, image, map[string]string{"V": "v"}, 1<<30)
		if got := fmt.Sprintf("%v %s %d:%d %v", p.Args, p.Dir, p.UID, p.GID, p.Groups); err != nil || got != c.want {
			t.Errorf("%s: %s, %v, want %s", c.name, got, err, c.want)
		}
	}
	for want, context := range map[string]*corev1.SecurityContext{
		"would run as root":          {RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](0)},
		`"NOTHING" is not one of`:    {Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NOTHING"}}},
		"Localhost":                  {SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost}},
		"must be a number from 0 to": {RunAsUser: ptr.To[int64](-1)},
		"group 4294967295":           {RunAsGroup: ptr.To[int64](math.MaxUint32)},
		"user or group 2147483648":   {RunAsUser: ptr.To[int64](math.MaxInt32 + 1)},
	} {
		if _, err := ProcessOf(testPod(), &corev1.Container{SecurityContext: context}, Image{}, nil, 1<<30); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestGroupsOutOfRange(t *testing.T) {
	for _, shared := range []corev1.PodSecurityContext{{FSGroup: ptr.To[int64](math.MaxUint32)}, {SupplementalGroups: []int64{1, 1 << 32}}, {SupplementalGroups: []int64{-1}}} {
		pod := testPod()
		pod.Spec.SecurityContext = &shared
		if _, err := ProcessOf(pod, &corev1.Container{}, Image{}, nil, 1<<30); err == nil || !strings.Contains(err.Error(), "must be a number from 0 to 2147483647") {
			t.Errorf("%+v: %v", shared, err)
		}
	}
}

func TestRights(t *testing.T) {
	const usual = 0xa80425fb
	for _, c := range []struct {
		name    string
		context corev1.SecurityContext
		want    string
	}{
		{"usual", corev1.SecurityContext{}, fmt.Sprintf("%x false false", usual)},
		{"none", corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}, "0 false false"},
		{"one", corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_ADMIN"}}}, "1000 false false"},
		{"all but one", corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"NET_ADMIN"}, Add: []corev1.Capability{"ALL"}}}, fmt.Sprintf("%x false false", 1<<41-1-0x1000)},
		{"without one", corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"CAP_CHOWN"}}}, fmt.Sprintf("%x false false", usual-1)},
		{"privileged", corev1.SecurityContext{Privileged: ptr.To(true)}, "1ffffffffff false true"},
		{"no escalation", corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false)}, fmt.Sprintf("%x true false", usual)},
		{"unconfined", corev1.SecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeUnconfined}}, fmt.Sprintf("%x false true", usual)},
	} {
		p, err := ProcessOf(testPod(), &corev1.Container{SecurityContext: &c.context}, Image{}, nil, 1<<30)
		if got := fmt.Sprintf("%x %v %v", p.Capabilities, p.NoNewPrivileges, p.Unconfined); err != nil || got != c.want {
			t.Errorf("%s: %s, %v, want %s", c.name, got, err, c.want)
		}
	}
}

func TestFiles(t *testing.T) {
	pod := testPod()
	pod.Spec.Hostname, pod.Spec.Subdomain = "h", "sub"
	pod.Spec.HostAliases = []corev1.HostAlias{{IP: "192.0.2.9", Hostnames: []string{"a", "b"}}}
	hosts := Hosts(pod, facts.PodIPs, "cluster.local", "")
	if !strings.HasPrefix(hosts, "# Kubernetes-managed hosts file.\n") {
		t.Errorf("the first line does not say whose file it is:\n%s", hosts)
	}
	for _, want := range []string{"127.0.0.1\tlocalhost\n", "\n10.0.0.2\th.sub.shop.svc.cluster.local\th\n", "\nfd00::2\th.sub", "\n192.0.2.9\ta\tb\n"} {
		if !strings.Contains(hosts, want) {
			t.Errorf("no %q in\n%s", want, hosts)
		}
	}
	pod.Spec.HostNetwork = true
	if got := Hosts(pod, nil, "cluster.local", "1.2.3.4 node"); got != "1.2.3.4 node\n192.0.2.9\ta\tb\n" {
		t.Errorf("%q", got)
	}
	long := testPod()
	long.Name = strings.Repeat("x", 62) + ".y"
	if name, _ := Hostname(long, ""); name != strings.Repeat("x", 62) {
		t.Error(name)
	}
}

func TestResolve(t *testing.T) {
	node := ParseResolver("# comment\nnameserver 9.9.9.9\nsearch example.org\noptions timeout:1\n")
	if !slices.Equal(node.Servers, []string{"9.9.9.9"}) || !slices.Equal(node.Search, []string{"example.org"}) {
		t.Errorf("%+v", node)
	}
	more := &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1"}, Searches: []string{"more.example"}, Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr.To("2")}, {Name: "debug"}}}
	for _, c := range []struct {
		name    string
		policy  corev1.DNSPolicy
		host    bool
		config  *corev1.PodDNSConfig
		cluster []string
		want    string
	}{
		{"cluster", corev1.DNSClusterFirst, false, nil, []string{"10.96.0.10"}, "search shop.svc.cluster.local svc.cluster.local cluster.local example.org\nnameserver 10.96.0.10\noptions ndots:5\n"},
		{"no cluster DNS", corev1.DNSClusterFirst, false, nil, nil, "search example.org\nnameserver 9.9.9.9\noptions timeout:1\n"},
		{"the node's", corev1.DNSDefault, false, nil, []string{"10.96.0.10"}, "search example.org\nnameserver 9.9.9.9\noptions timeout:1\n"},
		{"host network", corev1.DNSClusterFirst, true, nil, []string{"10.96.0.10"}, "search example.org\nnameserver 9.9.9.9\noptions timeout:1\n"},
		{"cluster on the host network", corev1.DNSClusterFirstWithHostNet, true, nil, []string{"10.96.0.10"}, "search shop.svc.cluster.local svc.cluster.local cluster.local example.org\nnameserver 10.96.0.10\noptions ndots:5\n"},
		{"none", corev1.DNSNone, false, more, []string{"10.96.0.10"}, "search more.example\nnameserver 1.1.1.1\noptions ndots:2 debug\n"},
		{"more", corev1.DNSClusterFirst, false, more, []string{"10.96.0.10"}, "search shop.svc.cluster.local svc.cluster.local cluster.local example.org more.example\nnameserver 10.96.0.10\nnameserver 1.1.1.1\noptions ndots:2 debug\n"},
	} {
		pod := testPod()
		pod.Spec.DNSPolicy, pod.Spec.HostNetwork, pod.Spec.DNSConfig = c.policy, c.host, c.config
		if got := Resolve(pod, c.cluster, "cluster.local", node); got != c.want {
			t.Errorf("%s:\n%swant\n%s", c.name, got, c.want)
		}
	}
}

func TestSubPath(t *testing.T) {
	vars := map[string]string{"UP": "..", "ROOT": "/tmp", "DOTS": "..a"}
	if _, err := SubPath(&corev1.VolumeMount{Name: "v", SubPathExpr: "$(DOTS)/$(NONE)"}, vars); err == nil || !strings.Contains(err.Error(), `subPathExpr "$(DOTS)/$(NONE)" of volume v: the container's env has no NONE`) {
		t.Errorf("a variable that there is not: %v", err)
	}
	for _, c := range []struct {
		mount corev1.VolumeMount
		want  string // empty: it is refused
	}{
		{corev1.VolumeMount{SubPath: "a/b"}, "a/b"},
		{corev1.VolumeMount{SubPathExpr: "x/$(DOTS)"}, "x/..a"},
		{corev1.VolumeMount{SubPathExpr: "$$(NONE)"}, "$(NONE)"},
		{corev1.VolumeMount{SubPathExpr: "$(UP)"}, ""},
		{corev1.VolumeMount{SubPathExpr: "a/$(UP)/b"}, ""},
		{corev1.VolumeMount{SubPathExpr: "$(ROOT)"}, ""},
	} {
		got, err := SubPath(&c.mount, vars)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%+v: %q, %v", c.mount, got, err)
		}
	}
}

func TestKernelHostname(t *testing.T) {
	long := strings.Repeat("x", 63)
	for _, c := range []struct {
		name, subdomain string
		full            bool
		want            string // empty: it is refused
	}{
		{"web", "sub", true, "web.sub.shop.svc.cluster.local"},
		{"web", "sub", false, "web"},
		{"web", "", true, "web"},
		{long, "", true, long},
		{strings.Repeat("x", 64-len(".sub.shop.svc.cluster.local")), "sub", true, strings.Repeat("x", 37) + ".sub.shop.svc.cluster.local"},
		{strings.Repeat("x", 65-len(".sub.shop.svc.cluster.local")), "sub", true, ""},
	} {
		pod := testPod()
		pod.Name, pod.Spec.Subdomain, pod.Spec.SetHostnameAsFQDN = c.name, c.subdomain, &c.full
		got, err := KernelHostname(pod, "cluster.local")
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), "has 65 characters, and a host name can have 64") {
			t.Error(err)
		}
	}
}

func TestOOMScore(t *testing.T) {
	const node = 4 << 30
	with := func(memory string) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"memory": resource.MustParse(memory)}}}
	}
	sidecar := with("0")
	sidecar.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	for name, c := range map[string]struct {
		class     corev1.PodQOSClass
		container corev1.Container
		priority  int32
		want      int
	}{
		"guaranteed":     {corev1.PodQOSGuaranteed, with("1Gi"), 0, -997},
		"best effort":    {corev1.PodQOSBestEffort, corev1.Container{}, 0, 1000},
		"not known":      {"", corev1.Container{}, 0, 1000},
		"nothing":        {corev1.PodQOSBurstable, corev1.Container{}, 0, 999},
		"a little":       {corev1.PodQOSBurstable, with("1Mi"), 0, 999},
		"a quarter":      {corev1.PodQOSBurstable, with("1Gi"), 0, 750},
		"half":           {corev1.PodQOSBurstable, with("2Gi"), 0, 500},
		"all":            {corev1.PodQOSBurstable, with("4Gi"), 0, 3},
		"more than all":  {corev1.PodQOSBurstable, with("40Ti"), 0, 3},
		"a sidecar":      {corev1.PodQOSBurstable, sidecar, 0, 500},
		"the node's own": {corev1.PodQOSBestEffort, corev1.Container{}, 2_000_001_000, -997},
		"the cluster's":  {corev1.PodQOSBestEffort, corev1.Container{}, 2_000_000_000, 1000},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Priority: &c.priority, Containers: []corev1.Container{with("1Gi"), with("2Gi")}}, Status: corev1.PodStatus{QOSClass: c.class}}
		if p, err := ProcessOf(pod, &c.container, Image{}, nil, node); err != nil || p.OOMScoreAdj != c.want {
			t.Errorf("%s: %d, %v, want %d", name, p.OOMScoreAdj, err, c.want)
		}
	}
}

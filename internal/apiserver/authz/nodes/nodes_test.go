package nodes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/rbac/policy"
)

func pod(namespace, name, node string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.PodSpec{NodeName: node}}
	for _, f := range change {
		f(p)
	}
	return p
}

func secretVolume(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name}}})
	}
}

// Every field through which a Pod can refer to an object is found, and each object once.
func TestReferences(t *testing.T) {
	local := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	env := func(n string) ([]corev1.EnvVar, []corev1.EnvFromSource) {
		return []corev1.EnvVar{
				{Name: "plain", Value: "x"},
				{Name: "s", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: local(n + "-s-env")}}},
				{Name: "c", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: local(n + "-c-env")}}},
			}, []corev1.EnvFromSource{
				{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: local(n + "-s-from")}},
				{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: local(n + "-c-from")}},
			}
	}
	p := pod("ns", "p", "n1", secretVolume("s-vol"), secretVolume("s-vol"))
	p.Spec.ServiceAccountName = "sa"
	p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{local("s-pull"), local("")}
	for _, name := range []string{"main", "side"} {
		e, f := env(name)
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Env: e, EnvFrom: f})
	}
	e, f := env("init")
	p.Spec.InitContainers = []corev1.Container{{Env: e, EnvFrom: f}}
	e, f = env("debug")
	p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Env: e, EnvFrom: f}}}
	ref := func(name string) *corev1.LocalObjectReference { return &corev1.LocalObjectReference{Name: name} }
	for _, v := range []corev1.VolumeSource{
		{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: local("c-vol")}},
		{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{Secret: &corev1.SecretProjection{LocalObjectReference: local("s-proj")}},
			{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local("c-proj")}},
			{DownwardAPI: &corev1.DownwardAPIProjection{}},
		}}},
		{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}},
		{Ephemeral: &corev1.EphemeralVolumeSource{}},
		{CSI: &corev1.CSIVolumeSource{NodePublishSecretRef: ref("s-csi")}},
		{AzureFile: &corev1.AzureFileVolumeSource{SecretName: "s-azure"}},
		{CephFS: &corev1.CephFSVolumeSource{SecretRef: ref("s-ceph")}},
		{Cinder: &corev1.CinderVolumeSource{SecretRef: ref("s-cinder")}},
		{FlexVolume: &corev1.FlexVolumeSource{SecretRef: ref("s-flex")}},
		{RBD: &corev1.RBDVolumeSource{SecretRef: ref("s-rbd")}},
		{ScaleIO: &corev1.ScaleIOVolumeSource{SecretRef: ref("s-scaleio")}},
		{ISCSI: &corev1.ISCSIVolumeSource{SecretRef: ref("s-iscsi")}},
		{StorageOS: &corev1.StorageOSVolumeSource{SecretRef: ref("s-storageos")}},
		{EmptyDir: &corev1.EmptyDirVolumeSource{}},
	} {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "v", VolumeSource: v})
	}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{
		{Name: "a", ResourceClaimName: new("claim-a")}, {Name: "b", ResourceClaimTemplateName: new("t")}, {Name: "c", ResourceClaimTemplateName: new("t")},
	}
	p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "b", ResourceClaimName: new("claim-b")}, {Name: "c"}}
	p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "claim-x"}

	want := map[Kind][]string{
		ServiceAccount: {"sa"},
		VolumeClaim:    {"claim", "p-v"},
		ResourceClaim:  {"claim-a", "claim-b", "claim-x"},
		ConfigMap:      {"c-proj", "c-vol", "debug-c-env", "debug-c-from", "init-c-env", "init-c-from", "main-c-env", "main-c-from", "side-c-env", "side-c-from"},
		Secret: {"debug-s-env", "debug-s-from", "init-s-env", "init-s-from", "main-s-env", "main-s-from", "s-azure", "s-ceph", "s-cinder", "s-csi", "s-flex",
			"s-iscsi", "s-proj", "s-pull", "s-rbd", "s-scaleio", "s-storageos", "s-vol", "side-s-env", "side-s-from"},
	}
	got := map[Kind][]string{}
	for _, r := range References(p) {
		got[r.Kind] = append(got[r.Kind], r.Name)
	}
	for kind, names := range want {
		slices.Sort(got[kind])
		if !slices.Equal(got[kind], names) {
			t.Errorf("kind %d: %q, want %q", kind, got[kind], names)
		}
	}
	if len(got) != len(want) {
		t.Errorf("other kinds: %v", got)
	}
}

// What a node needs follows its Pods: those that come, move, change and go, and lists after a lost watch.
func TestGraphFollows(t *testing.T) {
	g := NewGraph()
	s := store{g}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	expect := func(node, name string, want bool) {
		t.Helper()
		if got := g.Needs(t.Context(), node, Secret, "ns", name); got != want {
			t.Errorf("%s needs %s: %v", node, name, got)
		}
	}
	must(s.Add(pod("ns", "pending", "", secretVolume("a"))))
	expect("", "a", false)
	must(s.Update(pod("ns", "pending", "n1", secretVolume("a"))))
	expect("n1", "a", true)
	expect("n2", "a", false)
	if g.Needs(t.Context(), "n1", ConfigMap, "ns", "a") || g.Needs(t.Context(), "n1", Secret, "other", "a") || !g.Needs(t.Context(), "n1", Pod, "ns", "pending") {
		t.Error("other objects are needed")
	}
	must(s.Add(pod("ns", "second", "n1", secretVolume("a"), secretVolume("b"))))
	must(s.Delete(pod("ns", "pending", "n1")))
	expect("n1", "a", true) // the second still needs it
	must(s.Delete(pod("ns", "second", "n1")))
	expect("n1", "a", false)
	expect("n1", "b", false)
	must(s.Delete(pod("ns", "second", "n1"))) // twice is once

	must(s.Add(pod("ns", "mirror", "n1", secretVolume("m"), func(p *corev1.Pod) {
		p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	})))
	expect("n1", "m", false)
	if !g.Needs(t.Context(), "n1", Pod, "ns", "mirror") {
		t.Error("a mirror Pod is not its node's")
	}
	// Deleted and created anew elsewhere while the watch was lost.
	must(s.Replace([]any{pod("ns", "mirror", "n2", secretVolume("c"))}, "9"))
	expect("n1", "c", false)
	expect("n2", "c", true)
	if g.Needs(t.Context(), "n1", Pod, "ns", "mirror") {
		t.Error("n1 keeps a Pod that is gone")
	}
	must(s.Replace(nil, "10"))
	if len(g.pods)+len(g.needed) > 0 {
		t.Errorf("left over: %v %v", g.pods, g.needed)
	}
	if !g.WaitSynced(t.Context()) {
		t.Error("not synced after a list")
	}
	if err := s.Add(&corev1.Node{}); err == nil {
		t.Error("a Node was taken for a Pod")
	}
}

// A node that asks for what its Pod needs before the graph has heard of the Pod is not refused.
func TestGraphLooks(t *testing.T) {
	g := NewGraph()
	var pods Source = listed{pods: []corev1.Pod{
		*pod("ns", "new", "n1", secretVolume("a")), *pod("ns", "other", "n2", secretVolume("b")),
		*pod("ns", "mirror", "n1", secretVolume("m"), func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }),
	}}
	g.source.Store(&pods)
	for _, c := range []struct {
		kind            Kind
		namespace, name string
		want            bool
	}{
		{Secret, "ns", "a", true}, {Pod, "ns", "new", true}, {Secret, "ns", "b", false}, {Pod, "ns", "other", false}, {Secret, "elsewhere", "a", false},
		{ConfigMap, "ns", "a", false}, {Secret, "ns", "m", false}, {Pod, "ns", "mirror", true},
	} {
		if got := g.Needs(t.Context(), "n1", c.kind, c.namespace, c.name); got != c.want {
			t.Errorf("n1 needs %d %s/%s: %v", c.kind, c.namespace, c.name, got)
		}
	}
}

// listed are Pods that the API has.
type listed struct {
	Source
	pods []corev1.Pod
}

func (l listed) List(ctx context.Context, o *metainternalversion.ListOptions) (runtime.Object, error) {
	out := &corev1.PodList{}
	for _, p := range l.pods {
		if p.Namespace == request.NamespaceValue(ctx) && o.FieldSelector.Matches(fields.Set{"spec.nodeName": p.Spec.NodeName}) {
			out.Items = append(out.Items, p)
		}
	}
	return out, nil
}

// TestGraphUnderChange compares the graph with the Pods themselves after many changes, while others read it.
func TestGraphUnderChange(t *testing.T) {
	g := NewGraph()
	s := store{g}
	ctx, stop := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for ctx.Err() == nil {
				g.Needs(t.Context(), "n1", Secret, "ns", "s1")
			}
		})
	}
	random := rand.New(rand.NewPCG(1, 2))
	current := map[string]*corev1.Pod{}
	for range 5000 {
		name := fmt.Sprintf("p%d", random.IntN(40))
		if was, ok := current[name]; ok && random.IntN(3) == 0 {
			if err := s.Delete(was); err != nil {
				t.Fatal(err)
			}
			delete(current, name)
			continue
		}
		next := pod("ns", name, fmt.Sprintf("n%d", random.IntN(5)))
		for range random.IntN(4) {
			secretVolume(fmt.Sprintf("s%d", random.IntN(10)))(next)
		}
		if err := s.Update(next); err != nil {
			t.Fatal(err)
		}
		current[name] = next
	}
	stop()
	readers.Wait()
	for n := range 5 {
		for i := range 10 {
			node, secret, want := fmt.Sprintf("n%d", n), fmt.Sprintf("s%d", i), false
			for _, p := range current {
				want = want || p.Spec.NodeName == node && slices.Contains(References(p), Reference{Secret, secret})
			}
			if got := g.Needs(t.Context(), node, Secret, "ns", secret); got != want {
				t.Errorf("%s needs %s: %v, want %v", node, secret, got, want)
			}
		}
	}
	for _, p := range current {
		if err := s.Delete(p); err != nil {
			t.Fatal(err)
		}
	}
	if len(g.needed) > 0 {
		t.Errorf("left over: %v", g.needed)
	}
}

func nodeUser(name string) *user.DefaultInfo {
	return &user.DefaultInfo{Name: name, Groups: []string{"system:nodes", "system:authenticated"}}
}

func newAuthorizer(t testing.TB) Authorizer {
	t.Helper()
	defaults, err := policy.Default()
	if err != nil {
		t.Fatal(err)
	}
	z := Authorizer{Graph: NewGraph(), Rules: defaults.Rules("system:node")}
	if len(z.Rules) == 0 {
		t.Fatal("nodes have no rules")
	}
	list := []any{
		pod("ns", "mine", "n1", secretVolume("s1"), func(p *corev1.Pod) { p.Spec.ServiceAccountName = "sa1" }),
		pod("ns", "theirs", "n2", secretVolume("s2"), func(p *corev1.Pod) { p.Spec.ServiceAccountName = "sa2" }),
	}
	if err := (store{z.Graph}).Replace(list, "1"); err != nil {
		t.Fatal(err)
	}
	return z
}

func TestAuthorize(t *testing.T) {
	z := newAuthorizer(t)
	type a = authorizer.AttributesRecord
	on := func(node string) fields.Requirements {
		return fields.Requirements{{Field: "spec.nodeName", Operator: selection.Equals, Value: node}}
	}
	for _, c := range []struct {
		a       a
		allowed bool
	}{
		{a{Verb: "get", Resource: "secrets", Namespace: "ns", Name: "s1"}, true},
		{a{Verb: "watch", Resource: "secrets", Namespace: "ns", Name: "s1"}, true},
		{a{Verb: "get", Resource: "secrets", Namespace: "ns", Name: "s2"}, false},
		{a{Verb: "list", Resource: "secrets", Namespace: "ns"}, false},
		{a{Verb: "list", Resource: "secrets"}, false},
		{a{Verb: "update", Resource: "secrets", Namespace: "ns", Name: "s1"}, false},
		{a{Verb: "get", Resource: "secrets", Subresource: "x", Namespace: "ns", Name: "s1"}, false},
		{a{Verb: "get", Resource: "serviceaccounts", Namespace: "ns", Name: "sa1"}, true},
		{a{Verb: "list", Resource: "serviceaccounts", Namespace: "ns", Name: "sa1"}, false},
		{a{Verb: "create", Resource: "serviceaccounts", Subresource: "token", Namespace: "ns", Name: "sa1"}, true},
		{a{Verb: "create", Resource: "serviceaccounts", Subresource: "token", Namespace: "ns", Name: "sa2"}, false},
		{a{Verb: "create", Resource: "serviceaccounts", Subresource: "token", Namespace: "ns"}, false},
		{a{Verb: "list", Resource: "pods", FieldSelectorRequirements: on("n1")}, true},
		{a{Verb: "list", Resource: "pods", FieldSelectorRequirements: on("n2")}, false},
		{a{Verb: "watch", Resource: "pods"}, false},
		{a{Verb: "watch", Resource: "pods", Namespace: "ns", Name: "mine"}, true},
		{a{Verb: "get", Resource: "pods", Namespace: "ns", Name: "theirs"}, false},
		{a{Verb: "deletecollection", Resource: "pods", Namespace: "ns"}, false},
		{a{Verb: "create", Resource: "pods", Subresource: "exec", Namespace: "ns", Name: "mine"}, false},
		{a{Verb: "get", Resource: "nodes", Name: "n1"}, true},
		{a{Verb: "get", Resource: "nodes", Name: "n2"}, false},
		{a{Verb: "list", Resource: "nodes"}, false},
		{a{Verb: "delete", Resource: "nodes", Name: "n1"}, false},
		{a{Verb: "patch", Resource: "nodes", Subresource: "status", Name: "n1"}, true},
		{a{Verb: "get", APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: "kube-node-lease", Name: "n1"}, true},
		{a{Verb: "update", APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: "kube-node-lease", Name: "n2"}, false},
		{a{Verb: "list", APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: "kube-node-lease"}, false},
		{a{Verb: "update", APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: "kube-system", Name: "n1"}, false},
		{a{Verb: "get", APIGroup: "storage.k8s.io", Resource: "csinodes", Name: "n1"}, true},
		{a{Verb: "get", APIGroup: "storage.k8s.io", Resource: "csinodes", Subresource: "status", Name: "n1"}, false},
		{a{Verb: "get", APIGroup: "storage.k8s.io", Resource: "volumeattachments", Name: "x"}, false},
		{a{Verb: "get", Resource: "persistentvolumes", Name: "x"}, false},
		{a{Verb: "create", APIGroup: "resource.k8s.io", Resource: "resourceslices"}, true},
		{a{Verb: "deletecollection", APIGroup: "resource.k8s.io", Resource: "resourceslices", FieldSelectorRequirements: on("n1")}, true},
		{a{Verb: "get", APIGroup: "resource.k8s.io", Resource: "resourceslices", Name: "x"}, false},
		{a{Verb: "list", APIGroup: "certificates.k8s.io", Resource: "podcertificaterequests", FieldSelectorRequirements: on("n1")}, true},
		{a{Verb: "update", APIGroup: "certificates.k8s.io", Resource: "podcertificaterequests", Subresource: "status", Namespace: "ns", Name: "x"}, false},
		{a{Verb: "list", Resource: "services"}, true},
		{a{Verb: "create", APIGroup: "certificates.k8s.io", Resource: "certificatesigningrequests"}, true},
		{a{Verb: "update", APIGroup: "certificates.k8s.io", Resource: "certificatesigningrequests", Subresource: "approval", Name: "x"}, false},
		{a{Verb: "create", APIGroup: "certificates.k8s.io", Resource: "certificatesigningrequests", Subresource: "nodeclient"}, false},
	} {
		c.a.ResourceRequest = true
		for name, who := range map[string]user.Info{
			"system:node:n1": nodeUser("system:node:n1"),
			// None of these is node n1.
			"n1":            nodeUser("n1"),
			"system:node:":  nodeUser("system:node:"),
			"System:node":   nodeUser("System:node:n1"),
			"not in group":  &user.DefaultInfo{Name: "system:node:n1", Groups: []string{"system:authenticated"}},
			"nobody at all": nil,
		} {
			c.a.User = who
			want := authorizer.DecisionNoOpinion
			if c.allowed && name == "system:node:n1" {
				want = authorizer.DecisionAllow
			}
			if got, reason, err := z.Authorize(t.Context(), c.a); got != want || err != nil {
				t.Errorf("%s: %s %s/%s/%s %s/%s: %v (%s, %v), want %v", name, c.a.Verb, c.a.APIGroup, c.a.Resource, c.a.Subresource,
					c.a.Namespace, c.a.Name, got, reason, err, want)
			}
		}
	}
}

func BenchmarkAuthorize(b *testing.B) {
	z := newAuthorizer(b)
	s := store{z.Graph}
	for i := range 50_000 {
		if err := s.Add(pod("ns", fmt.Sprintf("p%d", i), fmt.Sprintf("n%d", i%500), secretVolume("pull"), secretVolume(fmt.Sprintf("s%d", i)))); err != nil {
			b.Fatal(err)
		}
	}
	who := nodeUser("system:node:n7")
	for b.Loop() {
		z.Authorize(b.Context(), authorizer.AttributesRecord{User: who, Verb: "get", Resource: "secrets", Namespace: "ns", Name: "pull", ResourceRequest: true})
	}
}

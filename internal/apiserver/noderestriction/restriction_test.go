package noderestriction

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/authz/nodes"
)

// stored are objects that can be read by namespace and name.
type stored struct {
	nodes.Source
	objects map[string]runtime.Object
}

func (s stored) Get(ctx context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	if obj := s.objects[request.NamespaceValue(ctx)+"/"+name]; obj != nil {
		return obj, nil
	}
	return nil, apierrors.NewNotFound(corev1.Resource("things"), name)
}

// List gives the Nodes; nothing else is listed.
func (s stored) List(context.Context, *metainternalversion.ListOptions) (runtime.Object, error) {
	list := &corev1.NodeList{}
	for _, obj := range s.objects {
		if node, ok := obj.(*corev1.Node); ok {
			list.Items = append(list.Items, *node)
		}
	}
	return list, nil
}

// audienceOnly allows nodes tokens for one audience.
type audienceOnly struct{}

func (audienceOnly) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetVerb() == "request-serviceaccounts-podcertificate-signer" && a.GetResource() == "example.com:granted" && a.GetName() == "sa" && a.GetNamespace() == "ns" {
		return authorizer.DecisionAllow, "", nil
	}
	if a.GetVerb() == "request-serviceaccounts-token-audience" && a.GetResource() == "granted" && a.GetName() == "sa" && a.GetNamespace() == "ns" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func podOn(node, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "uid-pod", Labels: map[string]string{"app": "x"}},
		Spec: corev1.PodSpec{NodeName: node, ServiceAccountName: "sa", Volumes: []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{
			Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "vault", Audience: "vault"}},
				{PodCertificate: &corev1.PodCertificateProjection{SignerName: "example.com/signer"}},
			}}}}}},
	}
}

func plugin() *Restriction {
	r := New(audienceOnly{})
	r.Pods = stored{objects: map[string]runtime.Object{"ns/mine": podOn("n1", "mine"), "ns/theirs": podOn("n2", "theirs"), "ns/pending": podOn("", "pending")}}
	r.Nodes = stored{objects: map[string]runtime.Object{
		"/n1": &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-n1"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}}},
		"/n2": &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2", UID: "uid-n2"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.2.0/24", "fd00:244:2::/64"}}},
	}}
	r.Accounts = stored{objects: map[string]runtime.Object{"ns/sa": &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "sa", UID: "uid-sa"}}}}
	return r
}

// write is a request of a node.
type write struct {
	op            admission.Operation
	resource, sub string
	namespace     string
	name          string
	obj, old      runtime.Object
	allowed       bool
	notFound      bool
	who           *user.DefaultInfo
}

var groups = map[string]string{"leases": "coordination.k8s.io", "csinodes": "storage.k8s.io", "certificatesigningrequests": "certificates.k8s.io", "podcertificaterequests": "certificates.k8s.io"}

func (w write) check(t *testing.T) {
	t.Helper()
	if w.who == nil {
		w.who = &user.DefaultInfo{Name: "system:node:n1", Groups: []string{"system:nodes"}}
	}
	a := admission.NewAttributesRecord(w.obj, w.old, schema.GroupVersionKind{}, w.namespace, w.name,
		schema.GroupVersionResource{Group: groups[w.resource], Version: "v1", Resource: w.resource}, w.sub, w.op, nil, false, w.who)
	err := plugin().Admit(t.Context(), a, nil)
	switch {
	case w.allowed && err != nil:
		t.Errorf("refused: %v", err)
	case !w.allowed && !w.notFound && !apierrors.IsForbidden(err):
		t.Errorf("not forbidden but %v", err)
	case w.notFound && !apierrors.IsNotFound(err):
		t.Errorf("not missing but %v", err)
	}
}

func TestNode(t *testing.T) {
	node := func(name string, change func(*corev1.Node)) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if change != nil {
			change(n)
		}
		return n
	}
	cidrs := func(texts ...string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.PodCIDRs = texts }
	}
	label := func(key string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Labels = map[string]string{key: "x"} }
	}
	for name, w := range map[string]write{
		"create its own":     {op: admission.Create, obj: node("n1", nil), name: "n1", allowed: true},
		"create another":     {op: admission.Create, obj: node("n2", nil), name: "n2"},
		"create by a prefix": {op: admission.Create, obj: node("", func(n *corev1.Node) { n.GenerateName = "n1" })},
		"create with taints": {op: admission.Create, name: "n1", allowed: true, obj: node("n1", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "a"}} })},
		"create with a configuration": {op: admission.Create, name: "n1", obj: node("n1", func(n *corev1.Node) {
			n.Spec.ConfigSource = &corev1.NodeConfigSource{}
		})},
		"update another":        {op: admission.Update, name: "n2", obj: node("n2", nil), old: node("n2", nil)},
		"update another status": {op: admission.Update, sub: "status", name: "n2", obj: node("n2", nil), old: node("n2", nil)},
		"delete another":        {op: admission.Delete, name: "n2"},
		"report":                {op: admission.Update, sub: "status", name: "n1", obj: node("n1", nil), old: node("n1", nil), allowed: true},
		"cordon itself": {op: admission.Update, name: "n1", old: node("n1", nil), allowed: true,
			obj: node("n1", func(n *corev1.Node) { n.Spec.Unschedulable = true })},
		"remove its taints": {op: admission.Update, name: "n1", obj: node("n1", nil), old: node("n1", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "a"}} })},
		"get an owner": {op: admission.Update, name: "n1", old: node("n1", nil), obj: node("n1", func(n *corev1.Node) {
			n.OwnerReferences = []metav1.OwnerReference{{Name: "x"}}
		})},
		"forget its configuration": {op: admission.Update, name: "n1", obj: node("n1", nil), allowed: true,
			old: node("n1", func(n *corev1.Node) { n.Spec.ConfigSource = &corev1.NodeConfigSource{} })},
		"Pod addresses":                    {op: admission.Create, name: "n1", obj: node("n1", cidrs("10.244.1.0/24", "fd00:244:1::/64")), allowed: true},
		"Pod addresses later":              {op: admission.Update, name: "n1", old: node("n1", nil), obj: node("n1", cidrs("10.244.3.0/24")), allowed: true},
		"another's":                        {op: admission.Create, name: "n1", obj: node("n1", cidrs("10.244.2.0/24"))},
		"another's later":                  {op: admission.Update, name: "n1", old: node("n1", nil), obj: node("n1", cidrs("10.244.2.0/24"))},
		"a part of another's":              {op: admission.Create, name: "n1", obj: node("n1", cidrs("10.244.1.0/24", "fd00:244:2::8000/113"))},
		"more than another's":              {op: admission.Create, name: "n1", obj: node("n1", cidrs("10.244.0.0/16"))},
		"another's, since long ago":        {op: admission.Update, name: "n1", old: node("n1", cidrs("10.244.2.0/24")), obj: node("n1", cidrs("10.244.2.0/24")), allowed: true},
		"another's in what is not written": {op: admission.Update, sub: "status", name: "n1", old: node("n1", nil), obj: node("n1", cidrs("10.244.2.0/24")), allowed: true},
		"nobody's node":                    {op: admission.Create, obj: node("", nil), who: &user.DefaultInfo{Name: "system:node:", Groups: []string{"system:nodes"}}},
		"no node at all":                   {op: admission.Create, obj: node("n2", nil), name: "n2", allowed: true, who: &user.DefaultInfo{Name: "ann", Groups: []string{"system:nodes"}}},
	} {
		t.Run(name, func(t *testing.T) {
			w.resource = "nodes"
			w.check(t)
		})
	}
	for key, allowed := range map[string]bool{
		"mine": true, "example.com/mine": true, "kubernetes.io/hostname": true, "topology.kubernetes.io/zone": true,
		"node.kubernetes.io/instance-type": true, "beta.kubernetes.io/arch": true, "kubelet.kubernetes.io/any": true,
		"a.node.kubernetes.io/any": true, "node-restriction.kubernetes.io/x": false, "a.node-restriction.kubernetes.io/x": false,
		"node-role.kubernetes.io/control-plane": false, "kubernetes.io/any": false, "x.k8s.io/any": false, "k8s.io/any": false,
		"notk8s.io/any": true, "kubernetes.io": true,
	} {
		t.Run("label "+key, func(t *testing.T) {
			with, without := node("n1", label(key)), node("n1", nil)
			other := node("n1", func(n *corev1.Node) { n.Labels = map[string]string{key: "y"} })
			write{op: admission.Create, resource: "nodes", name: "n1", obj: with, allowed: allowed}.check(t)
			write{op: admission.Update, resource: "nodes", name: "n1", obj: with, old: without, allowed: allowed}.check(t)
			write{op: admission.Update, resource: "nodes", name: "n1", obj: without, old: with, allowed: allowed}.check(t)
			write{op: admission.Update, resource: "nodes", name: "n1", obj: other, old: with, allowed: allowed}.check(t)
			write{op: admission.Update, resource: "nodes", name: "n1", obj: with, old: with.DeepCopy(), allowed: true}.check(t)
		})
	}
}

func mirrorPod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "static", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n1", UID: "uid-n1", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "c"}}},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func TestMirrorPods(t *testing.T) {
	volume := func(source corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
	}
	for name, c := range map[string]struct {
		change  func(*corev1.Pod)
		allowed bool
	}{
		"fine":                {func(*corev1.Pod) {}, true},
		"no mirror":           {func(p *corev1.Pod) { p.Annotations = nil }, false},
		"on another node":     {func(p *corev1.Pod) { p.Spec.NodeName = "n2" }, false},
		"on no node":          {func(p *corev1.Pod) { p.Spec.NodeName = "" }, false},
		"without an owner":    {func(p *corev1.Pod) { p.OwnerReferences = nil }, false},
		"with two owners":     {func(p *corev1.Pod) { p.OwnerReferences = append(p.OwnerReferences, p.OwnerReferences[0]) }, false},
		"another's":           {func(p *corev1.Pod) { p.OwnerReferences[0].Name = "n2" }, false},
		"a Pod's":             {func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "Pod" }, false},
		"another life's":      {func(p *corev1.Pod) { p.OwnerReferences[0].UID = "old" }, false},
		"not controlled":      {func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }, false},
		"blocking":            {func(p *corev1.Pod) { p.OwnerReferences[0].BlockOwnerDeletion = new(true) }, false},
		"with an account":     {func(p *corev1.Pod) { p.Spec.ServiceAccountName = "sa" }, false},
		"with a pull secret":  {func(p *corev1.Pod) { p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}} }, false},
		"with claims":         {func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c"}} }, false},
		"with a host path":    {volume(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}), true},
		"with an empty dir":   {volume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}), true},
		"with a secret":       {volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s"}}), false},
		"with a nameless one": {volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{}}), false},
		"with CSI":            {volume(corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{}}), false},
		"with glusterfs":      {volume(corev1.VolumeSource{Glusterfs: &corev1.GlusterfsVolumeSource{}}), false},
		"with a claim":        {volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{}}), false},
		"with its own fields": {volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{DownwardAPI: &corev1.DownwardAPIProjection{}}}}}), true},
		"with a token": {volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}}}), false},
		"with a trust bundle": {volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{}}}}}), false},
	} {
		t.Run(name, func(t *testing.T) {
			write{op: admission.Create, resource: "pods", namespace: "ns", name: "static", obj: mirrorPod(c.change), allowed: c.allowed}.check(t)
		})
	}
}

func TestPods(t *testing.T) {
	changed := func(f func(*corev1.Pod)) *corev1.Pod {
		p := podOn("n1", "mine")
		f(p)
		return p
	}
	for name, w := range map[string]write{
		"delete its own":   {op: admission.Delete, name: "mine", allowed: true},
		"delete another's": {op: admission.Delete, name: "theirs"},
		"delete pending":   {op: admission.Delete, name: "pending"},
		"delete nothing":   {op: admission.Delete, name: "none", notFound: true},
		"evict its own":    {op: admission.Create, sub: "eviction", name: "mine", allowed: true},
		"evict another's":  {op: admission.Create, sub: "eviction", name: "theirs"},
		"bind":             {op: admission.Create, sub: "binding", name: "mine"},
		"update":           {op: admission.Update, name: "mine", obj: podOn("n1", "mine"), old: podOn("n1", "mine")},
		"report":           {op: admission.Update, sub: "status", name: "mine", obj: podOn("n1", "mine"), old: podOn("n1", "mine"), allowed: true},
		"report another's": {op: admission.Update, sub: "status", name: "theirs", obj: podOn("n1", "theirs"), old: podOn("n2", "theirs")},
		"label by report": {op: admission.Update, sub: "status", name: "mine", old: podOn("n1", "mine"), obj: changed(func(p *corev1.Pod) {
			p.Labels["app"] = "other"
		})},
		"claim by report": {op: admission.Update, sub: "status", name: "mine", old: podOn("n1", "mine"), obj: changed(func(p *corev1.Pod) {
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "x"}}
		})},
	} {
		t.Run(name, func(t *testing.T) {
			w.resource, w.namespace = "pods", "ns"
			w.check(t)
		})
	}
}

func TestLeases(t *testing.T) {
	lease := func(name string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	for name, w := range map[string]write{
		"create":           {op: admission.Create, namespace: "kube-node-lease", obj: lease("n1"), allowed: true},
		"create another's": {op: admission.Create, namespace: "kube-node-lease", obj: lease("n2")},
		"create elsewhere": {op: admission.Create, namespace: "kube-system", obj: lease("n1")},
		"renew":            {op: admission.Update, namespace: "kube-node-lease", name: "n1", obj: lease("n1"), old: lease("n1"), allowed: true},
		"renew another's":  {op: admission.Update, namespace: "kube-node-lease", name: "n2", obj: lease("n2"), old: lease("n2")},
		"delete another's": {op: admission.Delete, namespace: "kube-node-lease", name: "n2"},
	} {
		t.Run(name, func(t *testing.T) {
			w.resource = "leases"
			w.check(t)
		})
	}
}

func TestCSINodes(t *testing.T) {
	node := func(name string) *storagev1.CSINode {
		return &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	for name, w := range map[string]write{
		"create":           {op: admission.Create, obj: node("n1"), allowed: true},
		"create another's": {op: admission.Create, obj: node("n2")},
		"update":           {op: admission.Update, name: "n1", obj: node("n1"), old: node("n1"), allowed: true},
		"update another's": {op: admission.Update, name: "n2", obj: node("n2"), old: node("n2")},
		"status":           {op: admission.Update, sub: "status", name: "n1", obj: node("n1"), old: node("n1")},
		"delete another's": {op: admission.Delete, name: "n2"},
	} {
		t.Run(name, func(t *testing.T) {
			w.resource = "csinodes"
			w.check(t)
		})
	}
}

func TestTokens(t *testing.T) {
	bound := func(pod string, change ...func(*authenticationv1.TokenRequest)) *authenticationv1.TokenRequest {
		r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod, UID: "uid-pod"},
		}}
		for _, f := range change {
			f(r)
		}
		return r
	}
	audiences := func(list ...string) func(*authenticationv1.TokenRequest) {
		return func(r *authenticationv1.TokenRequest) { r.Spec.Audiences = list }
	}
	for name, w := range map[string]write{
		"for its Pod":          {obj: bound("mine"), allowed: true},
		"for another's Pod":    {obj: bound("theirs")},
		"for no Pod":           {obj: bound("none"), notFound: true},
		"for nothing":          {obj: &authenticationv1.TokenRequest{}},
		"without a uid":        {obj: bound("mine", func(r *authenticationv1.TokenRequest) { r.Spec.BoundObjectRef.UID = "" })},
		"for another life":     {obj: bound("mine", func(r *authenticationv1.TokenRequest) { r.Spec.BoundObjectRef.UID = "old" })},
		"for a Secret":         {obj: bound("mine", func(r *authenticationv1.TokenRequest) { r.Spec.BoundObjectRef.Kind = "Secret" })},
		"for a Node":           {obj: bound("mine", func(r *authenticationv1.TokenRequest) { r.Spec.BoundObjectRef.Kind = "Node" })},
		"a volume's audience":  {obj: bound("mine", audiences("vault")), allowed: true},
		"another audience":     {obj: bound("mine", audiences("bank"))},
		"a granted audience":   {obj: bound("mine", audiences("granted")), allowed: true},
		"two audiences":        {obj: bound("mine", audiences("vault", "granted"))},
		"something else":       {obj: &corev1.Pod{}},
		"another subresource":  {sub: "x", obj: &corev1.Pod{}, allowed: true},
		"an update of a token": {op: admission.Update, obj: bound("theirs"), allowed: true},
	} {
		t.Run(name, func(t *testing.T) {
			w.resource, w.namespace, w.name = "serviceaccounts", "ns", "sa"
			if w.sub == "" {
				w.sub = "token"
			}
			if w.op == "" {
				w.op = admission.Create
			}
			w.check(t)
		})
	}
}

func TestCertificates(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	asked := func(signer, name string, groups ...string) *certificatesv1.CertificateSigningRequest {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: groups}}, key)
		if err != nil {
			t.Fatal(err)
		}
		return &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: signer, Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
		}}
	}
	client, serving := certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.KubeletServingSignerName
	nonsense := asked(client, "x")
	nonsense.Spec.Request = []byte("x")
	for name, w := range map[string]write{
		"its own":            {obj: asked(client, "system:node:n1"), allowed: true},
		"its own to serve":   {obj: asked(serving, "system:node:n1"), allowed: true},
		"another's":          {obj: asked(client, "system:node:n2")},
		"another's to serve": {obj: asked(serving, "system:node:n2")},
		"an administrator's": {obj: asked(client, "admin")},
		"of another signer":  {obj: asked("example.com/x", "any"), allowed: true},
		"nonsense":           {obj: nonsense},

		"its machine's proxy":     {obj: asked("portal.dev/component-client", "system:portal:proxy:n1", "system:portal:proxies"), allowed: true},
		"its machine's DNS":       {obj: asked("portal.dev/component-client", "system:portal:dns:n1", "system:portal:dns"), allowed: true},
		"another machine's proxy": {obj: asked("portal.dev/component-client", "system:portal:proxy:n2", "system:portal:proxies")},
		"a proxy of more groups":  {obj: asked("portal.dev/component-client", "system:portal:proxy:n1", "system:portal:proxies", "system:masters")},
		"no part's name":          {obj: asked("portal.dev/component-client", "system:portal:controllers", "system:portal:proxies")},
	} {
		t.Run(name, func(t *testing.T) {
			w.op, w.resource = admission.Create, "certificatesigningrequests"
			w.check(t)
		})
	}
}

// A node gets certificates for its Pods only, from signers that they name.
func TestPodCertificates(t *testing.T) {
	type spec = certificatesv1.PodCertificateRequestSpec
	asked := func(change func(*spec)) *certificatesv1.PodCertificateRequest {
		r := &certificatesv1.PodCertificateRequest{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "r"}, Spec: spec{
			SignerName: "example.com/signer", PodName: "mine", PodUID: "uid-pod", ServiceAccountName: "sa", ServiceAccountUID: "uid-sa",
			NodeName: "n1", NodeUID: "uid-n1",
		}}
		change(&r.Spec)
		return r
	}
	for name, c := range map[string]struct {
		change            func(*spec)
		allowed, notFound bool
	}{
		"of its Pod":            {func(*spec) {}, true, false},
		"from a granted signer": {func(s *spec) { s.SignerName = "example.com/granted" }, true, false},
		"from another signer":   {func(s *spec) { s.SignerName = "example.com/other" }, false, false},
		"for another node":      {func(s *spec) { s.NodeName = "n2" }, false, false},
		"for a former node":     {func(s *spec) { s.NodeUID = "old" }, false, false},
		"of another's Pod":      {func(s *spec) { s.PodName = "theirs" }, false, false},
		"of a pending Pod":      {func(s *spec) { s.PodName = "pending" }, false, false},
		"of no Pod":             {func(s *spec) { s.PodName = "gone" }, false, true},
		"of a former Pod":       {func(s *spec) { s.PodUID = "old" }, false, false},
		"with another account":  {func(s *spec) { s.ServiceAccountName = "admin" }, false, false},
		"with a former account": {func(s *spec) { s.ServiceAccountUID = "old" }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			write{op: admission.Create, resource: "podcertificaterequests", namespace: "ns", name: "r", obj: asked(c.change), allowed: c.allowed, notFound: c.notFound}.check(t)
		})
	}
	fine := asked(func(*spec) {})
	write{op: admission.Update, resource: "podcertificaterequests", sub: "status", namespace: "ns", name: "r", obj: fine, old: fine}.check(t)
}

// TestBalancer: a machine's balancer writes its own Lease, the leader's and the claims, and nobody else's.
func TestBalancer(t *testing.T) {
	leases, configMaps := schema.GroupVersionResource{Group: coordinationv1.GroupName, Version: "v1", Resource: "leases"}, corev1.SchemeGroupVersion.WithResource("configmaps")
	for _, c := range []struct {
		user, namespace, name string
		resource              schema.GroupVersionResource
		allowed               bool
	}{
		{"system:portal:lb:m1", "kube-system", "portal-lb", leases, true},
		{"system:portal:lb:m1", "kube-system", "portal-lb-m1", leases, true},
		{"system:portal:lb:m1", "kube-system", "portal-lb.0123456789abcdef", leases, true},
		{"system:portal:lb:m1", "kube-system", "portal-lb.m2", leases, false},
		{"system:portal:lb:m1", "kube-system", "portal-lb-m2", leases, false},
		{"system:portal:lb:m1", "kube-system", "portal-controllers", leases, false},
		{"system:portal:lb:m1", "kube-node-lease", "portal-lb", leases, false},
		{"system:portal:lb:m1", "kube-system", "portal-lb-claims", configMaps, true},
		{"system:portal:lb:m1", "kube-system", "portal-lb", configMaps, false},
		{"system:portal:lb:m1", "kube-system", "coredns", configMaps, false},
		{"somebody", "kube-system", "portal-lb", leases, false},
	} {
		for _, operation := range []admission.Operation{admission.Create, admission.Update} {
			object := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: c.name}}
			who := &user.DefaultInfo{Name: c.user, Groups: []string{"system:portal:lb", "system:authenticated"}}
			a := admission.NewAttributesRecord(object, nil, schema.GroupVersionKind{}, c.namespace, c.name, c.resource, "", operation, nil, false, who)
			if err := New(audienceOnly{}).Admit(t.Context(), a, nil); (err == nil) != c.allowed {
				t.Errorf("%s: %s %s %s/%s: %v", c.user, operation, c.resource.Resource, c.namespace, c.name, err)
			}
		}
	}
	// Others are none of its business.
	a := admission.NewAttributesRecord(nil, nil, schema.GroupVersionKind{}, "kube-system", "x", leases, "", admission.Delete, nil, false, &user.DefaultInfo{Name: "somebody"})
	if err := New(audienceOnly{}).Admit(t.Context(), a, nil); err != nil {
		t.Error(err)
	}
}

// TestBalancerOfServices: of a Service, a balancer writes the addresses and its own finalizer.
func TestBalancerOfServices(t *testing.T) {
	for what, c := range map[string]struct {
		change  func(*corev1.Service)
		allowed bool
	}{
		"an address": {func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}, {IP: "2001:db8::1"}}
			s.Finalizers = append(s.Finalizers, "service.kubernetes.io/load-balancer-cleanup")
		}, true},
		"no address": {func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = nil }, true},
		"loopback": {func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "127.0.0.1"}}
		}, false},
		"a name": {func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "example.org"}}
		}, false},
		"another finalizer": {func(s *corev1.Service) { s.Finalizers = nil }, false},
		"a label":           {func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} }, false},
		"an owner": {func(s *corev1.Service) {
			s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "none", UID: "1"}}
		}, false},
		"a condition": {func(s *corev1.Service) { s.Status.Conditions = []metav1.Condition{{Type: "a"}} }, false},
	} {
		before := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", Finalizers: []string{"example.org/mine"}}}
		now := before.DeepCopy()
		c.change(now)
		who := &user.DefaultInfo{Name: "system:portal:lb:m1", Groups: []string{"system:portal:lb", "system:authenticated"}}
		a := admission.NewAttributesRecord(now, before, schema.GroupVersionKind{}, "ns", "web", corev1.SchemeGroupVersion.WithResource("services"), "status", admission.Update, nil, false, who)
		if err := New(audienceOnly{}).Admit(t.Context(), a, nil); (err == nil) != c.allowed {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestBalancerOfIngresses: a balancer makes the Service whose addresses Ingresses share, and writes these into their status.
func TestBalancerOfIngresses(t *testing.T) {
	who := &user.DefaultInfo{Name: "system:portal:lb:m1", Groups: []string{"system:portal:lb", "system:authenticated"}}
	for what, c := range map[string]struct {
		change  func(*corev1.Service)
		allowed bool
	}{
		"the entry":         {func(*corev1.Service) {}, true},
		"another name":      {func(s *corev1.Service) { s.Name = "kube-dns" }, false},
		"another namespace": {func(s *corev1.Service) { s.Namespace = "default" }, false},
		"another type":      {func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }, false},
		"a selector":        {func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a": "b"} }, false},
		"external IPs":      {func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} }, false},
	} {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "portal-ingress"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
		c.change(svc)
		a := admission.NewAttributesRecord(svc, nil, schema.GroupVersionKind{}, svc.Namespace, svc.Name, corev1.SchemeGroupVersion.WithResource("services"), "", admission.Create, nil, false, who)
		if err := New(audienceOnly{}).Admit(t.Context(), a, nil); (err == nil) != c.allowed {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, c := range map[string]struct {
		change  func(*networkingv1.Ingress)
		allowed bool
	}{
		"an address": {func(i *networkingv1.Ingress) {
			i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{IP: "192.0.2.1"}}
		}, true},
		"a name": {func(i *networkingv1.Ingress) {
			i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{Hostname: "example.org"}}
		}, false},
		"a label": {func(i *networkingv1.Ingress) { i.Labels = map[string]string{"a": "b"} }, false},
	} {
		before := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "site"}}
		now := before.DeepCopy()
		c.change(now)
		a := admission.NewAttributesRecord(now, before, schema.GroupVersionKind{}, "ns", "site", networkingv1.SchemeGroupVersion.WithResource("ingresses"), "status", admission.Update, nil, false, who)
		if err := New(audienceOnly{}).Admit(t.Context(), a, nil); (err == nil) != c.allowed {
			t.Errorf("%s: %v", what, err)
		}
	}
}

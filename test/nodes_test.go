package test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

const (
	bootstrapToken = "bootstrap-secret"
	malloryToken   = "mallory-secret"
	nodeClient     = certificatesv1.KubeAPIServerClientKubeletSignerName
)

var nodeUsages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}

// nodeCluster is a server at which nodes can join: those with the bootstrap token get a node's certificate, nodes renew their own,
// and mallory may ask for certificates and nothing else.
func nodeCluster(t *testing.T) (*harness.API, *kubernetes.Clientset) {
	t.Helper()
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	text := bootstrapToken + ",bootstrapper,1,\"system:bootstrappers\"\n" + malloryToken + ",mallory,2,\"devs\"\n"
	if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--token-auth-file", tokens)
	client := connect(t, api.Kubeconfig)
	const nodeclient = "system:certificates.k8s.io:certificatesigningrequests:nodeclient"
	const selfnodeclient = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"
	for _, b := range []struct{ role, kind, who string }{
		{"system:node-bootstrapper", "Group", "system:bootstrappers"}, {nodeclient, "Group", "system:bootstrappers"},
		{selfnodeclient, "Group", "system:nodes"}, {"system:node-bootstrapper", "User", "mallory"},
	} {
		_, err := client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: b.role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: b.kind, Name: b.who}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	return api, client
}

// asked is a request for a certificate, and the key that it is for.
func asked(t testing.TB, signer string, usages []certificatesv1.KeyUsage, template *x509.CertificateRequest) (*certificatesv1.CertificateSigningRequest, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		TypeMeta:   metav1.TypeMeta{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest"},
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: signer, Usages: usages,
		},
	}, key
}

func nodeTemplate(name string) *x509.CertificateRequest {
	return &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}}
}

const csrs = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// request creates a certificate request and returns its name, or the code of the refusal.
func (c *caller) request(t testing.TB, r *certificatesv1.CertificateSigningRequest) (name string, code int) {
	t.Helper()
	body, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	code, answer := c.ask(t, "POST", csrs, string(body))
	var made certificatesv1.CertificateSigningRequest
	if code == 201 {
		if err := json.Unmarshal([]byte(answer), &made); err != nil {
			t.Fatal(err)
		}
	}
	return made.Name, code
}

// issued waits for the certificate of a request.
func issued(t testing.TB, client kubernetes.Interface, name string) []byte {
	t.Helper()
	var last *certificatesv1.CertificateSigningRequest
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		r, err := client.CertificatesV1().CertificateSigningRequests().Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if last = r; len(r.Status.Certificate) > 0 {
			return r.Status.Certificate
		}
	}
	t.Fatalf("no certificate for %s: %v", name, last.Status)
	return nil
}

// bootstrap has a node get its certificate, as a kubelet does, and returns a caller with it.
func bootstrap(t *testing.T, api *harness.API, client kubernetes.Interface, node string) *caller {
	t.Helper()
	r, key := asked(t, nodeClient, nodeUsages, nodeTemplate(node))
	name, code := somebody(api, bootstrapToken).request(t, r)
	if code != 201 {
		t.Fatalf("the bootstrapper's request for %s: %d", node, code)
	}
	cert, _ := pem.Decode(issued(t, client, name))
	pair := tls.Certificate{Certificate: [][]byte{cert.Bytes}, PrivateKey: key}
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}} //nolint:gosec // loopback
	return &caller{url: api.URL, client: &http.Client{Transport: transport}}
}

// nodeWorld are the objects of two nodes: in namespace a, the Pod of each refers to a Secret, a ConfigMap and a ServiceAccount that
// are called like the node.
func nodeWorld(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	ctx, create := t.Context(), metav1.CreateOptions{}
	for _, ns := range []string{"a", "b"} {
		_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, create)
		must(err)
	}
	for _, node := range []string{"n1", "n2"} {
		named := metav1.ObjectMeta{Name: node, Namespace: "a"}
		_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, create)
		must(err)
		_, err = client.CoreV1().Secrets("a").Create(ctx, &corev1.Secret{ObjectMeta: named}, create)
		must(err)
		_, err = client.CoreV1().ConfigMaps("a").Create(ctx, &corev1.ConfigMap{ObjectMeta: named}, create)
		must(err)
		_, err = client.CoreV1().ServiceAccounts("a").Create(ctx, &corev1.ServiceAccount{ObjectMeta: named}, create)
		must(err)
		_, err = client.CoreV1().Pods("a").Create(ctx, &corev1.Pod{ObjectMeta: named, Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: node, AutomountServiceAccountToken: new(false), TerminationGracePeriodSeconds: new(int64(0)),
			Containers: []corev1.Container{{Name: "c", Image: "x"}},
			Volumes: []corev1.Volume{
				{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: node}}},
				{Name: "c", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: node}}}},
			},
		}}, create)
		must(err)
	}
}

// attempt is a request and the code of its answer.
type attempt struct {
	method, path, body string
	code               int
}

// TestNodeAccess: a node's certificate reaches what a kubelet needs, and is refused everything else that the API has.
func TestNodeAccess(t *testing.T) {
	t.Parallel()
	api, client := nodeCluster(t)
	nodeWorld(t, client)
	n1 := bootstrap(t, api, client, "n1")
	uid := func(node string) string {
		n, err := client.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return string(n.UID)
	}
	// The authorizer learns of Pods by watching.
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if code, answer := n1.ask(t, "GET", "/api/v1/namespaces/a/secrets/n1", ""); code == 200 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("the node's own Secret: %d %s", code, answer)
		}
	}
	for _, a := range needs(t, uid("n1")) {
		code, answer, err := n1.try(a.method, a.path, kindOf(a.method), a.body)
		if err != nil || code != a.code {
			t.Errorf("a node needs %s %s: %d, want %d: %v %.300s", a.method, a.path, code, a.code, err, answer)
		}
	}
	refused := append(otherResources(t, client), othersObjects(t, uid("n1"))...)
	if len(refused) < 200 {
		t.Errorf("only %d things to refuse", len(refused))
	}
	t.Logf("%d things that are not a node's business", len(refused))
	for _, a := range refused {
		code, answer, err := n1.try(a.method, a.path, kindOf(a.method), a.body)
		if err != nil || code != 403 {
			t.Errorf("%s %s %s: %d %v %.300s", a.method, a.path, a.body, code, err, answer)
		}
	}
}

func kindOf(method string) string {
	if method == "PATCH" {
		return "application/merge-patch+json"
	}
	return "application/json"
}

const leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

// needs is what a kubelet does.
func needs(t *testing.T, uid string) []attempt {
	t.Helper()
	r, _ := asked(t, nodeClient, nodeUsages, nodeTemplate("n1"))
	serving := nodeTemplate("n1")
	serving.DNSNames = []string{"n1"}
	s, _ := asked(t, certificatesv1.KubeletServingSignerName, []certificatesv1.KeyUsage{"digital signature", "server auth"}, serving)
	text := func(obj any) string {
		data, err := json.Marshal(obj)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	return []attempt{
		{"GET", "/api/v1/nodes/n1", "", 200},
		{"GET", "/api/v1/nodes?fieldSelector=metadata.name%3Dn1", "", 200},
		{"PATCH", "/api/v1/nodes/n1", `{"metadata":{"labels":{"kubernetes.io/hostname":"n1","topology.kubernetes.io/zone":"z","mine":"x"}}}`, 200},
		{"PATCH", "/api/v1/nodes/n1/status", `{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`, 200},
		{"POST", leases, `{"metadata":{"name":"n1"},"spec":{"holderIdentity":"n1","leaseDurationSeconds":40}}`, 201},
		{"GET", leases + "/n1", "", 200},
		{"PATCH", leases + "/n1", `{"spec":{"leaseDurationSeconds":41}}`, 200},
		{"DELETE", leases + "/n1", "", 200},
		{"GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1", "", 200},
		{"GET", "/api/v1/namespaces/a/pods/n1", "", 200},
		{"PATCH", "/api/v1/namespaces/a/pods/n1/status", `{"status":{"phase":"Running"}}`, 200},
		{"GET", "/api/v1/namespaces/a/secrets/n1", "", 200},
		{"GET", "/api/v1/namespaces/a/secrets?fieldSelector=metadata.name%3Dn1", "", 200},
		{"GET", "/api/v1/namespaces/a/configmaps/n1", "", 200},
		{"GET", "/api/v1/namespaces/a/configmaps?fieldSelector=metadata.name%3Dn1", "", 200},
		{"GET", "/api/v1/namespaces/a/serviceaccounts/n1", "", 200},
		{"GET", "/api/v1/services", "", 200},
		{"GET", "/api/v1/namespaces/default/endpoints/kubernetes", "", 200},
		{"POST", "/api/v1/namespaces/a/events", `{"metadata":{"generateName":"e-"},"involvedObject":{"kind":"Pod","namespace":"a","name":"n1"},"reason":"X","type":"Normal"}`, 201},
		{"POST", "/apis/authentication.k8s.io/v1/tokenreviews", `{"spec":{"token":"x"}}`, 201},
		{"POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", `{"spec":{"user":"x","resourceAttributes":{"verb":"get","resource":"pods"}}}`, 201},
		{"POST", csrs, text(r), 201},
		{"POST", csrs, text(s), 201},
		{"GET", csrs, "", 200},
		{"POST", "/api/v1/namespaces/a/pods", mirrorPod("n1", uid, ""), 201},
		{"DELETE", "/api/v1/namespaces/a/pods/static?gracePeriodSeconds=0", "", 200},
		{"GET", "/healthz", "", 200},
		{"GET", "/api", "", 200},
	}
}

func mirrorPod(node, uid, spec string) string {
	return fmt.Sprintf(`{"metadata":{"name":"static","annotations":{"kubernetes.io/config.mirror":"x"},"ownerReferences":[
		{"apiVersion":"v1","kind":"Node","name":"n1","uid":%q,"controller":true}]},
		"spec":{"nodeName":%q,"automountServiceAccountToken":false,"containers":[{"name":"c","image":"x"}]%s}}`, uid, node, spec)
}

// allowedToNodes are what every node may do with a resource, whichever object it is: the rest is refused by its name, or needs to look
// at the object.
var allowedToNodes = map[string][]string{
	"nodereports": {"create"}, // of its own: see TestNodeReports
	"services":    {"get", "list", "watch"}, "endpoints": {"get"}, "nodes": {"create", "update", "patch"}, "nodes/status": {"update", "patch"},
	"pods": {"create", "delete"}, "pods/status": {"update", "patch"}, "pods/eviction": {"create"}, "events": {"create", "update", "patch"},
	"certificatesigningrequests": {"create", "get", "list", "watch"}, "leases": {"create"},
	"clustertrustbundles": {"get", "list", "watch"}, "runtimeclasses": {"get", "list", "watch"}, "csidrivers": {"get", "list", "watch"},
	"tokenreviews": {"create"}, "subjectaccessreviews": {"create"}, "localsubjectaccessreviews": {"create"},
	"selfsubjectaccessreviews": {"create"}, "selfsubjectrulesreviews": {"create"}, "selfsubjectreviews": {"create"},
}

// otherResources are all verbs on all resources that the API serves, but for those that every node may do.
func otherResources(t *testing.T, client kubernetes.Interface) (out []attempt) {
	t.Helper()
	lists, err := client.Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	_, all, err := client.Discovery().ServerGroupsAndResources()
	if err != nil {
		t.Fatal(err)
	}
	if len(lists) == 0 {
		t.Fatal("the API serves nothing")
	}
	for _, list := range all {
		root := "/apis/" + list.GroupVersion
		if !strings.Contains(list.GroupVersion, "/") {
			root = "/api/" + list.GroupVersion
		}
		for _, r := range list.APIResources {
			for _, verb := range r.Verbs {
				if slices.Contains(allowedToNodes[r.Name], verb) {
					continue
				}
				places := []string{root}
				if r.Namespaced {
					places = []string{root + "/namespaces/a", root + "/namespaces/kube-system"}
				}
				for _, place := range places {
					out = append(out, tryVerb(place, r.Name, verb))
				}
			}
		}
	}
	return out
}

func tryVerb(place, resource, verb string) attempt {
	name, sub, _ := strings.Cut(resource, "/")
	one := place + "/" + name + "/n2"
	if sub != "" {
		one += "/" + sub
	}
	switch verb {
	case "get":
		return attempt{method: "GET", path: one}
	case "list":
		return attempt{method: "GET", path: place + "/" + name}
	case "watch":
		return attempt{method: "GET", path: place + "/" + name + "?watch=1"}
	case "update":
		return attempt{method: "PUT", path: one, body: "{}"}
	case "patch":
		return attempt{method: "PATCH", path: one, body: "{}"}
	case "delete":
		return attempt{method: "DELETE", path: one}
	case "deletecollection":
		return attempt{method: "DELETE", path: place + "/" + name}
	}
	if sub != "" {
		return attempt{method: "POST", path: one, body: "{}"}
	}
	return attempt{method: "POST", path: place + "/" + name, body: "{}"}
}

// othersObjects are what a node may do with its own objects, tried with others', and what it may not change of its own.
func othersObjects(t *testing.T, uid string) []attempt {
	t.Helper()
	out := []attempt{
		{method: "GET", path: "/api/v1/nodes/n2"},
		{method: "GET", path: "/api/v1/nodes?fieldSelector=metadata.name%3Dn2"},
		{method: "GET", path: "/api/v1/pods?fieldSelector=spec.nodeName%3Dn2"},
		{method: "GET", path: "/api/v1/pods?fieldSelector=spec.nodeName%21%3Dn2"},
		{method: "GET", path: "/api/v1/pods?fieldSelector=status.phase%3DRunning"},
		{method: "GET", path: "/api/v1/namespaces/a/secrets?fieldSelector=metadata.name%3Dn2"},
		{method: "GET", path: "/api/v1/namespaces/a/secrets?fieldSelector=metadata.name%21%3Dn2"},
		{method: "GET", path: "/api/v1/namespaces/a/configmaps?watch=1&fieldSelector=metadata.name%3Dn2"},
		{method: "GET", path: "/api/v1/namespaces/b/secrets/n1"},
		{method: "POST", path: "/api/v1/nodes", body: `{"metadata":{"name":"n3"}}`},
		{method: "POST", path: "/api/v1/nodes", body: `{"metadata":{"generateName":"n1"}}`},
		{method: "PUT", path: "/api/v1/nodes/n2", body: `{"metadata":{"name":"n2"}}`},
		{method: "PATCH", path: "/api/v1/nodes/n2", body: `{"metadata":{"annotations":{"a":"b"}}}`},
		{method: "PATCH", path: "/api/v1/nodes/n2/status", body: `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`},
		{method: "DELETE", path: "/api/v1/nodes/n1"},
		{method: "PATCH", path: "/api/v1/nodes/n1", body: `{"spec":{"taints":[{"key":"a","effect":"NoSchedule"}]}}`},
		{method: "PATCH", path: "/api/v1/nodes/n1", body: `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"n2","uid":"x"}]}}`},
		{method: "PATCH", path: "/api/v1/namespaces/a/pods/n2/status", body: `{"status":{"phase":"Failed"}}`},
		{method: "PATCH", path: "/api/v1/namespaces/a/pods/n1/status", body: `{"metadata":{"labels":{"app":"web"}}}`},
		{method: "DELETE", path: "/api/v1/namespaces/a/pods/n2"},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n2", uid, "")},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n1", "other", "")},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: strings.ReplaceAll(mirrorPod("n1", uid, ""), "config.mirror", "config.other")},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n1", uid, `,"serviceAccountName":"n2"`)},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n1", uid, `,"imagePullSecrets":[{"name":"n2"}]`)},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n1", uid, `,"volumes":[{"name":"v","secret":{"secretName":"n2"}}]`)},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n1", uid, `,"volumes":[{"name":"v","configMap":{"name":"n2"}}]`)},
		{method: "POST", path: "/api/v1/namespaces/a/pods", body: mirrorPod("n1", uid, `,"volumes":[{"name":"v","projected":{"sources":[{"serviceAccountToken":{"path":"t"}}]}}]`)},
		{method: "POST", path: leases, body: `{"metadata":{"name":"n2"}}`},
		{method: "POST", path: leases, body: `{"metadata":{"generateName":"n1"}}`},
		{method: "POST", path: strings.ReplaceAll(leases, "kube-node-lease", "kube-system"), body: `{"metadata":{"name":"n1"}}`},
		{method: "GET", path: leases + "/n2"},
		{method: "GET", path: "/metrics"}, {method: "GET", path: "/debug/pprof/heap"}, {method: "GET", path: "/portal/v1/storage"},
		{method: "GET", path: "/portal/v1/certificates"}, {method: "POST", path: "/portal/v1/certificates?name=ca"},
	}
	for _, label := range []string{"node-restriction.kubernetes.io/x", "a.node-restriction.kubernetes.io/x", "node-role.kubernetes.io/control-plane", "kubernetes.io/x", "x.k8s.io/x"} {
		out = append(out, attempt{method: "PATCH", path: "/api/v1/nodes/n1", body: fmt.Sprintf(`{"metadata":{"labels":{%q:"y"}}}`, label)})
	}
	for _, name := range []string{"n2", "n1.", "N1", ""} {
		r, _ := asked(t, nodeClient, nodeUsages, nodeTemplate(name))
		body, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, attempt{method: "POST", path: csrs, body: string(body)})
	}
	return out
}

// certificatesOf reads the certificates of all requests, by the request's name.
func certificatesOf(t *testing.T, client kubernetes.Interface) (map[string]*x509.Certificate, []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	list, err := client.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*x509.Certificate{}
	for _, r := range list.Items {
		if block, _ := pem.Decode(r.Status.Certificate); block != nil {
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			out[r.Name] = cert
		}
	}
	return out, list.Items
}

// TestCertificateEscalation: hundreds of requests by a node, a bootstrapper and a user, for others' names, more groups, alternative
// names, other usages and signers. None of them gets more than a node's own identity, not even when somebody approves them all.
func TestCertificateEscalation(t *testing.T) {
	t.Parallel()
	api, client := nodeCluster(t)
	n1 := bootstrap(t, api, client, "n1")
	callers := map[string]*caller{"system:node:n1": n1, "bootstrapper": somebody(api, bootstrapToken), "mallory": somebody(api, malloryToken)}
	before, _ := certificatesOf(t, client)

	random := newSeeded(t)
	wants := map[string]fuzzed{}
	refused := 0
	for i := range 150 {
		for _, who := range slices.Sorted(maps.Keys(callers)) {
			f := fuzz(random, i)
			r, _ := asked(t, f.signer, f.usages, f.template)
			// What a requestor says of themselves, and of the decision, must not count.
			r.Spec.Username, r.Spec.Groups = "system:node:n1", []string{"system:masters", "system:nodes"}
			r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: "True"}}
			name, code := callers[who].request(t, r)
			switch {
			case code == 403:
				refused++
			case code != 201:
				t.Fatalf("%s asks for %+v: %d", who, f, code)
			default:
				f.who = who
				wants[name] = f
			}
		}
	}
	settle(t, api, client)
	t.Logf("%d requests, %d refused at once", len(wants), refused)
	issued, _ := certificatesOf(t, client)
	for name, cert := range issued {
		f, ok := wants[name]
		if _, known := before[name]; known || !ok {
			continue
		}
		own := f.who == "system:node:n1" && cert.Subject.CommonName == f.who || f.who == "bootstrapper"
		if !own || f.signer != nodeClient || !onlyNode(cert) {
			t.Errorf("%s got %s with %v %v for %+v", f.who, cert.Subject, cert.DNSNames, cert.ExtKeyUsage, f)
		}
	}
	// Somebody who approves everything gives nodes' signers nothing else to sign either, and nobody becomes a master.
	_, all := certificatesOf(t, client)
	for _, r := range all {
		if len(r.Status.Conditions) > 0 {
			continue
		}
		r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: "True"}}
		if _, err := client.CertificatesV1().CertificateSigningRequests().UpdateApproval(t.Context(), r.Name, &r, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
	settle(t, api, client)
	issued, all = certificatesOf(t, client)
	failed := 0
	for _, r := range all {
		cert := issued[r.Name]
		for _, c := range r.Status.Conditions {
			if c.Type == certificatesv1.CertificateFailed {
				failed++
				if cert != nil {
					t.Errorf("%s failed and has a certificate", r.Name)
				}
			}
		}
		if cert == nil {
			continue
		}
		if r.Spec.SignerName == nodeClient && !onlyNode(cert) {
			t.Errorf("%s got %s with %v", r.Name, cert.Subject, cert.ExtKeyUsage)
		}
		if cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign != 0 || slices.Contains(cert.Subject.Organization, "system:masters") && r.Spec.SignerName != certificatesv1.KubeletServingSignerName {
			t.Errorf("%s got %s, CA %v", r.Name, cert.Subject, cert.IsCA)
		}
	}
	if failed == 0 {
		t.Error("nothing failed: the requests were too tame")
	}
}

// onlyNode says whether a certificate is a node's to know it by, and nothing more.
func onlyNode(cert *x509.Certificate) bool {
	return strings.HasPrefix(cert.Subject.CommonName, "system:node:") && slices.Equal(cert.Subject.Organization, []string{"system:nodes"}) &&
		len(cert.DNSNames)+len(cert.IPAddresses)+len(cert.EmailAddresses)+len(cert.URIs) == 0 && !cert.IsCA &&
		slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth})
}

// settle waits until the controllers have handled what was there before: each takes the requests in their order, and has two workers.
func settle(t *testing.T, api *harness.API, client kubernetes.Interface) {
	t.Helper()
	for range 3 {
		bootstrap(t, api, client, "canary")
	}
}

package test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// asToken is a client that has nothing but a token.
func asToken(t *testing.T, api *harness.API, token string) *kubernetes.Clientset {
	t.Helper()
	admin, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken, config.QPS = token, -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// kubectl runs kubectl as the administrator and returns what it wrote, without the end of the line.
func kubectl(t *testing.T, api *harness.API, args ...string) string {
	t.Helper()
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"kubectl", "--kubeconfig", api.Kubeconfig}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

func aPod(name, account string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{ServiceAccountName: account, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
}

// within waits a while until check is content.
func within(t *testing.T, what string, check func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// TestAccounts: a Pod created right after its namespace gets an account and a token's volume; kubectl makes a token for the
// Pod; roles decide what it may do; it ends with the Pod. Others verify it by the issuer's discovery alone.
func TestAccounts(t *testing.T) {
	t.Parallel()
	api := startPortal(t)
	admin, ctx := connect(t, api.Kubeconfig), t.Context()
	for i := range 20 {
		namespace := fmt.Sprint("team-", i)
		if _, err := admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		pod, err := admin.CoreV1().Pods(namespace).Create(ctx, aPod("p", ""), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if pod.Spec.ServiceAccountName != "default" || len(pod.Spec.Volumes) != 1 || len(pod.Spec.Containers[0].VolumeMounts) != 1 {
			t.Errorf("the Pod is %+v", pod.Spec)
		}
	}
	if _, err := admin.CoreV1().Pods("team-0").Create(ctx, aPod("q", "nobody"), metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a Pod of a missing account: %v", err)
	}

	token := kubectl(t, api, "create", "token", "default", "-n", "team-0", "--bound-object-kind", "Pod", "--bound-object-name", "p", "--duration", "10m")
	me := asToken(t, api, token)
	who, err := me.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || who.Status.UserInfo.Username != "system:serviceaccount:team-0:default" ||
		!slices.Equal(who.Status.UserInfo.Extra["authentication.kubernetes.io/pod-name"], []string{"p"}) {
		t.Fatalf("I am %+v: %v", who, err)
	}
	list := func() error {
		_, err := me.CoreV1().Pods("team-0").List(ctx, metav1.ListOptions{})
		return err
	}
	if err := list(); !apierrors.IsForbidden(err) {
		t.Errorf("before there is a role: %v", err)
	}
	_, err = admin.RbacV1().RoleBindings("team-0").Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "view"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "default", Namespace: "team-0"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	within(t, "the role is not granted", list)
	if _, err := me.CoreV1().Pods("team-1").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("in another namespace: %v", err)
	}

	verifyByDiscovery(t, me.Discovery().RESTClient(), token)
	forOthers := kubectl(t, api, "create", "token", "default", "-n", "team-0", "--audience", "others")
	if err := asToken(t, api, forOthers).Discovery().RESTClient().Get().AbsPath("/version").Do(ctx).Error(); !apierrors.IsUnauthorized(err) {
		t.Errorf("a token for others: %v", err)
	}
	for _, c := range []struct {
		token     string
		audiences []string
		want      bool
	}{{token, nil, true}, {token, []string{"others"}, false}, {forOthers, nil, false}, {forOthers, []string{"others", "more"}, true}} {
		review, err := admin.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: c.token, Audiences: c.audiences},
		}, metav1.CreateOptions{})
		if err != nil || review.Status.Authenticated != c.want {
			t.Errorf("review for %q: %+v %v", c.audiences, review.Status, err)
		}
	}

	now := int64(0)
	if err := admin.CoreV1().Pods("team-0").Delete(ctx, "p", metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	within(t, "the token outlives its Pod", func() error {
		if err := list(); !apierrors.IsUnauthorized(err) {
			return fmt.Errorf("answered %v", err)
		}
		return nil
	})
	// An account that is deleted and comes back is another one.
	token = kubectl(t, api, "create", "token", "default", "-n", "team-0")
	if err := admin.CoreV1().ServiceAccounts("team-0").Delete(ctx, "default", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the default account does not come back", func() error {
		_, err := admin.CoreV1().ServiceAccounts("team-0").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	if _, err := asToken(t, api, token).CoreV1().Pods("team-0").List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("a token of the account before: %v", err)
	}
}

// verifyByDiscovery verifies a token as a stranger does, with nothing of Portal's.
func verifyByDiscovery(t *testing.T, client rest.Interface, token string) {
	t.Helper()
	read := func(path string, into any) {
		t.Helper()
		data, err := client.Get().AbsPath(path).Do(t.Context()).Raw()
		if err == nil {
			err = json.Unmarshal(data, into)
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	decode := func(text string) []byte {
		t.Helper()
		data, err := base64.RawURLEncoding.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var config struct {
		Issuer string
		Keys   string `json:"jwks_uri"`
	}
	var set struct {
		Keys []struct{ Kid, Kty, Alg, N, E string }
	}
	read("/.well-known/openid-configuration", &config)
	read("/openid/v1/jwks", &set)
	if !strings.HasPrefix(config.Keys, "https://") || !strings.HasSuffix(config.Keys, "/openid/v1/jwks") {
		t.Errorf("the keys are said to be at %q", config.Keys)
	}
	parts := strings.Split(token, ".")
	var header struct{ Alg, Kid string }
	var claims struct{ Iss, Sub string }
	if err := json.Unmarshal(decode(parts[0]), &header); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(decode(parts[1]), &claims); err != nil {
		t.Fatal(err)
	}
	if claims.Iss != config.Issuer {
		t.Errorf("issued by %q, discovery is of %q", claims.Iss, config.Issuer)
	}
	for _, key := range set.Keys {
		if key.Kid != header.Kid {
			continue
		}
		public := &rsa.PublicKey{N: new(big.Int).SetBytes(decode(key.N)), E: int(new(big.Int).SetBytes(decode(key.E)).Int64())}
		sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
		if key.Alg != "RS256" || header.Alg != "RS256" || rsa.VerifyPKCS1v15(public, crypto.SHA256, sum[:], decode(parts[2])) != nil {
			t.Errorf("the key %+v does not verify the token", key)
		}
		return
	}
	t.Errorf("no key %s among %v", header.Kid, set.Keys)
}

// TestTokenRequests sends what kube-apiserver 1.37.1 was sent, and requires its answers: code, reason and causes.
func TestTokenRequests(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none", "--enable-admission-plugins", "ServiceAccount")
	admin, ctx := connect(t, api.Kubeconfig), t.Context()
	core := admin.CoreV1()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	create := func(_ any, err error) { t.Helper(); must(err) }
	create(core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{}))
	for _, name := range []string{"a", "b"} {
		create(core.ServiceAccounts("x").Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}))
	}
	create(core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, metav1.CreateOptions{}))
	create(core.Secrets("x").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}}, metav1.CreateOptions{}))
	placed, lost := aPod("p", "a"), aPod("lost", "a")
	placed.Spec.NodeName, lost.Spec.NodeName = "n", "gone"
	for _, pod := range []*corev1.Pod{placed, lost, aPod("q", "b")} {
		create(core.Pods("x").Create(ctx, pod, metav1.CreateOptions{}))
	}
	ref := func(version, kind, name string, uid types.UID) func(*authenticationv1.TokenRequest) {
		return func(r *authenticationv1.TokenRequest) {
			r.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: version, Kind: kind, Name: name, UID: uid}
		}
	}
	seconds := func(n int64) func(*authenticationv1.TokenRequest) {
		return func(r *authenticationv1.TokenRequest) { r.Spec.ExpirationSeconds = &n }
	}
	const webhooks = "admissionregistration.k8s.io/v1"
	for _, c := range []struct {
		name    string
		account string
		change  func(*authenticationv1.TokenRequest)
		code    int32
		reason  metav1.StatusReason
		field   string
	}{
		{"plain", "a", nil, 201, "", ""},
		{"600 s", "a", seconds(600), 201, "", ""},
		{"599 s", "a", seconds(599), 422, "Invalid", "spec.expirationSeconds"},
		{"0 s", "a", seconds(0), 422, "Invalid", "spec.expirationSeconds"},
		{"-1 s", "a", seconds(-1), 422, "Invalid", "spec.expirationSeconds"},
		{"2^32 s", "a", seconds(1 << 32), 201, "", ""},
		{"2^32+1 s", "a", seconds(1<<32 + 1), 422, "Invalid", "spec.expirationSeconds"},
		{"no such account", "none", nil, 404, "NotFound", ""},
		{"another name", "a", func(r *authenticationv1.TokenRequest) { r.Name = "b" }, 422, "Invalid", "metadata.name"},
		{"another namespace", "a", func(r *authenticationv1.TokenRequest) { r.Namespace = "y" }, 400, "BadRequest", ""},
		{"another UID", "a", func(r *authenticationv1.TokenRequest) { r.UID = "1" }, 409, "Conflict", ""},
		{"Pod", "a", ref("v1", "Pod", "p", ""), 201, "", ""},
		{"Pod of no version", "a", ref("", "Pod", "p", ""), 201, "", ""},
		{"Pod on a missing node", "a", ref("v1", "Pod", "lost", ""), 201, "", ""},
		{"another Pod", "a", ref("v1", "Pod", "p", "1"), 409, "Conflict", ""},
		{"missing Pod", "a", ref("v1", "Pod", "none", ""), 404, "NotFound", ""},
		{"Pod of another account", "a", ref("v1", "Pod", "q", ""), 400, "BadRequest", ""},
		{"Pod of another group", "a", ref("apps/v1", "Pod", "p", ""), 400, "BadRequest", ""},
		{"Secret", "a", ref("v1", "Secret", "s", ""), 201, "", ""},
		{"another Secret", "a", ref("v1", "Secret", "s", "1"), 409, "Conflict", ""},
		{"missing Secret", "a", ref("v1", "Secret", "none", ""), 404, "NotFound", ""},
		{"Node", "a", ref("v1", "Node", "n", ""), 201, "", ""},
		{"another Node", "a", ref("v1", "Node", "n", "1"), 409, "Conflict", ""},
		{"missing Node", "a", ref("v1", "Node", "none", ""), 404, "NotFound", ""},
		{"ConfigMap", "a", ref("v1", "ConfigMap", "c", ""), 400, "BadRequest", ""},
		{"nothing", "a", ref("", "", "", ""), 400, "BadRequest", ""},
		{"webhook", "a", ref(webhooks, "ValidatingWebhookConfiguration", "w", ""), 422, "Invalid", "spec.attestations"},
		{"attested webhook", "a", func(r *authenticationv1.TokenRequest) {
			ref(webhooks, "ValidatingWebhookConfiguration", "w", "")(r)
			r.Spec.Attestations = map[string]authenticationv1.AttestationValue{"admissionReviewAPIGroups": {"apps"}}
		}, 400, "BadRequest", ""},
		{"attestation", "a", func(r *authenticationv1.TokenRequest) {
			r.Spec.Attestations = map[string]authenticationv1.AttestationValue{"admissionReviewAPIGroups": {"apps"}}
		}, 422, "Invalid", "spec.attestations"},
	} {
		request := &authenticationv1.TokenRequest{}
		if c.change != nil {
			c.change(request)
		}
		answer, err := post(t, admin.CoreV1().RESTClient(), c.account, request)
		if c.code == 201 {
			if err != nil || answer.Status.Token == "" {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		status := apierrors.APIStatus(nil)
		if s, ok := err.(apierrors.APIStatus); ok {
			status = s
		} else {
			t.Errorf("%s: %v, want %d", c.name, err, c.code)
			continue
		}
		var fields []string
		if d := status.Status().Details; d != nil {
			for _, cause := range d.Causes {
				fields = append(fields, cause.Field)
			}
		}
		if status.Status().Code != c.code || status.Status().Reason != c.reason || strings.Join(fields, ",") != c.field {
			t.Errorf("%s: %d %s %q, want %d %s %q", c.name, status.Status().Code, status.Status().Reason, fields, c.code, c.reason, c.field)
		}
	}
}

func post(t *testing.T, client rest.Interface, account string, request *authenticationv1.TokenRequest) (*authenticationv1.TokenRequest, error) {
	t.Helper()
	answer := &authenticationv1.TokenRequest{}
	err := client.Post().AbsPath("/api/v1/namespaces/x/serviceaccounts", account, "token").Body(request).Do(t.Context()).Into(answer)
	return answer, err
}

// TestTokensOfSeveralServers: a token of one server is good at the other at once, also when one has a new key and after both
// were started again.
func TestTokensOfSeveralServers(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	etcd := startEtcd(t, 1)[0].ClientURL
	dirs := []string{t.TempDir(), t.TempDir()}
	servers := make([]*harness.API, 2)
	start := func(i int) {
		t.Helper()
		var err error
		servers[i], err = harness.StartPortal(dirs[i], "--etcd-servers", etcd, "--advertise-address", advertised)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(servers[i].Kill)
	}
	start(0)
	if err := os.CopyFS(filepath.Join(dirs[1], "data", "pki"), os.DirFS(filepath.Join(dirs[0], "data", "pki"))); err != nil {
		t.Fatal(err)
	}
	// A key of its own, as after a renewal.
	if err := os.Remove(filepath.Join(dirs[1], "data", "pki", "service-account.key")); err != nil {
		t.Fatal(err)
	}
	start(1)
	admin := connect(t, servers[0].Kubeconfig)
	within(t, "no default account", func() error {
		_, err := admin.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
		return err
	})
	var all []string
	issue := func() {
		t.Helper()
		for _, s := range servers {
			all = append(all, kubectl(t, s, "create", "token", "default"))
		}
		for i, token := range all {
			for j, s := range servers {
				if _, err := asToken(t, s, token).CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
					t.Errorf("token %d at server %d: %v", i, j, err)
				}
			}
		}
	}
	issue()
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "certs", "renew", "service-account", "--kubeconfig", servers[0].Kubeconfig)
	if err != nil || !strings.Contains(out, "service-account (accepted)") {
		t.Errorf("%v\n%s", err, out)
	}
	issue()
	if out, err = harness.Run(t.Context(), nil, harness.Portal(), "certs", "renew", "service-account", "--revoke", "--kubeconfig", servers[0].Kubeconfig); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for i, server := range []int{0, 1, 0, 1} {
		want := server == 1 // the second server still has its key
		within(t, fmt.Sprintf("token %d after its key was revoked: want %v", i, want), func() error {
			for _, s := range servers {
				_, err := asToken(t, s, all[i]).CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
				if apierrors.IsForbidden(err) != want {
					return err
				}
			}
			return nil
		})
	}
	all = []string{all[1], all[3]}
	issue()
	info, err := os.Stat(filepath.Join(dirs[0], "data", "pki", "service-account.key"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key's file is %v: %v", info, err)
	}
	for i, s := range servers {
		if err := s.Stop(20 * time.Second); err != nil {
			t.Error(err)
		}
		start(i)
	}
	issue()
	for _, s := range servers {
		log, err := os.ReadFile(s.Log)
		if err != nil {
			t.Fatal(err)
		}
		for _, token := range all {
			if bytes.Contains(log, []byte(token)) {
				t.Errorf("%s has a token in its log", s.Log)
			}
		}
	}
}

// TestNamespacesGetWhatProgramsNeed: the CA that verifies the server, also after it was rotated, and tokens in Secrets that
// ask for one, which end with their account.
func TestNamespacesGetWhatProgramsNeed(t *testing.T) {
	t.Parallel()
	api := startPortal(t)
	admin, ctx := connect(t, api.Kubeconfig), t.Context()
	core := admin.CoreV1()
	if _, err := core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := core.ServiceAccounts("x").Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "s", Annotations: map[string]string{corev1.ServiceAccountNameKey: "a"}},
		Type:       corev1.SecretTypeServiceAccountToken,
	}
	if _, err := core.Secrets("x").Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var token string
	within(t, "the Secret is not filled", func() error {
		s, err := core.Secrets("x").Get(ctx, "s", metav1.GetOptions{})
		if err == nil && (len(s.Data["token"]) == 0 || len(s.Data["ca.crt"]) == 0 || string(s.Data["namespace"]) != "x") {
			return fmt.Errorf("it has %d entries", len(s.Data))
		}
		token = string(s.Data["token"])
		return err
	})
	use := func() error {
		_, err := asToken(t, api, token).CoreV1().Pods("x").List(ctx, metav1.ListOptions{})
		return err
	}
	if err := use(); !apierrors.IsForbidden(err) {
		t.Errorf("the Secret's token: %v", err)
	}

	published := func(want func(string) bool) func() error {
		return func() error {
			cm, err := core.ConfigMaps("x").Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
			if err == nil && !want(inOrder(cm.Data["ca.crt"])) {
				return fmt.Errorf("it has %q", cm.Data)
			}
			return err
		}
	}
	trusted := func() string {
		config, err := clientcmd.LoadFromFile(api.Kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		return inOrder(string(config.Clusters["portal"].CertificateAuthorityData))
	}
	before := trusted()
	within(t, "the CA is not published", published(func(ca string) bool { return ca == before }))
	if _, err := core.ConfigMaps("x").Patch(ctx, "kube-root-ca.crt", types.MergePatchType, []byte(`{"data":{"ca.crt":"","more":"x"}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the CA does not come back", published(func(ca string) bool { return ca == before }))
	if err := core.ConfigMaps("x").Delete(ctx, "kube-root-ca.crt", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the ConfigMap does not come back", published(func(ca string) bool { return ca == before }))
	if _, err := harness.Run(ctx, nil, harness.Portal(), "certs", "renew", "ca", "--kubeconfig", api.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	within(t, "the new CA is not published", published(func(ca string) bool { return ca == trusted() && ca != before }))

	if err := core.ServiceAccounts("x").Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the Secret outlives its account", func() error {
		if _, err := core.Secrets("x").Get(ctx, "s", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
	if err := use(); !apierrors.IsUnauthorized(err) {
		t.Errorf("the Secret's token without its Secret: %v", err)
	}
	checkAnonymous(ctx, t, api)
}

// inOrder are the certificates of a bundle in an order of their own: in a kubeconfig the one that signs comes first, in objects it does not.
func inOrder(bundle string) string {
	const end = "-----END CERTIFICATE-----\n"
	return strings.Join(slices.Sorted(slices.Values(strings.SplitAfter(bundle, end))), "")
}

// checkAnonymous: strangers don't get at the keys' place without a token, as the default roles say.
func checkAnonymous(ctx context.Context, t *testing.T, api *harness.API) {
	t.Helper()
	client := asToken(t, api, "")
	for _, path := range []string{"/openid/v1/jwks", "/.well-known/openid-configuration"} {
		code := 0
		client.Discovery().RESTClient().Get().AbsPath(path).Do(ctx).StatusCode(&code)
		if code != http.StatusForbidden {
			t.Errorf("%s: %d for those without credentials", path, code)
		}
	}
}

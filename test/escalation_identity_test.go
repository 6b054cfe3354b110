package test

import (
	"crypto"
	"crypto/hmac"
	crand "crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// identityWorld is a server whose users may become or speak for a few others, and no more.
func identityWorld(t *testing.T, rights map[string][]rbacv1.PolicyRule) (*harness.API, *kubernetes.Clientset) {
	t.Helper()
	var tokens strings.Builder
	for i, name := range slices.Sorted(maps.Keys(rights)) {
		fmt.Fprintf(&tokens, "%s-token,%s,%d,\"\"\n", name, name, i)
	}
	file := filepath.Join(t.TempDir(), "tokens.csv")
	if err := os.WriteFile(file, []byte(tokens.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--token-auth-file", file)
	client, create := connect(t, api.Kubeconfig), metav1.CreateOptions{}
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range []string{"a", "b"} {
		must(client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, create))
		for _, account := range []string{"weak", "strong"} {
			must(client.CoreV1().ServiceAccounts(ns).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, create))
		}
	}
	bind := func(role string, subject rbacv1.Subject) {
		t.Helper()
		must(client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}, Subjects: []rbacv1.Subject{subject},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		}, create))
	}
	bind("cluster-admin", rbacv1.Subject{Kind: "ServiceAccount", Namespace: "a", Name: "strong"})
	for name, rules := range rights {
		must(client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}, create))
		bind(name, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: "User", Name: name})
	}
	// The last binding counts: so do the others.
	last := rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: []string{"/last"}}
	must(client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "last"}, Rules: []rbacv1.PolicyRule{last}}, create))
	bind("last", rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "system:authenticated"})
	someone := somebody(api, slices.Sorted(maps.Keys(rights))[0]+"-token")
	within(t, "the roles are not granted", func() error {
		if code, answer := someone.ask(t, "GET", "/last", ""); code != http.StatusNotFound {
			return fmt.Errorf("%d %s", code, answer)
		}
		return nil
	})
	return api, client
}

// whoAmI is who the server thinks that a caller is.
func whoAmI(t *testing.T, c *caller) (code int, who authenticationv1.UserInfo, answer string) {
	t.Helper()
	code, answer = c.ask(t, "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", `{}`)
	var review authenticationv1.SelfSubjectReview
	if code == http.StatusCreated {
		if err := json.Unmarshal([]byte(answer), &review); err != nil {
			t.Fatal(err)
		}
	}
	return code, review.Status.UserInfo, answer
}

// disguise is whom a request says that it is from.
type disguise struct {
	user, uid string
	groups    []string
	extra     map[string]string
}

func (d disguise) header() http.Header {
	h := http.Header{}
	if d.user != "" {
		h.Set("Impersonate-User", d.user)
	}
	if d.uid != "" {
		h.Set("Impersonate-Uid", d.uid)
	}
	for _, g := range d.groups {
		h.Add("Impersonate-Group", g)
	}
	for k, v := range d.extra {
		h.Add("Impersonate-Extra-"+k, v)
	}
	return h
}

// fuzzDisguise puts together what may be impersonated, and in most cases something that may not.
func fuzzDisguise(random *rand.Rand) disguise {
	d := disguise{user: pick(random, "bob", "system:serviceaccount:a:weak"), extra: map[string]string{}}
	chance := func(percent int) bool { return random.IntN(100) < percent }
	if chance(30) {
		d.groups = append(d.groups, "devs")
	}
	if chance(20) {
		d.uid = "u-1"
	}
	if chance(20) {
		d.extra["scopes"] = "view"
	}
	if chance(25) {
		return d
	}
	for range 1 + random.IntN(2) {
		switch random.IntN(5) {
		case 0:
			d.user = pick(random, "", "admin", "portal-admin", "system:apiserver", "system:serviceaccount:a:strong", "system:serviceaccount:b:weak", "Bob", "bob2",
				"system:serviceaccount:a:weak:x", "system:serviceaccount:kube-system:clusterrole-aggregation-controller", "system:node:n1", "system:anonymous",
				"system:masters", "*", "system:portal:controllers", "impersonator")
		case 1:
			d.groups = append(d.groups, pick(random, "system:masters", "system:masters", "system:nodes", "system:serviceaccounts", "devs2", "Devs", "devs,system:masters",
				"system:authenticated", "system:unauthenticated", "*", ""))
		case 2:
			d.uid = pick(random, "u-2", "U-1", "*")
		case 3:
			d.extra[pick(random, "portal.dev%2finside", "Portal.dev%2FInside", "scopes2", "scopes%2fview", "authentication.kubernetes.io%2fpod-name", "%2a")] = pick(random, "view", "server", "*")
		case 4:
			d.extra["scopes"] = pick(random, "edit", "View", "*", "")
		}
	}
	return d
}

// granted says whether the impersonator's roles allow all of it.
func (d disguise) granted() bool {
	for k, v := range d.extra {
		if k != "scopes" || v != "view" {
			return false
		}
	}
	return (d.user == "bob" || d.user == "system:serviceaccount:a:weak") && (d.uid == "" || d.uid == "u-1") &&
		!slices.ContainsFunc(d.groups, func(g string) bool { return g != "devs" })
}

// TestImpersonationEscalation: somebody who may impersonate a few is nobody else, in whichever way they ask for it, and as one of them has
// no more than that one.
func TestImpersonationEscalation(t *testing.T) {
	t.Parallel()
	api, _ := identityWorld(t, map[string][]rbacv1.PolicyRule{
		"impersonator": {
			allow("impersonate", "", "users", "bob"), allow("impersonate", "", "groups", "devs"), allow("impersonate", "", "serviceaccounts", "weak"),
			allow("impersonate", "authentication.k8s.io", "userextras/scopes", "view"), allow("impersonate", "authentication.k8s.io", "uids", "u-1"),
			allow("get", "", "secrets"), // which those whom they impersonate can't
		},
		// As bob, but to list Services only.
		"limited": {allow("impersonate:user-info", "authentication.k8s.io", "users", "bob"), allow("impersonate-on:user-info:list", "", "services")},
		"bob":     {allow("get,list", "", "services,pods")},
		"trusted": {allow("impersonate", "", "users,groups")},
		"nothing": {allow("get", "", "endpoints")},
	})
	random := newSeeded(t)
	impersonator, nothing := somebody(api, "impersonator-token"), somebody(api, "nothing-token")
	granted, forbidden := 0, 0
	for range 500 {
		d := fuzzDisguise(random)
		ok := d.granted()
		// An account's namespace is part of its name; the right holds in all of them.
		if d.user == "system:serviceaccount:b:weak" {
			ok = disguise{"bob", d.uid, d.groups, d.extra}.granted()
		}
		code, who, answer := whoAmI(t, impersonator.with(d.header()))
		switch {
		case ok && code == http.StatusCreated:
			granted++
			if who.Username != d.user || who.UID != d.uid || slices.Contains(who.Groups, "system:masters") || len(who.Extra) != len(d.extra) {
				t.Errorf("%+v became %+v", d, who)
			}
			if code, _ := impersonator.with(d.header()).ask(t, "GET", "/api/v1/namespaces/kube-system/secrets/x", ""); code != http.StatusForbidden {
				t.Errorf("%+v reads a Secret: %d", d, code)
			}
		case !ok && (code == http.StatusForbidden || code == http.StatusBadRequest && d.user == ""):
			forbidden++
		case d.user == "" && len(d.header()) == 0:
			// No impersonation at all.
		default:
			t.Errorf("%+v: %d, want granted %v: %s", d, code, ok, answer)
		}
		if code, _, _ := whoAmI(t, nothing.with(d.header())); len(d.header()) > 0 && code != http.StatusForbidden && code != http.StatusBadRequest {
			t.Errorf("somebody without a right to impersonate, as %+v: %d", d, code)
		}
	}
	t.Logf("%d granted, %d refused", granted, forbidden)
	if granted < 50 || forbidden < 200 {
		t.Error("too tame")
	}

	limited := somebody(api, "limited-token").with(disguise{user: "bob"}.header())
	for path, want := range map[string]int{
		"/api/v1/namespaces/a/services": 200, "/api/v1/namespaces/a/services/x": 403, "/api/v1/namespaces/a/pods": 403, "/api/v1/namespaces/a/secrets": 403,
	} {
		if code, answer := limited.ask(t, "GET", path, ""); code != want {
			t.Errorf("limited, as bob: GET %s: %d, want %d: %s", path, code, want, answer)
		}
	}
	for _, d := range []disguise{{user: "bob", groups: []string{"devs"}}, {user: "admin"}, {user: "bob", uid: "u-1"}} {
		if code, answer := somebody(api, "limited-token").with(d.header()).ask(t, "GET", "/api/v1/namespaces/a/services", ""); code != http.StatusForbidden {
			t.Errorf("limited, as %+v: %d %s", d, code, answer)
		}
	}
	// The judge can fail: somebody who may be anybody is.
	code, who, answer := whoAmI(t, somebody(api, "trusted-token").with(disguise{user: "x", groups: []string{"system:masters"}}.header()))
	if code != http.StatusCreated || !slices.Contains(who.Groups, "system:masters") {
		t.Errorf("trusted: %d %+v %s", code, who, answer)
	}
}

// TestTokenEscalation: somebody who may ask for the tokens of one account gets no other identity, whatever else they ask for, and a token
// for others' ears is no identity here. Nor does a token that somebody has changed count, or a Secret that names an account elsewhere.
func TestTokenEscalation(t *testing.T) {
	t.Parallel()
	api, client := identityWorld(t, map[string][]rbacv1.PolicyRule{
		"requester": {allow("create", "", "serviceaccounts/token", "weak"), allow("get,create", "", "serviceaccounts")},
		"writer":    {allow("create,get", "", "secrets")},
	})
	ctx, create := t.Context(), metav1.CreateOptions{}
	for _, account := range []string{"weak", "strong"} {
		pod := aPod(account, account)
		if _, err := client.CoreV1().Pods("a").Create(ctx, pod, create); err != nil {
			t.Fatal(err)
		}
		if _, err := client.CoreV1().Secrets("a").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: account}}, create); err != nil {
			t.Fatal(err)
		}
	}
	strong, err := client.CoreV1().ServiceAccounts("a").Get(ctx, "strong", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	requester, random := somebody(api, "requester-token"), newSeeded(t)
	ask := func(namespace, account, body string) (int, string) {
		return requester.ask(t, "POST", "/api/v1/namespaces/"+namespace+"/serviceaccounts/"+account+"/token", body)
	}
	code, answer := ask("a", "weak", "{}")
	var first authenticationv1.TokenRequest
	if err := json.Unmarshal([]byte(answer), &first); err != nil || code != http.StatusCreated {
		t.Fatal(code, answer, err)
	}
	ours := first.Spec.Audiences
	issued, refusals := 0, 0
	for range 300 {
		namespace, account := pick(random, "a", "a", "a", "b"), pick(random, "weak", "weak", "weak", "strong", "default", "Weak", "weak%2f..%2fstrong", "none")
		request := map[string]any{"spec": map[string]any{}}
		spec := request["spec"].(map[string]any)
		var audiences []string
		if random.IntN(2) == 0 {
			for range 1 + random.IntN(3) {
				audiences = append(audiences, pick(random, "others", "vault", ours[0], strings.ToUpper(ours[0]), ours[0]+"/", "", "*", "api"))
			}
			spec["audiences"] = audiences
		}
		if random.IntN(5) == 0 {
			spec["boundObjectRef"] = map[string]any{
				"apiVersion": "v1", "kind": pick(random, "Pod", "Secret", "Node", "ServiceAccount"), "name": pick(random, "weak", "strong", "none"), "uid": pick(random, "", string(strong.UID)),
			}
		}
		if random.IntN(8) == 0 {
			request["metadata"] = map[string]any{"name": pick(random, "weak", "strong"), "namespace": pick(random, "", "a", "kube-system"), "uid": pick(random, "", string(strong.UID))}
		}
		if random.IntN(5) == 0 { // what only the server says
			request["status"] = map[string]any{"token": "x", "expirationTimestamp": "2099-01-01T00:00:00Z"}
			spec["userInfo"] = map[string]any{"username": "admin", "groups": []string{"system:masters"}}
		}
		code, answer := ask(namespace, account, text(request))
		if code != http.StatusCreated {
			if refusals++; code < 400 || code >= 500 || account == "strong" && code != http.StatusForbidden {
				t.Errorf("%s/%s: %s: %d %s", namespace, account, text(request), code, answer)
			}
			continue
		}
		issued++
		var got authenticationv1.TokenRequest
		if err := json.Unmarshal([]byte(answer), &got); err != nil {
			t.Fatal(err)
		}
		code, who, answer := whoAmI(t, somebody(api, got.Status.Token))
		here := len(audiences) == 0 || slices.ContainsFunc(audiences, func(a string) bool { return slices.Contains(ours, a) })
		switch {
		case account != "weak":
			t.Errorf("a token for %s/%s: %s", namespace, account, answer)
		case !here && code != http.StatusUnauthorized:
			t.Errorf("a token for %q is accepted here: %d %+v", audiences, code, who)
		case here && (code != http.StatusCreated || who.Username != "system:serviceaccount:"+namespace+":weak" ||
			!sameNames(who.Groups, "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")):
			t.Errorf("a token for %s/weak, for %q, is %+v: %d %s", namespace, audiences, who, code, answer)
		}
	}
	t.Logf("%d tokens, %d refused", issued, refusals)
	if issued < 40 || refusals < 80 {
		t.Error("too tame")
	}
	if code, who, answer := whoAmI(t, somebody(api, first.Status.Token)); code != http.StatusCreated {
		t.Fatal(code, who, answer)
	}
	for name, token := range forged(t, api, first.Status.Token, string(strong.UID)) {
		if code, who, _ := whoAmI(t, somebody(api, token)); code != http.StatusUnauthorized {
			t.Errorf("forged, %s: %d %+v", name, code, who)
		}
	}
	secretEscalation(t, api, client, string(strong.UID))
}

func sameNames(got []string, want ...string) bool {
	return slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want)))
}

// forged are changed tokens: each claims to be the strong account, or is signed by somebody else.
func forged(t *testing.T, api *harness.API, token, uid string) map[string]string {
	t.Helper()
	parts := strings.Split(token, ".")
	code := base64.RawURLEncoding
	decode := func(part string) map[string]any {
		data, err := code.DecodeString(part)
		if err != nil {
			t.Fatal(err)
		}
		var out map[string]any
		if err := json.Unmarshal(data, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	header, claims := decode(parts[0]), decode(parts[1])
	join := func(header, claims map[string]any, sign func(string) []byte) string {
		signed := code.EncodeToString([]byte(text(header))) + "." + code.EncodeToString([]byte(text(claims)))
		return signed + "." + code.EncodeToString(sign(signed))
	}
	old, err := code.DecodeString(parts[2])
	if err != nil {
		t.Fatal(err)
	}
	asBefore := func(string) []byte { return old }
	claims["sub"] = "system:serviceaccount:a:strong"
	about := claims["kubernetes.io"].(map[string]any)
	about["serviceaccount"] = map[string]any{"name": "strong", "uid": uid}
	other, err := rsa.GenerateKey(crand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	byOther := func(signed string) []byte {
		sum := sha256.Sum256([]byte(signed))
		out, err := rsa.SignPKCS1v15(nil, other, crypto.SHA256, sum[:])
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	// The public key as the key of a symmetric signature.
	_, keys := somebody(api, token).ask(t, "GET", "/openid/v1/jwks", "")
	pemKey, err := os.ReadFile(filepath.Join(filepath.Dir(api.Kubeconfig), "pki", "service-account.key"))
	if err != nil {
		t.Fatal(err)
	}
	public := publicPEM(t, pemKey)
	symmetric := func(key []byte) func(string) []byte {
		return func(signed string) []byte {
			mac := hmac.New(sha256.New, key)
			mac.Write([]byte(signed))
			return mac.Sum(nil)
		}
	}
	with := func(changes map[string]any) map[string]any {
		out := maps.Clone(header)
		for k, v := range changes {
			if out[k] = v; v == nil {
				delete(out, k)
			}
		}
		return out
	}
	return map[string]string{
		"other claims":            join(header, claims, asBefore),
		"no signature":            join(with(map[string]any{"alg": "none"}), claims, func(string) []byte { return nil }),
		"no signature, no key":    join(with(map[string]any{"alg": "None", "kid": nil}), claims, func(string) []byte { return nil }),
		"another key":             join(header, claims, byOther),
		"another key, no ID":      join(with(map[string]any{"kid": nil}), claims, byOther),
		"its own key inside":      join(with(map[string]any{"jwk": map[string]any{"kty": "RSA", "n": code.EncodeToString(other.N.Bytes()), "e": "AQAB"}}), claims, byOther),
		"its own key elsewhere":   join(with(map[string]any{"jku": "https://127.0.0.1:1/keys", "kid": "x"}), claims, byOther),
		"symmetric, by PEM":       join(with(map[string]any{"alg": "HS256"}), claims, symmetric(public)),
		"symmetric, by the JWKS":  join(with(map[string]any{"alg": "HS256"}), claims, symmetric([]byte(keys))),
		"symmetric, by nothing":   join(with(map[string]any{"alg": "HS256"}), claims, symmetric(nil)),
		"another's signature":     parts[0] + "." + code.EncodeToString([]byte(text(claims))) + "." + parts[2],
		"cut":                     parts[0] + "." + parts[1] + ".",
		"two parts":               parts[0] + "." + parts[1],
		"signed for a file's key": join(with(map[string]any{"kid": "../../../../dev/null"}), claims, symmetric(nil)),
	}
}

// publicPEM is the public part of a private key in PEM.
func publicPEM(t *testing.T, private []byte) []byte {
	t.Helper()
	block, _ := pem.Decode(private)
	if block == nil {
		t.Fatal("the key is not PEM")
	}
	var public any
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		public = key.Public()
	} else if key, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
		public = key.(crypto.Signer).Public()
	} else {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

// secretEscalation: who writes Secrets in a namespace gets tokens of that namespace's accounts, as in Kubernetes, and of no others.
func secretEscalation(t *testing.T, api *harness.API, client kubernetes.Interface, uid string) {
	t.Helper()
	writer := somebody(api, "writer-token")
	request := func(name string, annotations map[string]string) {
		t.Helper()
		body := text(map[string]any{"metadata": map[string]any{"name": name, "annotations": annotations}, "type": "kubernetes.io/service-account-token"})
		if code, answer := writer.ask(t, "POST", "/api/v1/namespaces/b/secrets", body); code != http.StatusCreated && code != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d %s", name, code, answer)
		}
	}
	const account, accountUID = corev1.ServiceAccountNameKey, corev1.ServiceAccountUIDKey
	request("uid", map[string]string{account: "strong", accountUID: uid}) // that of the account in a
	request("path", map[string]string{account: "a/strong"})
	request("path2", map[string]string{account: "../a/strong"})
	request("name", map[string]string{account: "system:serviceaccount:a:strong"})
	request("own", map[string]string{account: "weak"})
	filled := func(name string) string {
		s, err := client.CoreV1().Secrets("b").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return ""
		}
		return string(s.Data["token"])
	}
	within(t, "the namespace's own account has no token", func() error {
		if filled("own") == "" {
			return fmt.Errorf("none")
		}
		return nil
	})
	if code, who, answer := whoAmI(t, somebody(api, filled("own"))); code != http.StatusCreated || who.Username != "system:serviceaccount:b:weak" {
		t.Errorf("the Secret's token: %d %+v %s", code, who, answer)
	}
	for _, name := range []string{"uid", "path", "path2", "name"} {
		if token := filled(name); token != "" {
			_, who, _ := whoAmI(t, somebody(api, token))
			t.Errorf("the Secret %s has a token of %+v", name, who)
		}
	}
}

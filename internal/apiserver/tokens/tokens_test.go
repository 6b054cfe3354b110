package tokens

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/client-go/util/keyutil"
)

const (
	issuer = "https://issuer.test"
	us     = "https://us.test"
)

// world is an issuer and an authenticator, with a clock and objects of the test's.
type world struct {
	*testing.T
	issuer *Issuer
	auth   *Authenticator
	now    time.Time
	// cached and stored are the objects, by resource and name; a cache may be behind.
	cached, stored map[string]metav1.Object
	live           int
}

func signer(t *testing.T, private crypto.PrivateKey) *Signer {
	t.Helper()
	data, err := keyutil.MarshalPrivateKeyToPEM(private)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ParseSigner(data)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func rsaKey(t *testing.T) *rsa.PrivateKey {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, now: time.Unix(1_800_000_000, 0)}
	w.stored = map[string]metav1.Object{
		"serviceaccounts a": &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "ua"}},
		"pods p":            &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: "up"}},
		"secrets s":         &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "x", UID: "us"}},
		"nodes n":           &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "un"}},
	}
	w.cached = w.stored
	w.issuer = &Issuer{Config{
		Issuers: []string{issuer, "https://before.test"}, Audiences: []string{us}, Extend: true,
		Keys: NewRing(signer(t, rsaKey(t))), Now: func() time.Time { return w.now },
	}}
	w.auth = &Authenticator{Config: &w.issuer.Config, Get: func(_ context.Context, resource, _, name string, live bool) (metav1.Object, error) {
		from := w.cached
		if live {
			w.live++
			from = w.stored
		}
		if obj, ok := from[resource+" "+name]; ok {
			return obj, nil
		}
		return nil, apierrors.NewNotFound(corev1.Resource(resource), name)
	}}
	return w
}

func (w *world) issue(change func(*Request)) string {
	w.Helper()
	r := Request{Namespace: "x", Account: Ref{"a", "ua"}, Audiences: []string{us}, Seconds: 600}
	if change != nil {
		change(&r)
	}
	issued, err := w.issuer.Issue(w.Context(), r)
	if err != nil {
		w.Fatal(err)
	}
	return issued.Token
}

func (w *world) ok(token string) bool {
	w.Helper()
	resp, ok, err := w.auth.AuthenticateToken(w.Context(), token)
	if ok != (err == nil && resp != nil) && err != nil {
		w.Fatalf("accepted with %v", err)
	}
	return ok
}

func TestEveryKeyType(t *testing.T) {
	for name, generate := range map[string]func() crypto.PrivateKey{
		"RS256": func() crypto.PrivateKey { return rsaKey(t) },
		"ES256": func() crypto.PrivateKey { k, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader); return k },
		"ES384": func() crypto.PrivateKey { k, _ := ecdsa.GenerateKey(elliptic.P384(), rand.Reader); return k },
		"ES512": func() crypto.PrivateKey { k, _ := ecdsa.GenerateKey(elliptic.P521(), rand.Reader); return k },
	} {
		w := newWorld(t)
		s := signer(t, generate())
		if s.Algorithm() != name {
			t.Errorf("%s is %s", name, s.Algorithm())
		}
		w.issuer.Keys.Sign(s)
		token := w.issue(func(r *Request) { r.Pod, r.Node = &Ref{"p", "up"}, &Ref{"n", "un"} })
		resp, ok, err := w.auth.AuthenticateToken(t.Context(), token)
		if err != nil || !ok {
			t.Fatalf("%s: %v %v", name, ok, err)
		}
		u := resp.User
		if u.GetName() != "system:serviceaccount:x:a" || u.GetUID() != "ua" || !slices.Contains(u.GetGroups(), "system:serviceaccounts:x") {
			t.Errorf("%s is %v", name, u)
		}
		for key, want := range map[string]string{"pod-name": "p", "pod-uid": "up", "node-name": "n", "node-uid": "un"} {
			if got := u.GetExtra()["authentication.kubernetes.io/"+key]; !slices.Equal(got, []string{want}) {
				t.Errorf("%s: %s is %q", name, key, got)
			}
		}
		if id := u.GetExtra()["authentication.kubernetes.io/credential-id"]; len(id) != 1 || !strings.HasPrefix(id[0], "JTI=") {
			t.Errorf("%s: credential-id is %q", name, id)
		}
		if w.live > 0 {
			t.Errorf("%s: what the cache has was read %d times from etcd", name, w.live)
		}
	}
}

// TestLife: tokens end by time, with a minute for clocks that differ, and not before.
func TestLife(t *testing.T) {
	w := newWorld(t)
	token := w.issue(nil)
	began := w.now
	for _, c := range []struct {
		after time.Duration
		ok    bool
	}{{-2 * time.Minute, false}, {-30 * time.Second, true}, {0, true}, {10*time.Minute + 59*time.Second, true}, {11*time.Minute + time.Second, false}} {
		w.now = began.Add(c.after)
		if w.ok(token) != c.ok {
			t.Errorf("after %s: want %v", c.after, c.ok)
		}
	}
}

func TestExtendedLife(t *testing.T) {
	w := newWorld(t)
	pod := func(r *Request) { r.Pod, r.Seconds = &Ref{"p", "up"}, WarnAfter }
	began := w.now
	for name, c := range map[string]struct {
		token string
		year  bool
	}{
		"a Pod's":             {w.issue(pod), true},
		"no Pod's":            {w.issue(func(r *Request) { r.Seconds = WarnAfter }), false},
		"for others too":      {w.issue(func(r *Request) { pod(r); r.Audiences = append(r.Audiences, "other") }), false},
		"another length":      {w.issue(func(r *Request) { pod(r); r.Seconds++ }), false},
		"not if told not to ": {func() string { w.issuer.Extend = false; defer func() { w.issuer.Extend = true }(); return w.issue(pod) }(), false},
	} {
		w.now = began.Add(364 * 24 * time.Hour)
		if w.ok(c.token) != c.year {
			t.Errorf("%s after a year: want %v", name, c.year)
		}
		w.now = began
		if !w.ok(c.token) {
			t.Errorf("%s is not good at all", name)
		}
	}
}

// TestBoundObjects: a token ends with what it is bound to, and an object of the same name is another one.
func TestBoundObjects(t *testing.T) {
	for _, c := range []struct {
		object string
		bind   func(*Request)
	}{
		{"serviceaccounts a", func(*Request) {}},
		{"pods p", func(r *Request) { r.Pod = &Ref{"p", "up"} }},
		{"secrets s", func(r *Request) { r.Secret = &Ref{"s", "us"} }},
		{"nodes n", func(r *Request) { r.Node = &Ref{"n", "un"} }},
	} {
		t.Run(c.object, func(t *testing.T) {
			w := newWorld(t)
			token, object := w.issue(c.bind), w.stored[c.object]
			expect := func(what string, want bool) {
				t.Helper()
				if w.ok(token) != want {
					t.Errorf("%s: want %v", what, want)
				}
			}
			expect("there", true)
			w.cached = map[string]metav1.Object{}
			expect("not in the cache yet", true)
			w.cached = w.stored
			set := func(at time.Time) { deleted := metav1.NewTime(at); object.SetDeletionTimestamp(&deleted) }
			set(w.now.Add(30 * time.Second))
			expect("to be deleted soon", true)
			set(w.now.Add(-30 * time.Second))
			expect("just deleted", true)
			set(w.now.Add(-61 * time.Second))
			expect("deleted a minute ago", false)
			object.SetDeletionTimestamp(nil)
			object.SetUID("another")
			expect("another UID", false)
			delete(w.stored, c.object)
			expect("gone", false)
		})
	}
	w := newWorld(t)
	token := w.issue(func(r *Request) { r.Pod, r.Node = &Ref{"p", "up"}, &Ref{"n", ""} })
	delete(w.stored, "nodes n")
	if !w.ok(token) {
		t.Error("a Pod's token ended with a node")
	}
}

func TestAudiences(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		has, wanted, want []string
	}{
		{[]string{us}, nil, []string{us}},
		{[]string{"other"}, nil, nil},
		{[]string{"other"}, []string{us}, nil},
		{[]string{"other", us}, []string{us}, []string{us}},
		{[]string{"other"}, []string{"other", "more"}, []string{"other"}},
		{[]string{us}, []string{"other"}, nil},
		{[]string{""}, []string{us}, nil},
	} {
		ctx := t.Context()
		if c.wanted != nil {
			ctx = authenticator.WithAudiences(ctx, c.wanted)
		}
		resp, ok, _ := w.auth.AuthenticateToken(ctx, w.issue(func(r *Request) { r.Audiences = c.has }))
		if ok != (c.want != nil) || ok && !slices.Equal(resp.Audiences, c.want) {
			t.Errorf("a token for %q where %q is asked for: %v", c.has, c.wanted, resp)
		}
	}
}

func encode(v any) string {
	data, _ := json.Marshal(v)
	return base64.RawURLEncoding.EncodeToString(data)
}

// forge signs any header and payload with any key.
func forge(t *testing.T, header, payload map[string]any, sign func(text string) []byte) string {
	t.Helper()
	text := encode(header) + "." + encode(payload)
	return text + "." + base64.RawURLEncoding.EncodeToString(sign(text))
}

// TestForgeries: nothing but a token of the issuer, signed with one of its keys by that key's algorithm, is accepted.
func TestForgeries(t *testing.T) {
	w := newWorld(t)
	own := w.issuer.Keys.Signer()
	text, err := own.PEM()
	if err != nil {
		t.Fatal(err)
	}
	claims := func(change map[string]any) map[string]any {
		out := map[string]any{
			"iss": issuer, "sub": "system:serviceaccount:x:a", "aud": []string{us}, "iat": w.now.Unix(), "nbf": w.now.Unix(),
			"exp": w.now.Unix() + 600, "jti": "1", "kubernetes.io": map[string]any{
				"namespace": "x", "serviceaccount": map[string]any{"name": "a", "uid": "ua"},
			},
		}
		for key, value := range change {
			if out[key] = value; value == nil {
				delete(out, key)
			}
		}
		return out
	}
	rs := func(key *rsa.PrivateKey) func(string) []byte {
		return func(text string) []byte {
			sum := sha256.Sum256([]byte(text))
			out, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
	}
	mine := rs(own.private.(*rsa.PrivateKey))
	hs := func(secret []byte) func(string) []byte {
		return func(text string) []byte { m := hmac.New(sha256.New, secret); m.Write([]byte(text)); return m.Sum(nil) }
	}
	none := func(string) []byte { return nil }
	head := func(alg string, kid any) map[string]any { return map[string]any{"alg": alg, "kid": kid} }
	stranger := rsaKey(t)
	good := forge(t, head("RS256", own.ID), claims(nil), mine)
	if !w.ok(good) {
		t.Fatal("the pattern of the forgeries is not accepted itself")
	}
	parts := strings.Split(good, ".")
	bound := func(v any) map[string]any { return claims(map[string]any{"kubernetes.io": v}) }
	for name, token := range map[string]string{
		"no algorithm":                 forge(t, head("none", own.ID), claims(nil), none),
		"no algorithm, odd case":       forge(t, head("nOnE", own.ID), claims(nil), none),
		"no signature":                 parts[0] + "." + parts[1] + ".",
		"two parts":                    parts[0] + "." + parts[1],
		"another payload":              parts[0] + "." + encode(claims(map[string]any{"sub": "system:serviceaccount:x:b"})) + "." + parts[2],
		"public key as a secret":       forge(t, head("HS256", own.ID), claims(nil), hs(text)),
		"public key's DER as a secret": forge(t, head("HS256", own.ID), claims(nil), hs(own.Public.(*rsa.PublicKey).N.Bytes())),
		"empty secret":                 forge(t, head("HS256", own.ID), claims(nil), hs(nil)),
		"another algorithm of the key": forge(t, head("PS256", own.ID), claims(nil), func(text string) []byte {
			sum := sha256.Sum256([]byte(text))
			out, _ := rsa.SignPSS(rand.Reader, own.private.(*rsa.PrivateKey), crypto.SHA256, sum[:], nil)
			return out
		}),
		"a stranger's key, our ID":    forge(t, head("RS256", own.ID), claims(nil), rs(stranger)),
		"a stranger's key, no ID":     forge(t, map[string]any{"alg": "RS256"}, claims(nil), rs(stranger)),
		"a stranger's key, its ID":    forge(t, head("RS256", signer(t, stranger).ID), claims(nil), rs(stranger)),
		"an ID that is a path":        forge(t, head("RS256", "../../dev/null"), claims(nil), rs(stranger)),
		"an ID that is no text":       forge(t, head("RS256", []string{own.ID}), claims(nil), mine),
		"an ID that is a number":      forge(t, head("RS256", 1), claims(nil), mine),
		"a key in the header":         forge(t, map[string]any{"alg": "RS256", "jwk": map[string]any{"kty": "RSA"}}, claims(nil), rs(stranger)),
		"demands in the header":       forge(t, map[string]any{"alg": "RS256", "kid": own.ID, "crit": []string{"x"}, "x": 1}, claims(nil), mine),
		"another issuer":              forge(t, head("RS256", own.ID), claims(map[string]any{"iss": "https://evil.test"}), mine),
		"no issuer":                   forge(t, head("RS256", own.ID), claims(map[string]any{"iss": nil}), mine),
		"expired":                     forge(t, head("RS256", own.ID), claims(map[string]any{"exp": w.now.Unix() - 100}), mine),
		"without an end":              forge(t, head("RS256", own.ID), claims(map[string]any{"exp": nil}), mine),
		"from the future":             forge(t, head("RS256", own.ID), claims(map[string]any{"nbf": w.now.Unix() + 100}), mine),
		"another audience":            forge(t, head("RS256", own.ID), claims(map[string]any{"aud": "https://us.test/"}), mine),
		"another subject":             forge(t, head("RS256", own.ID), claims(map[string]any{"sub": "system:admin"}), mine),
		"no account":                  forge(t, head("RS256", own.ID), bound(nil), mine),
		"no UID":                      forge(t, head("RS256", own.ID), bound(map[string]any{"namespace": "x", "serviceaccount": map[string]any{"name": "a"}}), mine),
		"a legacy token in no Secret": forge(t, head("RS256", own.ID), legacy("x", "a", "ua", "s"), mine),
		"a legacy issuer's new token": forge(t, head("RS256", own.ID), claims(map[string]any{"iss": legacyIssuer}), mine),
		"not even close":              "a.b.c",
		"JSON":                        `{"payload":""}`,
		"empty":                       "",
		"a star":                      "*",
		"spaces around":               " " + good,
	} {
		if w.ok(token) {
			t.Errorf("%s was accepted", name)
		}
	}
	if !w.ok(forge(t, head("RS256", own.ID), claims(map[string]any{"iss": "https://before.test"}), mine)) {
		t.Error("a token of the issuer before was refused")
	}
}

func legacy(namespace, account, uid, secret string) map[string]any {
	return map[string]any{
		"iss": legacyIssuer, "sub": "system:serviceaccount:" + namespace + ":" + account,
		"kubernetes.io/serviceaccount/namespace": namespace, "kubernetes.io/serviceaccount/secret.name": secret,
		"kubernetes.io/serviceaccount/service-account.name": account, "kubernetes.io/serviceaccount/service-account.uid": uid,
	}
}

// TestSecretTokens: a token that kube-controller-manager wrote into a Secret is good as long as the Secret holds it.
func TestSecretTokens(t *testing.T) {
	w := newWorld(t)
	own := w.issuer.Keys.Signer()
	token := forge(t, map[string]any{"alg": "RS256", "kid": own.ID}, legacy("x", "a", "ua", "s"), func(text string) []byte {
		sum := sha256.Sum256([]byte(text))
		out, _ := rsa.SignPKCS1v15(rand.Reader, own.private.(*rsa.PrivateKey), crypto.SHA256, sum[:])
		return out
	})
	var used []string
	w.auth.Used = func(_ context.Context, namespace, name string, uid types.UID, today string) {
		used = append(used, namespace+"/"+name+" "+string(uid)+" "+today)
	}
	secret := w.stored["secrets s"].(*corev1.Secret)
	secret.Data = map[string][]byte{"token": []byte(token)}
	if !w.ok(token) || !slices.Equal(used, []string{"x/s us 2027-01-15"}) {
		t.Errorf("refused, or its use was noted as %q", used)
	}
	secret.Labels = map[string]string{LastUsedLabel: "2027-01-15"}
	if !w.ok(token) || len(used) != 1 {
		t.Errorf("refused, or its use was noted twice: %q", used)
	}
	secret.Labels[invalidSince] = "2027-01-01"
	if w.ok(token) {
		t.Error("accepted although it is marked invalid")
	}
	delete(secret.Labels, invalidSince)
	secret.Data["token"] = []byte("another")
	if w.ok(token) {
		t.Error("accepted although the Secret holds another")
	}
	secret.Data["token"] = []byte(token)
	w.stored["serviceaccounts a"].SetUID("another")
	if w.ok(token) {
		t.Error("accepted for another account of the same name")
	}
}

// TestRotation: tokens of a key that signed before are good as long as it is accepted, and a key that is not known is asked
// for once.
func TestRotation(t *testing.T) {
	w := newWorld(t)
	ring := w.issuer.Keys
	before := ring.Signer()
	token := w.issue(nil)
	ring.Sign(signer(t, rsaKey(t)))
	asked := 0
	ring.Missing = func(context.Context) { asked++ }
	if w.ok(token) || asked != 1 {
		t.Errorf("accepted without its key, or asked for it %d times", asked)
	}
	ring.Missing = func(context.Context) { ring.Accept([]Key{before.Key}) }
	if !w.ok(token) || !w.ok(w.issue(nil)) {
		t.Error("refused")
	}
	if keys := ring.Keys(); len(keys) != 2 || keys[0].ID != ring.Signer().ID {
		t.Errorf("keys are %v", keys)
	}
}

func TestPromise(t *testing.T) {
	w := newWorld(t)
	var until time.Time
	w.issuer.Promise = func(_ context.Context, key string, at time.Time) error { until = at; return nil }
	w.issue(func(r *Request) { r.Seconds = 1 << 32 })
	if want := w.now.Add((1 << 32) * time.Second); !until.Equal(want) {
		t.Errorf("promised until %v, want %v", until, want)
	}
	w.issuer.Promise = func(context.Context, string, time.Time) error { return context.DeadlineExceeded }
	if _, err := w.issuer.Issue(t.Context(), Request{}); err == nil {
		t.Error("signed with a key that others don't know")
	}
}

func TestDiscovery(t *testing.T) {
	w := newWorld(t)
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	w.issuer.Keys.Accept([]Key{signer(t, ec).Key})
	answer := httptest.NewRecorder()
	w.issuer.Configuration("https://keys.test").ServeHTTP(answer, httptest.NewRequest("GET", ConfigurationPath, nil))
	want := `{"issuer":"https://issuer.test","jwks_uri":"https://keys.test","response_types_supported":["id_token"],` +
		`"subject_types_supported":["public"],"id_token_signing_alg_values_supported":["ES256","RS256"]}`
	if got := strings.TrimSpace(answer.Body.String()); got != want {
		t.Errorf("configuration is %s", got)
	}
	answer = httptest.NewRecorder()
	w.issuer.KeySet().ServeHTTP(answer, httptest.NewRequest("GET", KeysPath, nil))
	var set struct{ Keys []map[string]string }
	if err := json.Unmarshal(answer.Body.Bytes(), &set); err != nil || len(set.Keys) != 2 || answer.Header().Get("Content-Type") != "application/jwk-set+json" {
		t.Fatalf("keys are %s: %v", answer.Body, err)
	}
	x, _ := base64.RawURLEncoding.DecodeString(set.Keys[1]["x"])
	y, _ := base64.RawURLEncoding.DecodeString(set.Keys[1]["y"])
	if len(x) != 32 || len(y) != 32 || set.Keys[1]["crv"] != "P-256" || set.Keys[0]["e"] != "AQAB" {
		t.Errorf("keys are %v", set.Keys)
	}
	answer = httptest.NewRecorder()
	w.issuer.KeySet().ServeHTTP(answer, httptest.NewRequest("POST", KeysPath, nil))
	if answer.Code != 405 {
		t.Errorf("POST: %d", answer.Code)
	}
}

func TestKeysThatAreRefused(t *testing.T) {
	short, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	curve, _ := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	for name, key := range map[string]crypto.PublicKey{"short": &short.PublicKey, "P-224": &curve.PublicKey, "text": "key"} {
		if _, err := NewKey(key); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	if _, err := ParseSigner([]byte("no key")); err == nil {
		t.Error("text is a key")
	}
}

// FuzzAuthenticate: whatever comes, nothing is accepted and nothing crashes.
func FuzzAuthenticate(f *testing.F) {
	f.Add("a.b.c")
	f.Add("eyJhbGciOiJub25lIn0.eyJpc3MiOiJodHRwczovL2lzc3Vlci50ZXN0In0.")
	f.Add(`eyJhbGciOiJSUzI1NiIsImtpZCI6bnVsbH0.eyJpc3MiOiJodHRwczovL2lzc3Vlci50ZXN0IiwiYXVkIjp7fX0.AAAA`)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		f.Fatal(err)
	}
	data, _ := keyutil.MarshalPrivateKeyToPEM(key)
	s, _ := ParseSigner(data)
	auth := &Authenticator{Config: &Config{Issuers: []string{issuer}, Audiences: []string{us}, Keys: NewRing(s)},
		Get: func(context.Context, string, string, string, bool) (metav1.Object, error) {
			return &corev1.ServiceAccount{}, nil
		}}
	f.Fuzz(func(t *testing.T, token string) {
		if _, ok, _ := auth.AuthenticateToken(t.Context(), token); ok {
			t.Errorf("%q was accepted", token)
		}
	})
}

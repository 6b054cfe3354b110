package bootstrap

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/cluster-bootstrap/token/api"
)

var (
	now   = time.Date(2026, 11, 16, 12, 0, 0, 0, time.UTC)
	token = Token{"abcdef", "0123456789abcdef"}
)

// TestUser: who a token speaks for, and what makes it speak for nobody.
func TestUser(t *testing.T) {
	good := func() *corev1.Secret {
		return NewSecret(token, Grant{Expires: now.Add(time.Hour), Groups: []string{"system:bootstrappers:portal:proxy"}})
	}
	name, groups, ok := User(good(), token, now)
	if !ok || name != "system:bootstrap:abcdef" || !slices.Equal(groups, []string{"system:bootstrappers", "system:bootstrappers:portal:proxy"}) {
		t.Fatalf("%s %v %v", name, groups, ok)
	}
	for what, spoil := range map[string]func(*corev1.Secret){
		"another type":          func(s *corev1.Secret) { s.Type = corev1.SecretTypeOpaque },
		"another name":          func(s *corev1.Secret) { s.Name = "bootstrap-token-fedcba" },
		"no secret":             func(s *corev1.Secret) { delete(s.Data, api.BootstrapTokenSecretKey) },
		"another secret":        func(s *corev1.Secret) { s.Data[api.BootstrapTokenSecretKey] = []byte("0123456789abcdeg") },
		"another id":            func(s *corev1.Secret) { s.Data[api.BootstrapTokenIDKey] = []byte("abcdeg") },
		"expired":               func(s *corev1.Secret) { s.Data[api.BootstrapTokenExpirationKey] = []byte(now.Format(time.RFC3339)) },
		"expiry of nonsense":    func(s *corev1.Secret) { s.Data[api.BootstrapTokenExpirationKey] = []byte("tomorrow") },
		"not for this":          func(s *corev1.Secret) { s.Data[api.BootstrapTokenUsageAuthentication] = []byte("yes") },
		"a group of importance": func(s *corev1.Secret) { s.Data[api.BootstrapTokenExtraGroupsKey] = []byte("system:masters") },
	} {
		s := good()
		spoil(s)
		if name, groups, ok := User(s, token, now); ok {
			t.Errorf("%s: accepted as %s in %v", what, name, groups)
		}
	}
}

// TestSign: the signature is what openssl makes of the same text:
// printf 'HEADER.PAYLOAD' | openssl dgst -sha256 -hmac 0123456789abcdef -binary | basenc --base64url
func TestSign(t *testing.T) {
	const want = "eyJhbGciOiJIUzI1NiIsImtpZCI6ImFiY2RlZiJ9..jGfh3cAKffhbjQqP1x03VRxdhcDip6Xp1PFxbB0P9vg"
	if got := token.Sign("hello\n"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if !token.Signed("hello\n", want) || token.Signed("hello", want) || (Token{"abcdef", "0123456789abcdeg"}).Signed("hello\n", want) {
		t.Error("a signature counts for another text or token, or not for its own")
	}
}

func TestParse(t *testing.T) {
	if got, err := ParseToken(token.String()); err != nil || got != token {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"", "abcdef", "ABCDEF.0123456789abcdef", "abcdef.0123456789abcde", "abcdef.0123456789abcdef.", "abcdef.0123456789abcde\n"} {
		if _, err := ParseToken(text); err == nil {
			t.Errorf("%q is a token", text)
		} else if text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("the error repeats the token: %v", err)
		}
	}
	hash := "sha256:" + strings.Repeat("0f", 32)
	if got, err := ParseHash(" " + strings.ToUpper(hash)); err != nil || got != hash {
		t.Errorf("%q, %v", got, err)
	}
	for _, text := range []string{"", "sha256:", strings.Repeat("0f", 32), "sha256:" + strings.Repeat("0g", 32), "sha1:" + strings.Repeat("0f", 20)} {
		if _, err := ParseHash(text); err == nil {
			t.Errorf("%q is a hash", text)
		}
	}
}

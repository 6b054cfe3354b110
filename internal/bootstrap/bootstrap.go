// Package bootstrap has what a cluster and those who join it must agree on: bootstrap tokens as Secrets, the ConfigMap
// kube-public/cluster-info signed with them, and hashes of certificate authorities, all as kubeadm has them. It asks nobody.
package bootstrap

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cluster-bootstrap/token/api"
	tokenutil "k8s.io/cluster-bootstrap/token/util"
	"k8s.io/cluster-bootstrap/util/secrets"
)

const (
	// ClusterInfo is the name of the ConfigMap in kube-public by which machines that join find the CA.
	ClusterInfo = api.ConfigMapClusterInfo
	// KubeconfigKey holds in it a kubeconfig without credentials, SignaturePrefix and a token's ID the signature of that.
	KubeconfigKey   = api.KubeConfigKey
	SignaturePrefix = api.JWSSignatureKeyPrefix
	// SecretType is the type of the Secrets that are tokens, in the namespace kube-system.
	SecretType = corev1.SecretType(api.SecretTypeBootstrapToken)
)

// Token is a bootstrap token: ID.Secret. The ID is public.
type Token struct{ ID, Secret string }

// ParseToken reads a token. The error never repeats it.
func ParseToken(text string) (Token, error) {
	if !tokenutil.IsValidBootstrapToken(text) {
		return Token{}, errors.New("must be 6 and 16 characters of a-z and 0-9 with a dot between, as `portal token create` prints it")
	}
	id, secret, _ := strings.Cut(text, ".")
	return Token{id, secret}, nil
}

// NewToken makes one up.
func NewToken() (Token, error) {
	text, err := tokenutil.GenerateBootstrapToken()
	if err != nil {
		return Token{}, err
	}
	return ParseToken(text)
}

// String is the whole token, which is a secret.
func (t Token) String() string { return t.ID + "." + t.Secret }

// SecretName is the name of the Secret of a token.
func SecretName(id string) string { return tokenutil.BootstrapTokenSecretName(id) }

// ValidID says whether a text can be a token's ID.
func ValidID(id string) bool { return tokenutil.IsValidBootstrapTokenID(id) }

// Grant is what a token allows, and until when.
type Grant struct {
	Expires     time.Time // zero: never
	Groups      []string  // besides system:bootstrappers, in which all are
	Description string
}

// NewSecret is the Secret of a token that can join and verify the cluster.
func NewSecret(t Token, g Grant) *corev1.Secret {
	out := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: SecretName(t.ID), Namespace: metav1.NamespaceSystem},
		Type:       SecretType,
		Data: map[string][]byte{
			api.BootstrapTokenIDKey:               []byte(t.ID),
			api.BootstrapTokenSecretKey:           []byte(t.Secret),
			api.BootstrapTokenUsageAuthentication: []byte("true"),
			api.BootstrapTokenUsageSigningKey:     []byte("true"),
			api.BootstrapTokenExtraGroupsKey:      []byte(strings.Join(g.Groups, ",")),
		},
	}
	if !g.Expires.IsZero() {
		out.Data[api.BootstrapTokenExpirationKey] = []byte(g.Expires.UTC().Format(time.RFC3339))
	}
	if g.Description != "" {
		out.Data[api.BootstrapTokenDescriptionKey] = []byte(g.Description)
	}
	return out
}

// ReadSecret reads a token and what it allows from its Secret. A Secret that is no valid token is an error.
func ReadSecret(s *corev1.Secret) (Token, Grant, error) {
	if s.Type != SecretType || s.DeletionTimestamp != nil {
		return Token{}, Grant{}, fmt.Errorf("secret %s is no bootstrap token, or about to be deleted", s.Name)
	}
	t := Token{secrets.GetData(s, api.BootstrapTokenIDKey), secrets.GetData(s, api.BootstrapTokenSecretKey)}
	if !ValidID(t.ID) || s.Name != SecretName(t.ID) || t.Secret == "" {
		return Token{}, Grant{}, fmt.Errorf("secret %s: it must be named after its %s and have a %s", s.Name, api.BootstrapTokenIDKey, api.BootstrapTokenSecretKey)
	}
	groups, err := secrets.GetGroups(s)
	if err != nil {
		return Token{}, Grant{}, fmt.Errorf("secret %s: %s: %w", s.Name, api.BootstrapTokenExtraGroupsKey, err)
	}
	g := Grant{
		Groups:      slices.DeleteFunc(groups, func(g string) bool { return g == api.BootstrapDefaultGroup }),
		Description: secrets.GetData(s, api.BootstrapTokenDescriptionKey),
	}
	if text := secrets.GetData(s, api.BootstrapTokenExpirationKey); text != "" {
		if g.Expires, err = time.Parse(time.RFC3339, text); err != nil {
			return Token{}, Grant{}, fmt.Errorf("secret %s: %s must be a time like 2006-01-02T15:04:05Z", s.Name, api.BootstrapTokenExpirationKey)
		}
	}
	return t, g, nil
}

// Expired says whether a token's time is over. An expiration that can't be read is over.
func Expired(s *corev1.Secret, now time.Time) bool { return secrets.HasExpired(s, now) }

// Left is how long a token is still valid; zero if it never expires.
func Left(s *corev1.Secret, now time.Time) time.Duration {
	left, _ := secrets.GetExpiration(s, now)
	return left
}

// User is who a token speaks for, if it may be used for authentication and the secret is right: a name and groups. It takes
// the same time whatever the secret is.
func User(s *corev1.Secret, t Token, now time.Time) (name string, groups []string, ok bool) {
	have, grant, err := ReadSecret(s)
	same := subtle.ConstantTimeCompare([]byte(have.Secret), []byte(t.Secret)) == 1
	if err != nil || !same || have.ID != t.ID || Expired(s, now) || secrets.GetData(s, api.BootstrapTokenUsageAuthentication) != "true" {
		return "", nil, false
	}
	return api.BootstrapUserPrefix + t.ID, append([]string{api.BootstrapDefaultGroup}, grant.Groups...), true
}

// Signs says whether a token is to sign cluster-info.
func Signs(s *corev1.Secret, now time.Time) (Token, bool) {
	t, _, err := ReadSecret(s)
	return t, err == nil && !Expired(s, now) && secrets.GetData(s, api.BootstrapTokenUsageSigningKey) == "true"
}

// Sign is a detached JSON Web Signature (HS256) of a text: without the text itself.
func (t Token) Sign(text string) string {
	encode := base64.RawURLEncoding.EncodeToString
	header := encode(fmt.Appendf(nil, `{"alg":"HS256","kid":%q}`, t.ID))
	mac := hmac.New(sha256.New, []byte(t.Secret))
	mac.Write([]byte(header + "." + encode([]byte(text))))
	return header + ".." + encode(mac.Sum(nil))
}

// Signed says whether a signature is the token's for a text.
func (t Token) Signed(text, signature string) bool {
	return subtle.ConstantTimeCompare([]byte(t.Sign(text)), []byte(signature)) == 1
}

const hashPrefix = "sha256:"

// Hash pins a CA: the SHA-256 of its public key with the key's type (SubjectPublicKeyInfo).
func Hash(ca *x509.Certificate) string {
	sum := sha256.Sum256(ca.RawSubjectPublicKeyInfo)
	return hashPrefix + hex.EncodeToString(sum[:])
}

// ParseHash checks a hash as somebody typed it.
func ParseHash(text string) (string, error) {
	text = strings.ToLower(strings.TrimSpace(text))
	digits, found := strings.CutPrefix(text, hashPrefix)
	if raw, err := hex.DecodeString(digits); !found || err != nil || len(raw) != sha256.Size {
		return "", fmt.Errorf("%q must be %s and 64 hexadecimal digits, as `portal token create` prints it", text, hashPrefix)
	}
	return text, nil
}

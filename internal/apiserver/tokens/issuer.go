// Package tokens issues the tokens of ServiceAccounts and authenticates those who bring them: JSON Web Tokens as Kubernetes
// has them, their keys, and the documents by which others verify them. It knows neither etcd nor REST storage: objects are
// read through a function, and keys come from its user.
package tokens

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
)

const (
	// legacyIssuer is that of tokens in Secrets that kube-controller-manager writes.
	legacyIssuer = "kubernetes/serviceaccount"

	// WarnAfter is the lifetime in seconds that Pods' projected tokens ask for unless told otherwise. Programs that read
	// the file once and never again would fail after it, so such tokens live for extended instead and are only counted.
	WarnAfter = 60*60 + 7
	extended  = 365 * 24 * time.Hour
)

// Ref names the object that a token is bound to.
type Ref struct {
	Name string `json:"name,omitempty"`
	UID  string `json:"uid,omitempty"`
}

// claims are all that a token may say: RFC 7519's, Kubernetes', and those of tokens in Secrets.
type claims struct {
	jwt.RegisteredClaims
	Kubernetes *bound `json:"kubernetes.io,omitempty"`

	LegacyNamespace  string `json:"kubernetes.io/serviceaccount/namespace,omitempty"`
	LegacySecret     string `json:"kubernetes.io/serviceaccount/secret.name,omitempty"`
	LegacyAccount    string `json:"kubernetes.io/serviceaccount/service-account.name,omitempty"`
	LegacyAccountUID string `json:"kubernetes.io/serviceaccount/service-account.uid,omitempty"`
}

// bound says whose token it is and what it lives as long as.
type bound struct {
	Namespace string           `json:"namespace,omitempty"`
	Account   Ref              `json:"serviceaccount"`
	Pod       *Ref             `json:"pod,omitempty"`
	Secret    *Ref             `json:"secret,omitempty"`
	Node      *Ref             `json:"node,omitempty"`
	WarnAfter *jwt.NumericDate `json:"warnafter,omitempty"`
}

// Config is how tokens are issued and checked.
type Config struct {
	// Issuers are those whose tokens are accepted; the first is written into new ones.
	Issuers []string
	// Audiences are what the API server calls itself: whom a token is for that asks for nothing else.
	Audiences []string
	// MaxExpiration limits what is asked for; 0: no limit.
	MaxExpiration time.Duration
	// Extend lets Pods' default tokens live for a year.
	Extend bool
	Keys   *Ring
	// Promise is called before a token is signed, with the time at which it expires: the key must be accepted until then,
	// by every server. Nil: it is.
	Promise func(ctx context.Context, key string, until time.Time) error
	// Now is the clock; nil: the wall clock.
	Now func() time.Time
}

// Issuer signs tokens.
type Issuer struct{ Config }

// Request is what to issue.
type Request struct {
	Namespace         string
	Account           Ref
	Pod, Node, Secret *Ref
	// Audiences are whom the token is for.
	Audiences []string
	// Seconds is how long it is to live.
	Seconds int64
}

// Issued is a token and its ID, by which audit logs know it.
type Issued struct{ Token, ID string }

// ErrKey means that the key cannot be used now: others would not accept its tokens.
var ErrKey = errors.New("the key of tokens is not registered in etcd yet")

// Issue signs a token.
func (i *Issuer) Issue(ctx context.Context, r Request) (Issued, error) {
	now := i.now()
	life := time.Duration(r.Seconds) * time.Second
	c := claims{
		RegisteredClaims: jwt.RegisteredClaims{
			Issuer: i.Issuers[0], Subject: serviceaccount.MakeUsername(r.Namespace, r.Account.Name), Audience: r.Audiences,
			IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), ID: string(uuid.NewUUID()),
		},
		Kubernetes: &bound{Namespace: r.Namespace, Account: r.Account, Pod: r.Pod, Secret: r.Secret, Node: r.Node},
	}
	if i.Extend && r.Pod != nil && r.Seconds == WarnAfter && i.own(r.Audiences) {
		c.Kubernetes.WarnAfter = jwt.NewNumericDate(now.Add(life))
		life = extended
	}
	c.ExpiresAt = jwt.NewNumericDate(now.Add(life))
	signer := i.Keys.Signer()
	if i.Promise != nil {
		if err := i.Promise(ctx, signer.ID, c.ExpiresAt.Time); err != nil {
			return Issued{}, fmt.Errorf("%w: %w", ErrKey, err)
		}
	}
	token := &jwt.Token{Header: map[string]any{"alg": signer.Algorithm(), "kid": signer.ID}, Claims: c, Method: signer.method}
	text, err := token.SignedString(signer.private)
	return Issued{Token: text, ID: c.ID}, err
}

// own says that a token is for the API server alone.
func (c *Config) own(audiences []string) bool {
	return !slices.ContainsFunc(audiences, func(a string) bool { return !slices.Contains(c.Audiences, a) })
}

func (c *Config) now() time.Time {
	if c.Now != nil {
		return c.Now()
	}
	return time.Now()
}

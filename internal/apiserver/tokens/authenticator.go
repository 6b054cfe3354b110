package tokens

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/golang-jwt/jwt/v5"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	tokenjwt "k8s.io/apiserver/pkg/authentication/token/jwt"
)

// leeway is how far clocks may be apart, and how long a token outlives an object that is being deleted.
const leeway = time.Minute

const (
	// LastUsedLabel says on which day a Secret's token was used last.
	LastUsedLabel = "kubernetes.io/legacy-token-last-used"
	// invalidSince labels a Secret whose token nobody may use any more.
	invalidSince = "kubernetes.io/legacy-token-invalid-since"
)

// Getter reads an object: from the server's cache, which may be a moment behind, or live. Resource is one of serviceaccounts,
// pods, secrets and nodes.
type Getter func(ctx context.Context, resource, namespace, name string, live bool) (metav1.Object, error)

// Authenticator knows who a ServiceAccount's token is of, and whether it is still good.
type Authenticator struct {
	*Config
	// Get reads the objects that tokens are bound to.
	Get Getter
	// Used, if there, is called when the token in a Secret was used for the first time today.
	Used func(ctx context.Context, namespace, name string, uid types.UID, today string)
}

var _ authenticator.Token = &Authenticator{}

// What is said about a token that is rejected. Nothing of the token itself is repeated.
var (
	errNotOurs     = errors.New("the token is of another issuer")
	errInvalidated = errors.New("the object that the token is bound to is gone")
)

// AuthenticateToken says who a token stands for. Tokens of others are none of its business, and no error.
func (a *Authenticator) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	c := &claims{}
	now := a.now()
	parser := jwt.NewParser(jwt.WithLeeway(leeway), jwt.WithIssuedAt(), jwt.WithTimeFunc(func() time.Time { return now }))
	_, err := parser.ParseWithClaims(token, c, func(t *jwt.Token) (any, error) { return a.keys(ctx, t, c.Issuer) })
	switch {
	case errors.Is(err, errNotOurs), errors.Is(err, jwt.ErrTokenMalformed):
		return nil, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("token of a ServiceAccount: %w", err)
	}
	audiences, err := a.audiences(ctx, c)
	if err != nil {
		return nil, false, err
	}
	info, err := a.judge(ctx, token, c, now)
	if err != nil {
		return nil, false, err
	}
	return &authenticator.Response{User: info.UserInfo(), Audiences: audiences}, true, nil
}

// keys are those that may have signed a token. The algorithm must be the key's own: a public key is never taken for a
// secret one, and no signature is no algorithm.
func (a *Authenticator) keys(ctx context.Context, t *jwt.Token, issuer string) (any, error) {
	if issuer != legacyIssuer && !slices.Contains(a.Issuers, issuer) {
		return nil, errNotOurs
	}
	id, given := t.Header["kid"].(string)
	if _, has := t.Header["kid"]; has != given {
		return nil, errors.New("its key ID is no text")
	}
	if _, has := t.Header["crit"]; has {
		return nil, errors.New("it demands what is not supported")
	}
	set := jwt.VerificationKeySet{}
	for _, key := range a.Keys.find(ctx, id) {
		if key.method.Alg() == t.Method.Alg() {
			set.Keys = append(set.Keys, key.Public)
		}
	}
	if len(set.Keys) == 0 {
		return nil, errors.New("no key for it is known")
	}
	return set, nil
}

// audiences are those of the token that were asked for.
func (a *Authenticator) audiences(ctx context.Context, c *claims) (authenticator.Audiences, error) {
	own := authenticator.Audiences(a.Audiences)
	meant := authenticator.Audiences(c.Audience)
	if len(meant) == 0 {
		audit.AddAuditAnnotation(ctx, "authentication.k8s.io/legacy-token", c.Subject)
		legacyTokens.WithContext(ctx).Inc()
		meant = own
	}
	wanted, ok := authenticator.AudiencesFrom(ctx)
	if !ok {
		wanted = own
	}
	out := meant.Intersect(wanted)
	if len(out) == 0 {
		return nil, fmt.Errorf("the token is for the audiences %q, not for %q", meant, wanted)
	}
	return out, nil
}

// judge looks at what the token is bound to.
func (a *Authenticator) judge(ctx context.Context, token string, c *claims, now time.Time) (*serviceaccount.ServiceAccountInfo, error) {
	if c.Issuer == legacyIssuer {
		return a.judgeSecret(ctx, token, c)
	}
	b := c.Kubernetes
	switch {
	case b == nil || b.Namespace == "" || b.Account.Name == "" || b.Account.UID == "":
		return nil, errors.New("the token does not say which ServiceAccount it is of")
	case c.Subject != serviceaccount.MakeUsername(b.Namespace, b.Account.Name):
		return nil, errors.New("the token's subject is not its ServiceAccount")
	case c.ExpiresAt == nil:
		return nil, errors.New("the token has no end")
	}
	if _, err := a.alive(ctx, "serviceaccounts", b.Namespace, b.Account, now.Add(-leeway)); err != nil {
		return nil, err
	}
	info := &serviceaccount.ServiceAccountInfo{
		Namespace: b.Namespace, Name: b.Account.Name, UID: b.Account.UID, CredentialID: tokenjwt.CredentialIDForJTI(c.ID),
	}
	if b.Secret != nil {
		if _, err := a.alive(ctx, "secrets", b.Namespace, *b.Secret, now.Add(-leeway)); err != nil {
			return nil, err
		}
	}
	if b.Pod != nil {
		if _, err := a.alive(ctx, "pods", b.Namespace, *b.Pod, now.Add(-leeway)); err != nil {
			return nil, err
		}
		info.PodName, info.PodUID = b.Pod.Name, b.Pod.UID
	}
	if b.Node != nil {
		// A Pod's token says only where the Pod is; it ends with the Pod.
		if b.Pod == nil {
			if _, err := a.alive(ctx, "nodes", "", *b.Node, now.Add(-leeway)); err != nil {
				return nil, err
			}
		}
		info.NodeName, info.NodeUID = b.Node.Name, b.Node.UID
	}
	countStale(ctx, c, now)
	return info, nil
}

// countStale counts who would have been rejected if the token had not been made to live longer.
func countStale(ctx context.Context, c *claims, now time.Time) {
	warn := c.Kubernetes.WarnAfter
	switch {
	case warn == nil:
	case now.After(warn.Time):
		audit.AddAuditAnnotation(ctx, "authentication.k8s.io/stale-token",
			fmt.Sprintf("subject: %s, seconds after warning threshold: %d", c.Subject, now.Unix()-warn.Unix()))
		staleTokens.WithContext(ctx).Inc()
	default:
		validTokens.WithContext(ctx).Inc()
	}
}

// alive reads an object that a token is bound to: it must have the UID that the token says, and not have been deleted
// before a time. The cache may be behind, so what it does not know is read again.
func (a *Authenticator) alive(ctx context.Context, resource, namespace string, ref Ref, since time.Time) (metav1.Object, error) {
	obj, err := a.Get(ctx, resource, namespace, ref.Name, false)
	if err != nil || string(obj.GetUID()) != ref.UID {
		obj, err = a.Get(ctx, resource, namespace, ref.Name, true)
		if apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("%w: %s %s: %w", errInvalidated, resource, ref.Name, err)
		}
		if err != nil {
			return nil, fmt.Errorf("can't read %s %s, which the token is bound to: %w", resource, ref.Name, err)
		}
	}
	if string(obj.GetUID()) != ref.UID {
		return nil, fmt.Errorf("%w: %s %s is another one now", errInvalidated, resource, ref.Name)
	}
	if deleted := obj.GetDeletionTimestamp(); deleted != nil && deleted.Time.Before(since) {
		return nil, fmt.Errorf("%w: %s %s was deleted", errInvalidated, resource, ref.Name)
	}
	return obj, nil
}

// judgeSecret checks a token that a controller wrote into a Secret. It is good as long as the Secret holds it.
func (a *Authenticator) judgeSecret(ctx context.Context, token string, c *claims) (*serviceaccount.ServiceAccountInfo, error) {
	if c.LegacyNamespace == "" || c.LegacySecret == "" || c.LegacyAccount == "" || c.LegacyAccountUID == "" {
		return nil, errors.New("the token does not say which ServiceAccount and Secret it is of")
	}
	if c.Subject != serviceaccount.MakeUsername(c.LegacyNamespace, c.LegacyAccount) {
		return nil, errors.New("the token's subject is not its ServiceAccount")
	}
	holds := func(live bool) (*corev1.Secret, bool) {
		obj, err := a.Get(ctx, "secrets", c.LegacyNamespace, c.LegacySecret, live)
		secret, ok := obj.(*corev1.Secret)
		return secret, err == nil && ok && secret.DeletionTimestamp == nil &&
			subtle.ConstantTimeCompare(secret.Data[corev1.ServiceAccountTokenKey], []byte(token)) == 1
	}
	secret, ok := holds(false)
	if !ok {
		if secret, ok = holds(true); !ok {
			return nil, fmt.Errorf("%w: the Secret does not hold it any more", errInvalidated)
		}
	}
	account, err := a.alive(ctx, "serviceaccounts", c.LegacyNamespace, Ref{c.LegacyAccount, c.LegacyAccountUID}, a.now().Add(-leeway))
	if err != nil {
		return nil, err
	}
	if account.GetDeletionTimestamp() != nil {
		return nil, fmt.Errorf("%w: the ServiceAccount was deleted", errInvalidated)
	}
	a.use(ctx, secret)
	if secret.Labels[invalidSince] != "" {
		audit.AddAuditAnnotation(ctx, "authentication.k8s.io/legacy-token-invalidated", secret.Name+"/"+secret.Namespace)
		return nil, fmt.Errorf("the token is marked invalid by the label %s of its Secret", invalidSince)
	}
	audit.AddAuditAnnotation(ctx, "authentication.k8s.io/legacy-token-manual-secret", secret.Name)
	manualTokens.WithContext(ctx).Inc()
	return &serviceaccount.ServiceAccountInfo{Namespace: c.LegacyNamespace, Name: c.LegacyAccount, UID: c.LegacyAccountUID}, nil
}

// use says once a day that a Secret's token is in use, so that nobody takes it for forgotten.
func (a *Authenticator) use(ctx context.Context, secret *corev1.Secret) {
	now := a.now().UTC()
	today, tomorrow := now.Format(time.DateOnly), now.AddDate(0, 0, 1).Format(time.DateOnly)
	if last := secret.Labels[LastUsedLabel]; a.Used != nil && last != today && last != tomorrow {
		a.Used(ctx, secret.Namespace, secret.Name, secret.UID, today)
	}
}

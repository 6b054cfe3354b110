package node

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Tokens are renewed after this part of their life, and after a day at the latest.
const (
	renewAfter   = 0.8
	renewAtLeast = 24 * time.Hour
	renewJitter  = 10 * time.Second
	renewRetry   = 10 * time.Second
)

// podTokens are the service-account tokens of one Pod.
type podTokens struct {
	client kubernetes.Interface
	now    func() time.Time

	mu   sync.Mutex
	have map[tokenKey]podToken
}

type tokenKey struct {
	path, audience string
	seconds        int64
}

type podToken struct {
	text           string
	renew, expires time.Time
	// failed is when the last attempt to renew it was.
	failed time.Time
}

func newPodTokens(client kubernetes.Interface) *podTokens {
	return &podTokens{client: client, now: time.Now, have: map[tokenKey]podToken{}}
}

func keyOf(t *corev1.ServiceAccountTokenProjection) tokenKey {
	return tokenKey{t.Path, t.Audience, ptr.Deref(t.ExpirationSeconds, 0)}
}

// get is a token that is not due yet, or a new one. One that can't be renewed is used until it expires.
func (p *podTokens) get(ctx context.Context, pod *corev1.Pod, t *corev1.ServiceAccountTokenProjection) (string, error) {
	key, now := keyOf(t), p.now()
	p.mu.Lock()
	have, ok := p.have[key]
	p.mu.Unlock()
	if ok && (now.Before(have.renew) || now.Before(have.failed.Add(renewRetry)) && now.Before(have.expires)) {
		return have.text, nil
	}
	next, err := p.request(ctx, pod, t)
	if err != nil {
		if !ok || !now.Before(have.expires) {
			return "", err
		}
		have.failed = now
		next = have
	}
	p.mu.Lock()
	p.have[key] = next
	p.mu.Unlock()
	return next.text, nil
}

func (p *podTokens) request(ctx context.Context, pod *corev1.Pod, t *corev1.ServiceAccountTokenProjection) (podToken, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: t.ExpirationSeconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if t.Audience != "" {
		request.Spec.Audiences = []string{t.Audience}
	}
	issued := p.now()
	var answer *authenticationv1.TokenRequest
	err := patiently(ctx, func() (err error) {
		answer, err = p.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, request, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return podToken{}, err
	}
	expires := answer.Status.ExpirationTimestamp.Time
	if s := ptr.Deref(answer.Spec.ExpirationSeconds, 0); s > 0 {
		expires = issued.Add(time.Duration(s) * time.Second) // by this machine's clock, which may differ from the server's
	}
	return podToken{text: answer.Status.Token, expires: expires, renew: renewal(issued, expires, rand.N(renewJitter))}, nil
}

// renewal is when a token is replaced.
func renewal(issued, expires time.Time, jitter time.Duration) time.Time {
	life := expires.Sub(issued)
	return issued.Add(min(time.Duration(float64(life)*renewAfter), renewAtLeast) - min(jitter, life/20))
}

// adopt takes over a token that an earlier agent wrote, if its life can be read from it.
func (p *podTokens) adopt(t *corev1.ServiceAccountTokenProjection, text string) error {
	parts := strings.Split(text, ".")
	if len(parts) != 3 {
		return fmt.Errorf("it is no token of this API")
	}
	data, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return fmt.Errorf("it is no token of this API")
	}
	var claims struct {
		Issued  int64 `json:"iat"`
		Expires int64 `json:"exp"`
		// Kubernetes has the life that was asked for, if the API server made it longer for programs that read a token only once.
		Kubernetes struct {
			WarnAfter int64 `json:"warnafter"`
		} `json:"kubernetes.io"`
	}
	if err := json.Unmarshal(data, &claims); err != nil || claims.Expires <= claims.Issued {
		return fmt.Errorf("it is no token of this API")
	}
	if warn := claims.Kubernetes.WarnAfter; warn > claims.Issued {
		claims.Expires = min(claims.Expires, warn)
	}
	issued, expires := time.Unix(claims.Issued, 0), time.Unix(claims.Expires, 0)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.have[keyOf(t)] = podToken{text: text, expires: expires, renew: renewal(issued, expires, rand.N(renewJitter))}
	return nil
}

// due is when the next token has to be renewed; zero: there is none.
func (p *podTokens) due() (next time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.have {
		at := t.renew
		if again := t.failed.Add(renewRetry); !t.failed.IsZero() && again.After(at) {
			at = again
		}
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	return next
}

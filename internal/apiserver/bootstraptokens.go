package apiserver

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"

	"portal/internal/bootstrap"
)

// bootstrapTokens knows those who join by the tokens in kube-system. They are few, and kept here. One that is not is read, for it may have
// been made a moment ago; but not often, so that guessing costs the store nothing.
type bootstrapTokens struct {
	secrets cache.SharedIndexInformer
	client  kubernetes.Interface
	reads   flowcontrol.RateLimiter
}

// follow sets where the tokens are read. It is called before the first request.
func (b *bootstrapTokens) follow(client kubernetes.Interface) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(metav1.NamespaceSystem),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "type=" + string(bootstrap.SecretType) }))
	b.secrets = factory.Core().V1().Secrets().Informer()
	b.client, b.reads = client, flowcontrol.NewTokenBucketRateLimiter(5, 20)
}

// AuthenticateToken has no opinion on what is not written like a bootstrap token: it may be one of another kind.
func (b *bootstrapTokens) AuthenticateToken(ctx context.Context, text string) (*authenticator.Response, bool, error) {
	token, err := bootstrap.ParseToken(text)
	if err != nil {
		return nil, false, nil
	}
	secret, err := b.secret(ctx, bootstrap.SecretName(token.ID))
	if secret == nil || err != nil {
		return nil, false, err
	}
	name, groups, ok := bootstrap.User(secret, token, time.Now())
	if !ok {
		return nil, false, nil
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: name, Groups: groups}}, true, nil
}

// secret is a token's, or nil.
func (b *bootstrapTokens) secret(ctx context.Context, name string) (*corev1.Secret, error) {
	found, ok, err := b.secrets.GetStore().GetByKey(metav1.NamespaceSystem + "/" + name)
	if err != nil {
		return nil, err
	}
	if ok {
		return found.(*corev1.Secret), nil
	}
	if !b.reads.TryAccept() {
		return nil, nil
	}
	secret, err := b.client.CoreV1().Secrets(metav1.NamespaceSystem).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	if secret.Type != bootstrap.SecretType {
		return nil, nil
	}
	return secret, nil
}

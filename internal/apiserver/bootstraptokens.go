package apiserver

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/bootstrap"
)

// bootstrapTokens knows those who join by the tokens in kube-system. They are few, and kept here: a wrong token costs no read.
type bootstrapTokens struct{ secrets cache.SharedIndexInformer }

// follow sets where the tokens are read. It is called before the first request.
func (b *bootstrapTokens) follow(client kubernetes.Interface) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(metav1.NamespaceSystem),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "type=" + string(bootstrap.SecretType) }))
	b.secrets = factory.Core().V1().Secrets().Informer()
}

// AuthenticateToken has no opinion on what is not written like a bootstrap token: it may be one of another kind.
func (b *bootstrapTokens) AuthenticateToken(_ context.Context, text string) (*authenticator.Response, bool, error) {
	token, err := bootstrap.ParseToken(text)
	if err != nil {
		return nil, false, nil
	}
	found, ok, err := b.secrets.GetStore().GetByKey(metav1.NamespaceSystem + "/" + bootstrap.SecretName(token.ID))
	if err != nil || !ok {
		return nil, false, err
	}
	secret, ok := found.(*corev1.Secret)
	if !ok {
		return nil, false, nil
	}
	name, groups, ok := bootstrap.User(secret, token, time.Now())
	if !ok {
		return nil, false, nil
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: name, Groups: groups}}, true, nil
}

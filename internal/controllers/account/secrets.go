package account

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"portal/internal/controllers/queue"
)

const (
	// ByAccount is the index of token Secrets by the ServiceAccount that they name.
	ByAccount = "account"
	// forever is the longest life that a token can have: the Secret is what ends it.
	forever = int64(1) << 32
	// recheck bounds how long a token that the server made shorter is left alone.
	recheck = 24 * time.Hour
)

// IndexByAccount is the index ByAccount.
func IndexByAccount(obj any) ([]string, error) {
	secret, ok := obj.(*corev1.Secret)
	if !ok {
		return nil, nil
	}
	return []string{secret.Namespace + "/" + secret.Annotations[corev1.ServiceAccountNameKey]}, nil
}

// tokenController fills Secrets of type kubernetes.io/service-account-token, and deletes them with their account.
type tokenController struct {
	Deps
	queue *queue.Queue
}

// NewToken makes the controller of tokens in Secrets.
func NewToken(deps Deps) (*Controller, error) {
	t := &tokenController{Deps: deps}
	t.queue = queue.New(queue.Options{Name: TokenName}, t.sync)
	_, err := deps.Secrets.AddEventHandler(onChange(func(s *corev1.Secret) {
		t.queue.Add(queue.Key{Namespace: s.Namespace, Name: s.Name})
	}))
	if err != nil {
		return nil, err
	}
	// A Secret that is gone is told apart by its account, which may list it.
	_, err = deps.Secrets.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		if s, ok := obj.(*corev1.Secret); ok && s.Annotations[corev1.ServiceAccountNameKey] != "" {
			t.queue.Add(queue.Key{Namespace: s.Namespace, Name: s.Annotations[corev1.ServiceAccountNameKey] + "/" + s.Name})
		}
	}})
	if err != nil {
		return nil, err
	}
	_, err = deps.Accounts.AddEventHandler(onChange(func(a *corev1.ServiceAccount) {
		named, _ := deps.Secrets.GetIndexer().ByIndex(ByAccount, a.Namespace+"/"+a.Name)
		for _, obj := range named {
			t.queue.Add(queue.Key{Namespace: a.Namespace, Name: obj.(*corev1.Secret).Name})
		}
	}))
	if err != nil {
		return nil, err
	}
	follow := func(ctx context.Context) {
		followRootCA(ctx, deps.RootCA, func() {
			for _, obj := range deps.Secrets.GetIndexer().List() {
				s := obj.(*corev1.Secret)
				t.queue.Add(queue.Key{Namespace: s.Namespace, Name: s.Name})
			}
		})
	}
	return &Controller{queue: t.queue, beside: follow}, nil
}

func (t *tokenController) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	if account, secret, is := strings.Cut(key.Name, "/"); is {
		return queue.Result{}, ignoreGone(t.forget(ctx, key.Namespace, account, secret))
	}
	obj, ok, err := t.Secrets.GetIndexer().GetByKey(key.String())
	if err != nil || !ok {
		return queue.Result{}, err
	}
	secret := obj.(*corev1.Secret)
	if secret.DeletionTimestamp != nil {
		return queue.Result{}, nil
	}
	account, err := t.account(ctx, secret)
	if err != nil {
		return queue.Result{}, err
	}
	if account == nil {
		return queue.Result{Writes: 1}, ignoreGone(t.Client.CoreV1().Secrets(key.Namespace).Delete(ctx, key.Name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &secret.UID}}))
	}
	return t.fill(ctx, secret, account)
}

// account is the one that a Secret names, or nil if there is none, or another one by now.
func (t *tokenController) account(ctx context.Context, secret *corev1.Secret) (*corev1.ServiceAccount, error) {
	name, uid := secret.Annotations[corev1.ServiceAccountNameKey], secret.Annotations[corev1.ServiceAccountUIDKey]
	same := func(a *corev1.ServiceAccount) bool { return uid == "" || uid == string(a.UID) }
	obj, ok, err := t.Accounts.GetIndexer().GetByKey(secret.Namespace + "/" + name)
	if err != nil {
		return nil, err
	}
	if ok && same(obj.(*corev1.ServiceAccount)) {
		return obj.(*corev1.ServiceAccount), nil
	}
	// The informer of accounts may be behind that of Secrets.
	account, err := t.Client.CoreV1().ServiceAccounts(secret.Namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case !same(account):
		return nil, nil
	}
	return account, nil
}

// fill writes what is missing: the token, the CA, the namespace.
func (t *tokenController) fill(ctx context.Context, cached *corev1.Secret, account *corev1.ServiceAccount) (queue.Result, error) {
	again, missing := t.missing(cached)
	if !missing {
		return queue.Result{Again: again}, nil
	}
	if cached.Immutable != nil && *cached.Immutable {
		klog.FromContext(ctx).Info("Secret is immutable and gets no token: create it without immutable", "secret", klog.KObj(cached))
		return queue.Result{}, nil
	}
	client := t.Client.CoreV1().Secrets(cached.Namespace)
	secret, err := client.Get(ctx, cached.Name, metav1.GetOptions{})
	if err != nil || secret.UID != cached.UID || secret.ResourceVersion != cached.ResourceVersion {
		return queue.Result{}, ignoreGone(err) // the watch brings what it is now
	}
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	if root := t.RootCA(); len(root) > 0 {
		secret.Data[corev1.ServiceAccountRootCAKey] = root
	}
	if len(secret.Data[corev1.ServiceAccountNamespaceKey]) == 0 {
		secret.Data[corev1.ServiceAccountNamespaceKey] = []byte(secret.Namespace)
	}
	if due, _ := renewalDue(secret); due {
		token, err := t.request(ctx, secret, account)
		if err != nil {
			return queue.Result{}, ignoreGone(err)
		}
		secret.Data[corev1.ServiceAccountTokenKey] = []byte(token)
	}
	secret.Annotations[corev1.ServiceAccountUIDKey] = string(account.UID)
	_, err = client.Update(ctx, secret, metav1.UpdateOptions{})
	return queue.Result{Writes: 1}, ignoreGone(err)
}

// missing says whether a Secret lacks anything, and if not, when to look again.
func (t *tokenController) missing(s *corev1.Secret) (time.Duration, bool) {
	due, again := renewalDue(s)
	root := t.RootCA()
	lacks := due || len(s.Data[corev1.ServiceAccountNamespaceKey]) == 0 ||
		len(root) > 0 && !bytes.Equal(s.Data[corev1.ServiceAccountRootCAKey], root)
	return again, lacks
}

// request asks the API for a token that lives as long as the Secret.
func (t *tokenController) request(ctx context.Context, secret *corev1.Secret, account *corev1.ServiceAccount) (string, error) {
	life := forever
	answer, err := t.Client.CoreV1().ServiceAccounts(secret.Namespace).CreateToken(ctx, account.Name, &authenticationv1.TokenRequest{
		ObjectMeta: metav1.ObjectMeta{UID: account.UID},
		Spec: authenticationv1.TokenRequestSpec{
			ExpirationSeconds: &life,
			BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: secret.Name, UID: secret.UID},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token for Secret %s/%s: %w", secret.Namespace, secret.Name, err)
	}
	return answer.Status.Token, nil
}

// renewalDue says whether a Secret needs a new token: it has none, or one of this controller that ends soon, because the
// server limits how long tokens live. Other tokens are left alone. If none is due, it says when to look again, if ever.
func renewalDue(s *corev1.Secret) (bool, time.Duration) {
	token := string(s.Data[corev1.ServiceAccountTokenKey])
	if token == "" {
		return true, 0
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return false, 0
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return false, 0
	}
	var claims struct {
		Issued     int64 `json:"iat"`
		Expires    int64 `json:"exp"`
		Kubernetes struct {
			Secret *struct {
				UID string `json:"uid"`
			} `json:"secret"`
		} `json:"kubernetes.io"`
	}
	bound := json.Unmarshal(payload, &claims) == nil && claims.Kubernetes.Secret != nil && claims.Kubernetes.Secret.UID == string(s.UID)
	if !bound || claims.Expires-claims.Issued >= forever {
		return false, 0
	}
	left := time.Until(time.Unix(claims.Issued+(claims.Expires-claims.Issued)/3*2, 0))
	return left <= 0, min(left, recheck)
}

// forget removes a Secret that is gone from what its account lists.
func (t *tokenController) forget(ctx context.Context, namespace, name, secret string) error {
	client := t.Client.CoreV1().ServiceAccounts(namespace)
	account, err := client.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	lists := func(ref corev1.ObjectReference) bool { return ref.Name == secret }
	if !slices.ContainsFunc(account.Secrets, lists) {
		return nil
	}
	if _, err := t.Client.CoreV1().Secrets(namespace).Get(ctx, secret, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err // it has come back
	}
	account.Secrets = slices.DeleteFunc(account.Secrets, lists)
	_, err = client.Update(ctx, account, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) {
		return fmt.Errorf("ServiceAccount %s/%s was changed meanwhile, retrying", namespace, name) // no event brings this key back
	}
	return err
}

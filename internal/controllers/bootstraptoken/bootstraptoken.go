// Package bootstraptoken looks after bootstrap tokens: it signs kube-public/cluster-info with each of them, so that who has a
// token can tell the cluster from an impostor, and deletes those that have expired. What a token is, it leaves to
// portal/internal/bootstrap.
package bootstraptoken

import (
	"context"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/bootstrap"
	"portal/internal/controllers/queue"
)

// The names that --controllers calls them.
const (
	SignerName  = "bootstrap-signer"
	CleanerName = "token-cleaner"
)

// Controller is the signer or the cleaner.
type Controller struct {
	client         kubernetes.Interface
	secrets, infos cache.SharedIndexInformer // infos is the signer's
	queue          *queue.Queue
	clock          clock.WithTicker
	factories      []informers.SharedInformerFactory
}

// NewSigner makes the signer. The clock is the wall clock if nil.
func NewSigner(client kubernetes.Interface, with clock.WithTicker) (*Controller, error) {
	c := newController(client, with)
	public := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(metav1.NamespacePublic),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "metadata.name=" + bootstrap.ClusterInfo }))
	c.factories = append(c.factories, public)
	c.infos = public.Core().V1().ConfigMaps().Informer()
	c.queue = queue.New(queue.Options{Name: SignerName, Clock: c.clock}, c.sign)
	all := func(any) { c.queue.Add(queue.Key{Namespace: metav1.NamespacePublic, Name: bootstrap.ClusterInfo}) }
	return c, c.follow(all, c.secrets, c.infos)
}

// NewCleaner makes the cleaner. The clock is the wall clock if nil.
func NewCleaner(client kubernetes.Interface, with clock.WithTicker) (*Controller, error) {
	c := newController(client, with)
	c.queue = queue.New(queue.Options{Name: CleanerName, Clock: c.clock}, c.clean)
	return c, c.follow(func(obj any) {
		if secret, ok := obj.(*corev1.Secret); ok {
			c.queue.Add(queue.Key{Namespace: secret.Namespace, Name: secret.Name})
		}
	}, c.secrets)
}

func newController(client kubernetes.Interface, with clock.WithTicker) *Controller {
	if with == nil {
		with = clock.RealClock{}
	}
	system := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(metav1.NamespaceSystem),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = "type=" + string(bootstrap.SecretType) }))
	return &Controller{
		client: client, clock: with, secrets: system.Core().V1().Secrets().Informer(), factories: []informers.SharedInformerFactory{system},
	}
}

func (c *Controller) follow(changed func(any), all ...cache.SharedIndexInformer) error {
	for _, i := range all {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: changed, UpdateFunc: func(_, obj any) { changed(obj) }, DeleteFunc: changed,
		}); err != nil {
			return err
		}
	}
	return nil
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	for _, f := range c.factories {
		f.Start(ctx.Done())
		defer f.Shutdown()
	}
	synced := []cache.InformerSynced{c.secrets.HasSynced}
	if c.infos != nil {
		synced = append(synced, c.infos.HasSynced)
	}
	if cache.WaitForCacheSync(ctx.Done(), synced...) {
		c.queue.Run(ctx, 1)
	}
	return nil
}

// sign makes the signatures in cluster-info those of the tokens that are valid now.
func (c *Controller) sign(ctx context.Context, key queue.Key) (queue.Result, error) {
	found, ok, err := c.infos.GetStore().GetByKey(key.String())
	if err != nil || !ok {
		return queue.Result{}, err
	}
	info, ok := found.(*corev1.ConfigMap)
	text, has := info.Data[bootstrap.KubeconfigKey]
	if !ok || !has {
		return queue.Result{}, nil
	}
	want, again := maps.Clone(info.Data), time.Duration(0)
	maps.DeleteFunc(want, func(key, _ string) bool { return strings.HasPrefix(key, bootstrap.SignaturePrefix) })
	for _, obj := range c.secrets.GetStore().List() {
		secret := obj.(*corev1.Secret)
		token, valid := bootstrap.Signs(secret, c.clock.Now())
		if !valid {
			continue
		}
		want[bootstrap.SignaturePrefix+token.ID] = token.Sign(text)
		if left := bootstrap.Left(secret, c.clock.Now()); left > 0 && (again == 0 || left < again) {
			again = left
		}
	}
	if maps.Equal(want, info.Data) {
		return queue.Result{Again: again}, nil
	}
	next := info.DeepCopy()
	next.Data = want
	_, err = c.client.CoreV1().ConfigMaps(next.Namespace).Update(ctx, next, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return queue.Result{Again: again}, nil // the watch brings it as it is now
	}
	return queue.Result{Writes: 1, Again: again}, err
}

// clean deletes a token that has expired, and comes back to one that will.
func (c *Controller) clean(ctx context.Context, key queue.Key) (queue.Result, error) {
	found, ok, err := c.secrets.GetStore().GetByKey(key.String())
	if err != nil || !ok {
		return queue.Result{}, err
	}
	secret, ok := found.(*corev1.Secret)
	if !ok || !bootstrap.Expired(secret, c.clock.Now()) {
		return queue.Result{Again: bootstrap.Left(secret, c.clock.Now())}, nil
	}
	// Not one that was prolonged meanwhile.
	err = c.client.CoreV1().Secrets(secret.Namespace).Delete(ctx, secret.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &secret.UID, ResourceVersion: &secret.ResourceVersion},
	})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	}
	if err == nil {
		klog.FromContext(ctx).Info("expired bootstrap token deleted", "secret", secret.Name)
	}
	return queue.Result{Writes: 1}, err
}

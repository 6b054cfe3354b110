// Package storagemigration carries out StorageVersionMigrations: it has the API server write every object of a resource anew, which
// stores it in today's version and with today's encryption key. It changes nothing in the objects.
package storagemigration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/storagemigration/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
)

// Name is what --controllers calls it.
const Name = "storage-version-migrator"

const (
	manager = "storage-version-migrator-controller"
	// patience is how long a resource may be missing from discovery: its definition may be new.
	patience   = time.Minute
	again      = 5 * time.Second
	pageSize   = 500
	maxMessage = 1024
	migrations = 1 // at a time
)

// Controller carries out migrations, one after the other.
type Controller struct {
	client    kubernetes.Interface
	metadata  metadata.Interface
	discovery discovery.DiscoveryInterface
	lister    listers.StorageVersionMigrationLister
	synced    cache.InformerSynced
	queue     *queue.Queue
	clock     clock.WithTicker
}

// New makes the controller; factory is started by the caller.
func New(client kubernetes.Interface, metadata metadata.Interface, discovery discovery.DiscoveryInterface, factory informers.SharedInformerFactory, clock clock.WithTicker) (*Controller, error) {
	informer := factory.Storagemigration().V1().StorageVersionMigrations()
	c := &Controller{
		client: client, metadata: metadata, discovery: discovery, clock: clock,
		lister: informer.Lister(), synced: informer.Informer().HasSynced,
	}
	c.queue = queue.New(queue.Options{Name: Name, Clock: clock}, c.sync)
	add := func(obj any) {
		if m, ok := obj.(*storagemigrationv1.StorageVersionMigration); ok && !over(m) {
			c.queue.Add(queue.Key{Name: m.Name})
		}
	}
	_, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, obj any) { add(obj) }})
	return c, err
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), c.synced) {
		return nil
	}
	c.queue.Listed()
	c.queue.Run(ctx, migrations)
	return nil
}

// over says that a migration has ended.
func over(m *storagemigrationv1.StorageVersionMigration) bool {
	return meta.IsStatusConditionTrue(m.Status.Conditions, string(storagemigrationv1.MigrationSucceeded)) ||
		meta.IsStatusConditionTrue(m.Status.Conditions, string(storagemigrationv1.MigrationFailed))
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	m, err := c.lister.Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && over(m) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	m = m.DeepCopy()
	resource, problem, err := c.find(m.Spec.Resource)
	switch {
	case err != nil:
		return queue.Result{}, err
	case problem != "" && c.clock.Since(m.CreationTimestamp.Time) < patience:
		return queue.Result{Again: again}, nil
	case problem != "":
		return c.end(ctx, m, storagemigrationv1.MigrationFailed, "Unsuitable", problem)
	}
	if !meta.IsStatusConditionTrue(m.Status.Conditions, string(storagemigrationv1.MigrationRunning)) {
		begun, err := c.begin(ctx, m, resource)
		if err != nil {
			return c.fail(ctx, m, err)
		} else if begun == nil {
			return queue.Result{}, nil
		}
		m = begun
	}
	before, err := c.definition(ctx, resource)
	if err != nil {
		return c.fail(ctx, m, fmt.Errorf("definition of %s: %w", resource.Resource, err))
	}
	if err := c.rewrite(ctx, resource); err != nil {
		return c.fail(ctx, m, fmt.Errorf("migrate %s: %w", resource.Resource, err))
	}
	if before != nil {
		if err := c.forgetVersions(ctx, resource, before.Metadata.Generation); err != nil {
			return c.fail(ctx, m, fmt.Errorf("stored versions of %s: %w", resource.Resource, err))
		}
	}
	klog.FromContext(ctx).Info("storage migrated", "migration", m.Name, "resource", resource.GroupResource())
	return c.end(ctx, m, storagemigrationv1.MigrationSucceeded, "Migrated", "every object was written anew")
}

// find is the resource as the API server prefers it, or why it cannot be migrated.
func (c *Controller) find(wanted metav1.GroupResource) (found schema.GroupVersionResource, problem string, err error) {
	lists, failure := c.discovery.ServerPreferredResources()
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil || version.Group != wanted.Group {
			continue
		}
		for _, r := range list.APIResources {
			if r.Name != wanted.Resource {
				continue
			}
			if !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "patch") {
				return found, fmt.Sprintf("%s cannot be listed and patched", wanted.Resource), nil
			}
			return version.WithResource(r.Name), "", nil
		}
	}
	if failure != nil {
		return found, "", failure // it may be among those that were not told
	}
	return found, "the API server does not serve this resource", nil
}

// begin says that the migration runs, and up to which version objects are to be written. A conflict means that the cache is old.
func (c *Controller) begin(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, resource schema.GroupVersionResource) (*storagemigrationv1.StorageVersionMigration, error) {
	page, err := c.metadata.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, err
	}
	if m.Status.ResourceVersion == "" {
		m.Status.ResourceVersion = page.ResourceVersion
	}
	c.set(m, storagemigrationv1.MigrationRunning, metav1.ConditionTrue, "Started", "objects are being written")
	return c.write(ctx, m)
}

// fail ends the migration if an error will not go away.
func (c *Controller) fail(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, err error) (queue.Result, error) {
	if !permanent(err) {
		return queue.Result{}, err
	}
	klog.FromContext(ctx).Info("storage migration failed", "migration", m.Name, "err", err)
	message := err.Error()
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage], "") + " ..."
	}
	return c.end(ctx, m, storagemigrationv1.MigrationFailed, "Refused", message)
}

// permanent says that the API server refused a request for what it asks, and not because of the moment it was made in. What is not
// found is looked for again.
func permanent(err error) bool {
	var refused apierrors.APIStatus
	if !errors.As(err, &refused) {
		return false
	}
	switch code := refused.Status().Code; code {
	case http.StatusUnauthorized, http.StatusNotFound, http.StatusRequestTimeout, http.StatusConflict, http.StatusGone, http.StatusTooManyRequests:
		return false
	default:
		return code >= 400 && code < 500
	}
}

// end says how the migration ended.
func (c *Controller) end(ctx context.Context, m *storagemigrationv1.StorageVersionMigration, how storagemigrationv1.MigrationConditionType, reason, message string) (queue.Result, error) {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		c.set(m, storagemigrationv1.MigrationRunning, metav1.ConditionFalse, reason, message)
		c.set(m, how, metav1.ConditionTrue, reason, message)
		_, failure := c.write(ctx, m)
		if !apierrors.IsConflict(failure) {
			return failure
		}
		// Somebody changed it meanwhile, which is no reason to write the objects once more.
		now, err := c.client.StoragemigrationV1().StorageVersionMigrations().Get(ctx, m.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && (now.UID != m.UID || over(now)) {
			return nil
		} else if err != nil {
			return err
		}
		m = now
		return failure
	})
	return queue.Result{Writes: 1}, err
}

func (c *Controller) set(m *storagemigrationv1.StorageVersionMigration, of storagemigrationv1.MigrationConditionType, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
		Type: string(of), Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(c.clock.Now()),
	})
}

// write writes the status; nil if the migration is gone.
func (c *Controller) write(ctx context.Context, m *storagemigrationv1.StorageVersionMigration) (*storagemigrationv1.StorageVersionMigration, error) {
	written, err := c.client.StoragemigrationV1().StorageVersionMigrations().UpdateStatus(ctx, m, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return written, err
}

// rewrite has every object written. One that changed or went meanwhile needs nothing: it was written.
func (c *Controller) rewrite(ctx context.Context, resource schema.GroupVersionResource) error {
	options := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := c.metadata.Resource(resource).List(ctx, options)
		if next := resumed(err); options.Continue != "" && next != "" {
			options.Continue = next
			continue
		}
		if err != nil {
			return err
		}
		for i := range page.Items {
			if err := c.touch(ctx, resource, &page.Items[i]); err != nil {
				return err
			}
		}
		if options.Continue = page.Continue; options.Continue == "" {
			return nil
		}
	}
}

// resumed is where a list goes on, of the objects as they are now, that took so long that the rest of it as it was is gone; "": nowhere.
func resumed(err error) string {
	var expired apierrors.APIStatus
	if !apierrors.IsResourceExpired(err) || !errors.As(err, &expired) {
		return ""
	}
	return expired.Status().Continue
}

// touch changes nothing in an object, on the condition that it is as it was listed: the API server stores it anew if it would
// store it otherwise today.
func (c *Controller) touch(ctx context.Context, resource schema.GroupVersionResource, item *metav1.PartialObjectMetadata) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": item.UID, "resourceVersion": item.ResourceVersion},
	})
	if err != nil {
		return err
	}
	_, err = c.metadata.Resource(resource).Namespace(item.Namespace).Patch(ctx, item.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: manager})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// definition is what is read of a CustomResourceDefinition.
type definition struct {
	Metadata struct {
		ResourceVersion string
		Generation      int64
	}
	Spec struct {
		Versions []struct {
			Name    string
			Storage bool
		}
	}
	Status struct{ StoredVersions []string }
}

func definitionPath(resource schema.GroupVersionResource) string {
	return "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + resource.GroupResource().String()
}

// definition reads the definition of a custom resource; nil for a resource of the API server itself.
func (c *Controller) definition(ctx context.Context, resource schema.GroupVersionResource) (*definition, error) {
	data, err := c.client.Discovery().RESTClient().Get().AbsPath(definitionPath(resource)).SetHeader("Accept", "application/json").DoRaw(ctx)
	if apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	found := &definition{}
	return found, json.Unmarshal(data, found)
}

// forgetVersions says in the definition of a custom resource that objects are stored in today's version only, unless the definition
// has changed since they were written.
func (c *Controller) forgetVersions(ctx context.Context, resource schema.GroupVersionResource, generation int64) error {
	now, err := c.definition(ctx, resource)
	if err != nil || now == nil {
		return err
	}
	if now.Metadata.Generation != generation {
		return errors.New("the definition changed meanwhile")
	}
	for _, version := range now.Spec.Versions {
		if !version.Storage || slices.Equal(now.Status.StoredVersions, []string{version.Name}) {
			continue
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"resourceVersion": now.Metadata.ResourceVersion},
			"status":   map[string]any{"storedVersions": []string{version.Name}},
		})
		if err != nil {
			return err
		}
		return c.client.Discovery().RESTClient().Patch(types.MergePatchType).AbsPath(definitionPath(resource), "status").Body(patch).Do(ctx).Error()
	}
	return nil
}

package namespace

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storageerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"
)

// main is what the namespaces resource answers as others do. Deleting is not among it, nor deleting a whole
// collection, which namespaces don't offer.
type main interface {
	rest.Storage
	rest.Scoper
	rest.SingularNameProvider
	rest.ShortNamesProvider
	rest.StorageVersionProvider
	rest.ResetFieldsStrategy
	rest.Getter
	rest.Lister
	rest.Watcher
	rest.Creater
	rest.Updater
	rest.CorruptObjectDeleterProvider
}

// namespaceREST answers requests to namespaces.
type namespaceREST struct {
	main
	store *genericregistry.Store
}

// updates is what the finalize subresource answers: it can be written, and is read with the namespace.
type updates interface {
	rest.Storage
	rest.Updater
	rest.ResetFieldsStrategy
}

type finalizeREST struct{ updates }

var (
	_ rest.Patcher         = &namespaceREST{}
	_ rest.GracefulDeleter = &namespaceREST{}
)

// Delete marks a namespace as terminating. Only a later delete, or the update that removes its last finalizer, takes
// it away.
func (r *namespaceREST) Delete(ctx context.Context, name string, allowed rest.ValidateObjectFunc,
	options *metav1.DeleteOptions) (runtime.Object, bool, error) {
	obj, err := r.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, false, err
	}
	ns := obj.(*corev1.Namespace)
	if options == nil {
		options = metav1.NewDeleteOptions(0)
	}
	if err := r.pin(options, ns); err != nil {
		return nil, false, err
	}
	if ns.DeletionTimestamp.IsZero() {
		out, err := r.terminate(ctx, name, allowed, options)
		return out, false, err
	}
	if len(ns.Spec.Finalizers) != 0 {
		return ns, false, nil
	}
	return r.store.Delete(ctx, name, allowed, options)
}

// pin checks the preconditions, and makes the namespace that was found one of them: it must not be another one of the
// same name that goes.
func (r *namespaceREST) pin(options *metav1.DeleteOptions, ns *corev1.Namespace) error {
	if options.Preconditions == nil {
		options.Preconditions = &metav1.Preconditions{}
	}
	p := options.Preconditions
	if p.UID == nil {
		p.UID = &ns.UID
	}
	if *p.UID != ns.UID {
		return r.conflict(ns.Name, "UID", *p.UID, ns.UID)
	}
	if p.ResourceVersion != nil && *p.ResourceVersion != ns.ResourceVersion {
		return r.conflict(ns.Name, "resourceVersion", *p.ResourceVersion, ns.ResourceVersion)
	}
	return nil
}

func (r *namespaceREST) conflict(name, what string, asked, is any) error {
	return apierrors.NewConflict(r.store.DefaultQualifiedResource, name, fmt.Errorf("the request is for %s %v, it has %v", what, asked, is))
}

func (r *namespaceREST) terminate(ctx context.Context, name string, allowed rest.ValidateObjectFunc,
	options *metav1.DeleteOptions) (runtime.Object, error) {
	key, err := r.store.KeyFunc(ctx, name)
	if err != nil {
		return nil, err
	}
	must := storage.Preconditions{UID: options.Preconditions.UID, ResourceVersion: options.Preconditions.ResourceVersion}
	mark := storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		ns := obj.(*corev1.Namespace)
		if allowed != nil {
			if err := allowed(ctx, ns); err != nil {
				return nil, err
			}
		}
		if ns.DeletionTimestamp.IsZero() {
			now := metav1.Now()
			ns.DeletionTimestamp = &now
		}
		ns.Status.Phase = corev1.NamespaceTerminating
		ns.Finalizers = propagate(ns.Finalizers, options)
		return ns, nil
	})
	out := r.store.NewFunc()
	err = r.store.Storage.GuaranteedUpdate(ctx, key, out, false, &must, mark, dryrun.IsDryRun(options.DryRun), nil)
	if err == nil {
		return out, nil
	}
	err = storageerr.InterpretGetError(err, r.store.DefaultQualifiedResource, name)
	err = storageerr.InterpretUpdateError(err, r.store.DefaultQualifiedResource, name)
	if _, told := err.(apierrors.APIStatus); !told {
		err = apierrors.NewInternalError(err)
	}
	return nil, err
}

// propagate sets the finalizers that tell the garbage collector what to do with dependents, as the request asks; a
// request that doesn't say leaves them as they are.
func propagate(finalizers []string, options *metav1.DeleteOptions) []string {
	var orphan, foreground bool
	switch {
	case options.OrphanDependents != nil:
		orphan = *options.OrphanDependents
		foreground = !orphan
	case options.PropagationPolicy != nil:
		orphan = *options.PropagationPolicy == metav1.DeletePropagationOrphan
		foreground = *options.PropagationPolicy == metav1.DeletePropagationForeground
	default:
		return finalizers
	}
	set := func(list []string, name string, want bool) []string {
		list = slices.DeleteFunc(list, func(f string) bool { return f == name })
		if want {
			list = append(list, name)
		}
		return list
	}
	finalizers = set(finalizers, metav1.FinalizerOrphanDependents, orphan)
	return set(finalizers, metav1.FinalizerDeleteDependents, foreground)
}

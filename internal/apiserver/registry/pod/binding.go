package pod

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storageerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"

	"portal/internal/apiserver/registry/rules"
)

// bindingREST gives a Pod its node, once.
type bindingREST struct{ store *genericregistry.Store }

var (
	_ rest.Storage                        = &bindingREST{}
	_ rest.Scoper                         = &bindingREST{}
	_ rest.NamedCreater                   = &bindingREST{}
	_ rest.SubresourceObjectMetaPreserver = &bindingREST{}
)

// New returns an empty Binding.
func (r *bindingREST) New() runtime.Object { return &corev1.Binding{} }

// Destroy does nothing: the main resource owns the store.
func (r *bindingREST) Destroy() {}

// NamespaceScoped says yes, as for Pods.
func (r *bindingREST) NamespaceScoped() bool { return true }

// PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate keeps UID and resourceVersion of the request: they are
// preconditions here.
func (r *bindingREST) PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate() bool { return true }

// Create binds the Pod called name to the node that the Binding says.
func (r *bindingREST) Create(ctx context.Context, name string, obj runtime.Object, allowed rest.ValidateObjectFunc,
	options *metav1.CreateOptions) (runtime.Object, error) {
	binding, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("a Binding is wanted, not %T", obj))
	}
	if binding.Name != name {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the Binding's name is %q, the URL's %q", binding.Name, name))
	}
	if errs := validateBinding(binding); len(errs) > 0 {
		return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Binding").GroupKind(), name, errs)
	}
	if allowed != nil {
		if err := allowed(ctx, binding.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	if err := r.bind(ctx, binding, dryrun.IsDryRun(options.DryRun)); err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

func validateBinding(binding *corev1.Binding) field.ErrorList {
	kind, name := field.NewPath("target", "kind"), field.NewPath("target", "name")
	// They are copied to the Pod, which could not be updated any more if they were wrong.
	errs := metavalidation.ValidateLabels(binding.Labels, field.NewPath("metadata", "labels"))
	errs = append(errs, apivalidation.ValidateAnnotations(binding.Annotations, field.NewPath("metadata", "annotations"))...)
	node := binding.Target.Kind == "" || binding.Target.Kind == "Node"
	if !node {
		errs = append(errs, field.NotSupported(kind, binding.Target.Kind, []string{"Node"}))
	}
	switch {
	case binding.Target.Name == "":
		errs = append(errs, field.Required(name, ""))
	case node:
		errs = append(errs, rules.NodeName(name, binding.Target.Name)...)
	}
	return errs
}

func (r *bindingREST) bind(ctx context.Context, binding *corev1.Binding, dryRun bool) error {
	key, err := r.store.KeyFunc(ctx, binding.Name)
	if err != nil {
		return err
	}
	must := &storage.Preconditions{}
	if binding.UID != "" {
		must.UID = &binding.UID
	}
	if binding.ResourceVersion != "" {
		must.ResourceVersion = &binding.ResourceVersion
	}
	assign := storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		pod := obj.(*corev1.Pod)
		return pod, assignNode(pod, binding)
	})
	err = r.store.Storage.GuaranteedUpdate(ctx, key, &corev1.Pod{}, false, must, assign, dryRun, nil)
	if err == nil {
		return nil
	}
	err = storageerr.InterpretGetError(err, corev1.Resource("pods"), binding.Name)
	err = storageerr.InterpretUpdateError(err, corev1.Resource("pods"), binding.Name)
	if _, told := err.(apierrors.APIStatus); !told {
		err = apierrors.NewConflict(corev1.Resource("pods/binding"), binding.Name, err)
	}
	return err
}

func assignNode(pod *corev1.Pod, binding *corev1.Binding) error {
	switch {
	case pod.DeletionTimestamp != nil:
		return fmt.Errorf("pod %s is being deleted and gets no node any more", pod.Name)
	case pod.Spec.NodeName != "":
		return fmt.Errorf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName)
	case len(pod.Spec.SchedulingGates) > 0:
		return fmt.Errorf("pod %s waits at spec.schedulingGates", pod.Name)
	}
	pod.Spec.NodeName = binding.Target.Name
	pod.Status.NominatedNodeName = ""
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	maps.Copy(pod.Annotations, binding.Annotations)
	for _, key := range obsolete {
		delete(pod.Annotations, key)
	}
	if pod.Labels == nil && len(binding.Labels) > 0 {
		pod.Labels = map[string]string{}
	}
	maps.Copy(pod.Labels, binding.Labels)
	setCondition(&pod.Status, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue})
	return nil
}

package disruption

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/membership"
)

// Owners are those who make Pods. Of kinds that are not cached the scale subresource is asked.
type Owners struct {
	Client    kubernetes.Interface
	Discovery discovery.DiscoveryInterface
	// Deployments, ReplicaSets, StatefulSets and ReplicationControllers are caches.
	Deployments, ReplicaSets, StatefulSets, ReplicationControllers cache.SharedIndexInformer
}

var (
	replicaSet  = schema.GroupKind{Group: appsv1.GroupName, Kind: "ReplicaSet"}
	statefulSet = schema.GroupKind{Group: appsv1.GroupName, Kind: "StatefulSet"}
	deployment  = schema.GroupKind{Group: appsv1.GroupName, Kind: "Deployment"}
	controller  = schema.GroupKind{Group: corev1.GroupName, Kind: "ReplicationController"}
)

// follow has a function called with the namespace in which an owner wants another number of Pods.
func (o Owners) follow(changed func(namespace string)) error {
	for _, informer := range []cache.SharedIndexInformer{o.Deployments, o.ReplicaSets, o.StatefulSets, o.ReplicationControllers} {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			UpdateFunc: func(old, obj any) {
				_, before := replicas(old)
				if meta, now := replicas(obj); now != before {
					changed(meta.GetNamespace())
				}
			},
			DeleteFunc: func(obj any) {
				if meta := membership.Deleted[metav1.Object](obj); meta != nil {
					changed(meta.GetNamespace())
				}
			},
		}); err != nil {
			return err
		}
	}
	return nil
}

// replicas is how many Pods an owner wants.
func replicas(obj any) (metav1.Object, int32) {
	var wants *int32
	switch o := obj.(type) {
	case *appsv1.Deployment:
		wants = o.Spec.Replicas
	case *appsv1.ReplicaSet:
		wants = o.Spec.Replicas
	case *appsv1.StatefulSet:
		wants = o.Spec.Replicas
	case *corev1.ReplicationController:
		wants = o.Spec.Replicas
	}
	if wants == nil {
		return obj.(metav1.Object), 1
	}
	return obj.(metav1.Object), *wants
}

// scale is how many Pods an owner wants, or that which owns it: a Deployment has several ReplicaSets for the time of a
// rollout, and together they want what it wants.
func (o Owners) scale(ctx context.Context, namespace string, ref *metav1.OwnerReference) (types.UID, int32, error) {
	version, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return "", 0, err
	}
	kind := version.WithKind(ref.Kind).GroupKind()
	caches := map[schema.GroupKind]cache.SharedIndexInformer{
		replicaSet: o.ReplicaSets, statefulSet: o.StatefulSets, deployment: o.Deployments, controller: o.ReplicationControllers,
	}
	known := caches[kind]
	if known == nil {
		return o.ask(ctx, namespace, version, ref)
	}
	obj, exists, err := known.GetIndexer().GetByKey(namespace + "/" + ref.Name)
	if err != nil {
		return "", 0, err
	}
	if !exists {
		return "", 0, fmt.Errorf("%s %s: %w", ref.Kind, ref.Name, errNoOwner)
	}
	meta, wants := replicas(obj)
	if meta.GetUID() != ref.UID {
		return "", 0, fmt.Errorf("%s %s: %w", ref.Kind, ref.Name, errNoOwner)
	}
	// Owners can form a ring: a Deployment ends it.
	if above := metav1.GetControllerOfNoCopy(meta); kind == replicaSet && above != nil && schema.FromAPIVersionAndKind(above.APIVersion, above.Kind).GroupKind() == deployment {
		return o.scale(ctx, namespace, above)
	}
	return meta.GetUID(), wants, nil
}

var errNoOwner = errors.New("it is gone")

// ask reads the scale subresource of an owner.
func (o Owners) ask(ctx context.Context, namespace string, version schema.GroupVersion, ref *metav1.OwnerReference) (types.UID, int32, error) {
	if wrong := path.IsValidPathSegmentName(ref.Name); len(wrong) > 0 {
		return "", 0, fmt.Errorf("%q is no name: %s", ref.Name[:min(len(ref.Name), 64)], wrong[0])
	}
	list, err := o.Discovery.ServerResourcesForGroupVersion(version.String())
	if err != nil {
		return "", 0, err
	}
	plural, scales := "", map[string]bool{}
	for _, r := range list.APIResources {
		if name, sub, found := strings.Cut(r.Name, "/"); found {
			scales[name] = scales[name] || sub == "scale"
		} else if r.Kind == ref.Kind {
			plural = r.Name
		}
	}
	if plural == "" || !scales[plural] {
		return "", 0, fmt.Errorf("%s in %s has no scale subresource", ref.Kind, version)
	}
	scale := &autoscalingv1.Scale{}
	prefix := "/apis"
	if version.Group == "" {
		prefix = "/api"
	}
	// The kind is none that the client has methods for, and may be one that is only served as JSON.
	data, err := o.Client.Discovery().RESTClient().Get().AbsPath(prefix, version.String(), "namespaces", namespace, plural, ref.Name, "scale").
		SetHeader("Accept", "application/json").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(data, scale)
	}
	switch {
	case apierrors.IsNotFound(err):
		return "", 0, fmt.Errorf("%s %s: %w", ref.Kind, ref.Name, errNoOwner)
	case err != nil:
		return "", 0, err
	case scale.UID != "" && scale.UID != ref.UID:
		return "", 0, fmt.Errorf("%s %s: %w", ref.Kind, ref.Name, errNoOwner)
	}
	return ref.UID, scale.Spec.Replicas, nil
}

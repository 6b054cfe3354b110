package noderestriction

import (
	"context"
	"maps"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"

	"portal/internal/apiserver/authz/nodes"
)

// pod lets a node create mirror Pods of its own, and delete, evict and report Pods that are on it.
func (r *Restriction) pod(ctx context.Context, node string, a admission.Attributes) error {
	operation := a.GetOperation()
	switch sub := a.GetSubresource(); {
	case sub == "" && operation == admission.Create:
		return r.mirror(ctx, node, a)
	case sub == "" && operation == admission.Delete, sub == "eviction" && operation == admission.Create:
		pod, err := r.podOf(ctx, a, a.GetName())
		if err != nil {
			return err
		}
		if pod.Spec.NodeName != node {
			return forbid(a, "the Pod is not on this node")
		}
		return nil
	case sub == "status" && operation == admission.Update:
		return status(node, a)
	}
	return forbid(a, "a node creates mirror Pods, and deletes, evicts and reports Pods that are on it; nothing else")
}

// status keeps a node from labelling a Pod through its status, and from giving it claims.
func status(node string, a admission.Attributes) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	old, oldOK := a.GetOldObject().(*corev1.Pod)
	switch {
	case !ok || !oldOK:
		return forbid(a, "a Pod is expected, not %T", a.GetObject())
	case old.Spec.NodeName != node:
		return forbid(a, "the Pod is not on this node")
	case !maps.Equal(pod.Labels, old.Labels):
		return forbid(a, "metadata.labels: cannot be changed through the status")
	case !equality.Semantic.DeepEqual(pod.Status.ResourceClaimStatuses, old.Status.ResourceClaimStatuses),
		!equality.Semantic.DeepEqual(pod.Status.ExtendedResourceClaimStatus, old.Status.ExtendedResourceClaimStatus),
		!equality.Semantic.DeepEqual(pod.Status.NodeAllocatableResourceClaimStatuses, old.Status.NodeAllocatableResourceClaimStatuses):
		return forbid(a, "status: a node does not change which resource claims a Pod has")
	}
	return nil
}

// mirror checks a Pod that a node creates: it must stand for one that runs there already, and give the node nothing.
func (r *Restriction) mirror(ctx context.Context, node string, a admission.Attributes) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return forbid(a, "a Pod is expected, not %T", a.GetObject())
	}
	if _, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; !ok {
		return forbid(a, "metadata.annotations: a node creates mirror Pods only, which have %s", corev1.MirrorPodAnnotationKey)
	}
	if pod.Spec.NodeName != node {
		return forbid(a, "spec.nodeName: must be %s", node)
	}
	if err := r.owner(ctx, node, pod, a); err != nil {
		return err
	}
	if what := refersTo(pod); what != "" {
		return forbid(a, "spec: a mirror Pod refers to no other objects, but this one to %s", what)
	}
	return nil
}

// owner requires the node, and nothing else, to be the mirror Pod's owner.
func (r *Restriction) owner(ctx context.Context, node string, pod *corev1.Pod, a admission.Attributes) error {
	if len(pod.OwnerReferences) != 1 {
		return forbid(a, "metadata.ownerReferences: must be the node alone")
	}
	owner := pod.OwnerReferences[0]
	switch {
	case owner.APIVersion != "v1" || owner.Kind != "Node" || owner.Name != node:
		return forbid(a, "metadata.ownerReferences: must be the node alone")
	case owner.Controller == nil || !*owner.Controller:
		return forbid(a, "metadata.ownerReferences[0].controller: must be true")
	case owner.BlockOwnerDeletion != nil && *owner.BlockOwnerDeletion:
		return forbid(a, "metadata.ownerReferences[0].blockOwnerDeletion: must not be true")
	}
	obj, err := r.Nodes.Get(ctx, node, &metav1.GetOptions{})
	if err != nil {
		return err
	}
	if stored, ok := obj.(*corev1.Node); !ok || stored.UID != owner.UID {
		return forbid(a, "metadata.ownerReferences[0].uid: is not that of the Node")
	}
	return nil
}

// plain are the kinds of volumes that a mirror Pod may have, by their field's name: those that are no objects of the API.
// Secrets for them are found as references.
var plain = map[string]bool{
	"AWSElasticBlockStore": true, "AzureDisk": true, "CephFS": true, "Cinder": true, "DownwardAPI": true, "EmptyDir": true, "FC": true,
	"FlexVolume": true, "Flocker": true, "GCEPersistentDisk": true, "GitRepo": true, "HostPath": true, "Image": true, "ISCSI": true,
	"NFS": true, "PhotonPersistentDisk": true, "PortworxVolume": true, "Quobyte": true, "RBD": true, "ScaleIO": true, "StorageOS": true,
	"VsphereVolume": true,
}

var kinds = map[nodes.Kind]string{
	nodes.Secret: "Secret", nodes.ConfigMap: "ConfigMap", nodes.ServiceAccount: "ServiceAccount",
	nodes.VolumeClaim: "PersistentVolumeClaim", nodes.ResourceClaim: "ResourceClaim",
}

// refersTo names an object, or a kind of objects, that a Pod refers to. Kinds of volumes that are not known here may.
func refersTo(pod *corev1.Pod) string {
	if refs := nodes.References(pod); len(refs) > 0 {
		return kinds[refs[0].Kind] + " " + refs[0].Name
	}
	if len(pod.Spec.ResourceClaims) > 0 {
		return "resource claims"
	}
	for _, v := range pod.Spec.Volumes {
		source := reflect.ValueOf(v.VolumeSource)
		for i := range source.NumField() {
			name := source.Type().Field(i).Name
			if source.Field(i).IsNil() || plain[name] || name == "Projected" && onlyDownward(v.Projected) {
				continue
			}
			return "what volume " + v.Name + " needs"
		}
	}
	return ""
}

func onlyDownward(p *corev1.ProjectedVolumeSource) bool {
	for _, source := range p.Sources {
		if source.DownwardAPI == nil {
			return false
		}
	}
	return true
}

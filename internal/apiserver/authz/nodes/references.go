package nodes

import corev1 "k8s.io/api/core/v1"

// Kind is a kind of object that a Pod's node needs to run the Pod.
type Kind uint8

// What a Pod can refer to, and the Pod itself.
const (
	Pod Kind = iota
	Secret
	ConfigMap
	ServiceAccount
	VolumeClaim
	ResourceClaim
)

// Reference is an object in the namespace of the Pod that refers to it.
type Reference struct {
	Kind Kind
	Name string
}

// References are what a Pod refers to, each once: the objects that its node may read.
func References(pod *corev1.Pod) []Reference {
	var r references
	r.add(ServiceAccount, pod.Spec.ServiceAccountName)
	for _, pull := range pod.Spec.ImagePullSecrets {
		r.add(Secret, pull.Name)
	}
	for i := range pod.Spec.InitContainers {
		r.environment(pod.Spec.InitContainers[i].Env, pod.Spec.InitContainers[i].EnvFrom)
	}
	for i := range pod.Spec.Containers {
		r.environment(pod.Spec.Containers[i].Env, pod.Spec.Containers[i].EnvFrom)
	}
	for i := range pod.Spec.EphemeralContainers {
		r.environment(pod.Spec.EphemeralContainers[i].Env, pod.Spec.EphemeralContainers[i].EnvFrom)
	}
	for i := range pod.Spec.Volumes {
		r.volume(pod, &pod.Spec.Volumes[i])
	}
	r.resourceClaims(pod)
	return r.list
}

type references struct {
	list []Reference
	seen map[Reference]bool
}

func (r *references) add(kind Kind, name string) {
	ref := Reference{kind, name}
	if name == "" || r.seen[ref] {
		return
	}
	if r.seen == nil {
		r.seen = map[Reference]bool{}
	}
	r.seen[ref] = true
	r.list = append(r.list, ref)
}

func (r *references) environment(env []corev1.EnvVar, from []corev1.EnvFromSource) {
	for _, e := range from {
		if e.SecretRef != nil {
			r.add(Secret, e.SecretRef.Name)
		}
		if e.ConfigMapRef != nil {
			r.add(ConfigMap, e.ConfigMapRef.Name)
		}
	}
	for _, e := range env {
		if e.ValueFrom == nil {
			continue
		}
		if e.ValueFrom.SecretKeyRef != nil {
			r.add(Secret, e.ValueFrom.SecretKeyRef.Name)
		}
		if e.ValueFrom.ConfigMapKeyRef != nil {
			r.add(ConfigMap, e.ValueFrom.ConfigMapKeyRef.Name)
		}
	}
}

func (r *references) volume(pod *corev1.Pod, v *corev1.Volume) {
	secret := func(ref *corev1.LocalObjectReference) {
		if ref != nil {
			r.add(Secret, ref.Name)
		}
	}
	switch {
	case v.Secret != nil:
		r.add(Secret, v.Secret.SecretName)
	case v.ConfigMap != nil:
		r.add(ConfigMap, v.ConfigMap.Name)
	case v.Projected != nil:
		for _, source := range v.Projected.Sources {
			if source.Secret != nil {
				r.add(Secret, source.Secret.Name)
			}
			if source.ConfigMap != nil {
				r.add(ConfigMap, source.ConfigMap.Name)
			}
		}
	case v.PersistentVolumeClaim != nil:
		r.add(VolumeClaim, v.PersistentVolumeClaim.ClaimName)
	case v.Ephemeral != nil:
		r.add(VolumeClaim, pod.Name+"-"+v.Name)
	case v.CSI != nil:
		secret(v.CSI.NodePublishSecretRef)
	case v.AzureFile != nil:
		r.add(Secret, v.AzureFile.SecretName)
	case v.CephFS != nil:
		secret(v.CephFS.SecretRef)
	case v.Cinder != nil:
		secret(v.Cinder.SecretRef)
	case v.FlexVolume != nil:
		secret(v.FlexVolume.SecretRef)
	case v.RBD != nil:
		secret(v.RBD.SecretRef)
	case v.ScaleIO != nil:
		secret(v.ScaleIO.SecretRef)
	case v.ISCSI != nil:
		secret(v.ISCSI.SecretRef)
	case v.StorageOS != nil:
		secret(v.StorageOS.SecretRef)
	}
}

// resourceClaims are those that exist already, or that were made for the Pod: their names are in its status.
func (r *references) resourceClaims(pod *corev1.Pod) {
	for _, claim := range pod.Spec.ResourceClaims {
		if claim.ResourceClaimName != nil {
			r.add(ResourceClaim, *claim.ResourceClaimName)
			continue
		}
		for _, made := range pod.Status.ResourceClaimStatuses {
			if made.Name == claim.Name && made.ResourceClaimName != nil {
				r.add(ResourceClaim, *made.ResourceClaimName)
			}
		}
	}
	if made := pod.Status.ExtendedResourceClaimStatus; made != nil {
		r.add(ResourceClaim, made.ResourceClaimName)
	}
}

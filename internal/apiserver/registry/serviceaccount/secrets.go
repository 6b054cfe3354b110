package serviceaccount

import (
	"fmt"
	"iter"

	corev1 "k8s.io/api/core/v1"
)

// secretUse is a place in a Pod that names a Secret. enforced are those that the annotation enforceMountable is about.
type secretUse struct {
	name, field string
	enforced    bool
}

// secretsOf are the Secrets that a Pod names: all, or those of its ephemeral containers.
func secretsOf(pod *corev1.Pod, all bool) iter.Seq[secretUse] {
	return func(yield func(secretUse) bool) {
		for i := range pod.Spec.EphemeralContainers {
			c := (*corev1.Container)(&pod.Spec.EphemeralContainers[i].EphemeralContainerCommon)
			if !containerSecrets(c, fmt.Sprintf("spec.ephemeralContainers[%d]", i), yield) {
				return
			}
		}
		if !all {
			return
		}
		for i, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for j := range containers {
				if !containerSecrets(&containers[j], fmt.Sprintf("spec.%s[%d]", []string{"initContainers", "containers"}[i], j), yield) {
					return
				}
			}
		}
		for i, pull := range pod.Spec.ImagePullSecrets {
			if !yield(secretUse{name: pull.Name, field: fmt.Sprintf("spec.imagePullSecrets[%d]", i)}) {
				return
			}
		}
		for i := range pod.Spec.Volumes {
			if !volumeSecrets(&pod.Spec.Volumes[i].VolumeSource, fmt.Sprintf("spec.volumes[%d]", i), yield) {
				return
			}
		}
	}
}

func containerSecrets(c *corev1.Container, at string, yield func(secretUse) bool) bool {
	for i, env := range c.EnvFrom {
		if env.SecretRef != nil && !yield(secretUse{env.SecretRef.Name, fmt.Sprintf("%s.envFrom[%d]", at, i), true}) {
			return false
		}
	}
	for i, env := range c.Env {
		if env.ValueFrom != nil && env.ValueFrom.SecretKeyRef != nil &&
			!yield(secretUse{env.ValueFrom.SecretKeyRef.Name, fmt.Sprintf("%s.env[%d]", at, i), true}) {
			return false
		}
	}
	return true
}

// volumeSecrets are those of a volume: what is mounted, and what a driver needs to mount it.
func volumeSecrets(v *corev1.VolumeSource, at string, yield func(secretUse) bool) bool {
	driver := func(ref *corev1.LocalObjectReference) bool {
		return ref == nil || yield(secretUse{name: ref.Name, field: at})
	}
	switch {
	case v.Secret != nil:
		return yield(secretUse{v.Secret.SecretName, at + ".secret", true})
	case v.Projected != nil:
		for i, source := range v.Projected.Sources {
			if source.Secret != nil && !yield(secretUse{name: source.Secret.Name, field: fmt.Sprintf("%s.projected.sources[%d]", at, i)}) {
				return false
			}
		}
	case v.AzureFile != nil:
		return v.AzureFile.SecretName == "" || yield(secretUse{name: v.AzureFile.SecretName, field: at})
	case v.CephFS != nil:
		return driver(v.CephFS.SecretRef)
	case v.Cinder != nil:
		return driver(v.Cinder.SecretRef)
	case v.FlexVolume != nil:
		return driver(v.FlexVolume.SecretRef)
	case v.RBD != nil:
		return driver(v.RBD.SecretRef)
	case v.ISCSI != nil:
		return driver(v.ISCSI.SecretRef)
	case v.ScaleIO != nil:
		return driver(v.ScaleIO.SecretRef)
	case v.StorageOS != nil:
		return driver(v.StorageOS.SecretRef)
	case v.CSI != nil:
		return driver(v.CSI.NodePublishSecretRef)
	}
	return true
}

package statefulset

import (
	"fmt"
	"maps"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/controllers/workload"
)

// newPod is the Pod with an ordinal, from the template of a revision.
func newPod(set *appsv1.StatefulSet, template *corev1.PodTemplateSpec, ordinal int, revision string) *corev1.Pod {
	pod := workload.NewPod(template, set, metav1.NewControllerRef(set, Kind))
	pod.GenerateName = ""
	pod.Name = fmt.Sprintf("%s-%d", set.Name, ordinal)
	pod.Spec.Hostname, pod.Spec.Subdomain = pod.Name, set.Spec.ServiceName
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	maps.Copy(pod.Labels, identity(pod.Name, ordinal))
	pod.Labels[appsv1.ControllerRevisionHashLabelKey] = revision
	claims := map[string]bool{}
	var volumes []corev1.Volume
	for i := range set.Spec.VolumeClaimTemplates {
		name := set.Spec.VolumeClaimTemplates[i].Name
		claims[name] = true
		volumes = append(volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName(name, pod.Name)},
		}})
	}
	for _, v := range pod.Spec.Volumes {
		if !claims[v.Name] {
			volumes = append(volumes, v)
		}
	}
	pod.Spec.Volumes = volumes
	return pod
}

// identity are the labels that tell a Pod from the others of its set.
func identity(name string, ordinal int) map[string]string {
	return map[string]string{appsv1.StatefulSetPodNameLabel: name, appsv1.PodIndexLabel: strconv.Itoa(ordinal)}
}

func claimName(template, pod string) string { return template + "-" + pod }

// newClaims are the claims of a Pod. They stay when the Pod goes, so that the next one of its name has the same volumes.
func newClaims(set *appsv1.StatefulSet, pod string) []*corev1.PersistentVolumeClaim {
	var out []*corev1.PersistentVolumeClaim
	for i := range set.Spec.VolumeClaimTemplates {
		claim := set.Spec.VolumeClaimTemplates[i].DeepCopy()
		claim.Name, claim.Namespace = claimName(claim.Name, pod), set.Namespace
		claim.Status = corev1.PersistentVolumeClaimStatus{}
		if claim.Labels == nil {
			claim.Labels = map[string]string{}
		}
		if set.Spec.Selector != nil {
			for key, value := range set.Spec.Selector.MatchLabels {
				claim.Labels[key] = value
			}
		}
		out = append(out, claim)
	}
	return out
}

package job

import (
	"fmt"
	"slices"
	"strconv"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/controllers/workload"
)

// indexVariable tells a container which index it works on.
const indexVariable = "JOB_COMPLETION_INDEX"

// longestBase is how long the part of a name may be which the API server completes with five letters.
const longestBase = 58

// newPod is a Pod of a Job. It cannot go before it was counted.
func newPod(job *batchv1.Job, next NewPod) *corev1.Pod {
	pod := workload.NewPod(&job.Spec.Template, job, metav1.NewControllerRef(job, Kind))
	if !slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer) {
		pod.Finalizers = append(pod.Finalizers, batchv1.JobTrackingFinalizer)
	}
	if next.Index == noIndex {
		return pod
	}
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	index := strconv.Itoa(next.Index)
	pod.Annotations[batchv1.JobCompletionIndexAnnotation] = index
	pod.Labels[batchv1.JobCompletionIndexAnnotation] = index
	if job.Spec.BackoffLimitPerIndex != nil {
		pod.Annotations[batchv1.JobIndexFailureCountAnnotation] = strconv.Itoa(int(next.Failures))
		if next.Ignored > 0 {
			pod.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation] = strconv.Itoa(int(next.Ignored))
		}
	}
	pod.Spec.Hostname = job.Name + "-" + index
	suffix := "-" + index + "-"
	pod.GenerateName = job.Name[:min(len(job.Name), longestBase-len(suffix))] + suffix
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			addIndexVariable(&list[i])
		}
	}
	return pod
}

func addIndexVariable(c *corev1.Container) {
	if slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == indexVariable }) {
		return
	}
	c.Env = append(slices.Clone(c.Env), corev1.EnvVar{Name: indexVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: fmt.Sprintf("metadata.labels['%s']", batchv1.JobCompletionIndexAnnotation)},
	}})
}

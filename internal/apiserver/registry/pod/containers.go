package pod

import (
	"iter"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

var (
	atSpec   = field.NewPath("spec")
	atStatus = field.NewPath("status")
)

// containers are all containers of a spec with where they are: those that run first, those of the Pod, and those
// added to look into it.
func containers(spec *corev1.PodSpec) iter.Seq2[*field.Path, *corev1.Container] {
	return func(yield func(*field.Path, *corev1.Container) bool) {
		for i := range spec.InitContainers {
			if !yield(atSpec.Child("initContainers").Index(i), &spec.InitContainers[i]) {
				return
			}
		}
		for i := range spec.Containers {
			if !yield(atSpec.Child("containers").Index(i), &spec.Containers[i]) {
				return
			}
		}
		for i := range spec.EphemeralContainers {
			if !yield(atSpec.Child("ephemeralContainers").Index(i), (*corev1.Container)(&spec.EphemeralContainers[i].EphemeralContainerCommon)) {
				return
			}
		}
	}
}

// stays says whether an init container keeps running beside the Pod's containers.
func stays(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// probes are those that a container has, by name.
func probes(c *corev1.Container) iter.Seq2[string, *corev1.Probe] {
	return func(yield func(string, *corev1.Probe) bool) {
		for _, p := range []struct {
			name  string
			probe *corev1.Probe
		}{{"livenessProbe", c.LivenessProbe}, {"readinessProbe", c.ReadinessProbe}, {"startupProbe", c.StartupProbe}} {
			if p.probe != nil && !yield(p.name, p.probe) {
				return
			}
		}
	}
}

// hooks are the life-cycle handlers that a container has, by name.
func hooks(c *corev1.Container) iter.Seq2[string, *corev1.LifecycleHandler] {
	return func(yield func(string, *corev1.LifecycleHandler) bool) {
		if c.Lifecycle == nil {
			return
		}
		if c.Lifecycle.PostStart != nil && !yield("postStart", c.Lifecycle.PostStart) {
			return
		}
		if c.Lifecycle.PreStop != nil {
			yield("preStop", c.Lifecycle.PreStop)
		}
	}
}

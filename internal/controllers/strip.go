package controllers

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"

	"portal/internal/clusterdns"
	"portal/internal/scheduler"
)

// What is stripped here is never written back: Pods and Nodes are patched or read again first.

func stripMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion, Generation: m.Generation,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp, Labels: m.Labels, Finalizers: m.Finalizers,
	}
}

func stripPod(pod *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: stripOwned(pod.ObjectMeta),
		Spec: corev1.PodSpec{
			NodeName: pod.Spec.NodeName, Hostname: pod.Spec.Hostname, Subdomain: pod.Spec.Subdomain,
			Containers: stripContainers(pod.Spec.Containers, false), InitContainers: stripContainers(pod.Spec.InitContainers, true),
		},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, Reason: pod.Status.Reason, PodIP: pod.Status.PodIP, PodIPs: pod.Status.PodIPs,
		},
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady || c.Type == corev1.DisruptionTarget {
			c.Message = ""
			out.Status.Conditions = append(out.Status.Conditions, c)
		}
	}
	stripScheduling(pod, out)
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil && owner.Kind == "Job" {
		return stripJobPod(pod, out)
	}
	if cost, set := pod.Annotations[corev1.PodDeletionCost]; set {
		out.Annotations = map[string]string{corev1.PodDeletionCost: cost}
	}
	var restarts int32
	for i := range pod.Status.ContainerStatuses {
		restarts = max(restarts, pod.Status.ContainerStatuses[i].RestartCount)
	}
	if restarts > 0 {
		out.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: restarts}}
	}
	return out
}

// stripJobPod keeps how a Pod of a Job ended, which its failure policy asks about, and which index it has.
func stripJobPod(pod, out *corev1.Pod) *corev1.Pod {
	out.DeletionGracePeriodSeconds = pod.DeletionGracePeriodSeconds
	for key, value := range pod.Annotations {
		if strings.HasPrefix(key, "batch.kubernetes.io/") || key == corev1.PodDeletionCost {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[key] = value
		}
	}
	out.Status.Conditions = nil
	for _, c := range pod.Status.Conditions {
		c.Message = ""
		out.Status.Conditions = append(out.Status.Conditions, c)
	}
	statuses := func(in []corev1.ContainerStatus) (out []corev1.ContainerStatus) {
		for _, c := range in {
			kept := corev1.ContainerStatus{Name: c.Name, RestartCount: c.RestartCount}
			if t := c.State.Terminated; t != nil {
				kept.State.Terminated = &corev1.ContainerStateTerminated{ExitCode: t.ExitCode, FinishedAt: t.FinishedAt}
			}
			out = append(out, kept)
		}
		return out
	}
	out.Status.ContainerStatuses, out.Status.InitContainerStatuses = statuses(pod.Status.ContainerStatuses), statuses(pod.Status.InitContainerStatuses)
	return out
}

// stripScheduling keeps what decides where a Pod goes, and of one that has its node what others have to respect: what it
// takes, and whom it wants far.
func stripScheduling(pod, out *corev1.Pod) {
	if pod.Spec.NodeName != "" {
		out.Spec.Tolerations = stripTolerations(pod.Spec.Tolerations)
	}
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return
	}
	if total := podresources.PodRequests(pod, podresources.PodResourcesOptions{}); len(total) > 0 {
		if len(out.Spec.Containers) == 0 {
			out.Spec.Containers = []corev1.Container{{}}
		}
		out.Spec.Containers[0].Resources.Requests = total
	}
	if pod.Spec.NodeName != "" {
		if affinity := pod.Spec.Affinity; affinity != nil && (affinity.PodAffinity != nil || affinity.PodAntiAffinity != nil) {
			out.Spec.Affinity = &corev1.Affinity{PodAffinity: affinity.PodAffinity, PodAntiAffinity: affinity.PodAntiAffinity}
		}
		return
	}
	from, to := &pod.Spec, &out.Spec
	to.SchedulerName, to.SchedulingGates, to.Priority = from.SchedulerName, from.SchedulingGates, from.Priority
	to.NodeSelector, to.Affinity, to.Tolerations = from.NodeSelector, from.Affinity, from.Tolerations
	to.TopologySpreadConstraints = from.TopologySpreadConstraints
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			out.Status.Conditions = append(out.Status.Conditions, c)
		}
	}
}

// stripTolerations keeps those that let a Pod stay where it is. What nearly all Pods have is kept once for all.
func stripTolerations(in []corev1.Toleration) []corev1.Toleration {
	out := slices.DeleteFunc(slices.Clone(in), func(t corev1.Toleration) bool { return t.Effect != "" && t.Effect != corev1.TaintEffectNoExecute })
	if equality.Semantic.DeepEqual(out, briefly) {
		return briefly
	}
	return slices.Clip(out)
}

// briefly are the tolerations that the API server gives to Pods.
var briefly = []corev1.Toleration{
	{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](300)},
	{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](300)},
}

// stripOwned keeps the one owner that counts: the controller.
func stripOwned(m metav1.ObjectMeta) metav1.ObjectMeta {
	out := stripMeta(m)
	for _, owner := range m.OwnerReferences {
		if owner.Controller != nil && *owner.Controller {
			owner.BlockOwnerDeletion = nil
			out.OwnerReferences = []metav1.OwnerReference{owner}
		}
	}
	return out
}

// stripContainers leaves the ports that have a name, which is what a target port can ask for, and those of the host; of init
// containers only those that stay.
func stripContainers(in []corev1.Container, init bool) []corev1.Container {
	var ports []corev1.ContainerPort
	for i := range in {
		stays := in[i].RestartPolicy != nil && *in[i].RestartPolicy == corev1.ContainerRestartPolicyAlways
		if init && !stays {
			continue
		}
		for _, p := range in[i].Ports {
			if p.Name != "" || p.HostPort > 0 {
				ports = append(ports, corev1.ContainerPort{
					Name: p.Name, ContainerPort: p.ContainerPort, Protocol: p.Protocol, HostPort: p.HostPort, HostIP: p.HostIP,
				})
			}
		}
	}
	if len(ports) == 0 {
		return nil
	}
	// Which container a port is of doesn't matter, only the order.
	out := corev1.Container{Ports: ports}
	if init {
		always := corev1.ContainerRestartPolicyAlways
		out.RestartPolicy = &always
	}
	return []corev1.Container{out}
}

// Of a Service's annotations these two ask for something here.
var serviceAnnotations = []string{corev1.AnnotationTopologyMode, corev1.DeprecatedAnnotationTopologyAwareHints}

func stripService(svc *corev1.Service) *corev1.Service {
	out := &corev1.Service{
		ObjectMeta: stripMeta(svc.ObjectMeta),
		Spec: corev1.ServiceSpec{
			Type: svc.Spec.Type, Selector: svc.Spec.Selector, Ports: svc.Spec.Ports, ClusterIP: svc.Spec.ClusterIP,
			IPFamilies: svc.Spec.IPFamilies, PublishNotReadyAddresses: svc.Spec.PublishNotReadyAddresses,
			TrafficDistribution: svc.Spec.TrafficDistribution,
		},
	}
	for _, key := range serviceAnnotations {
		if value, ok := svc.Annotations[key]; ok {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[key] = value
		}
	}
	return out
}

func stripAccount(account *corev1.ServiceAccount) *corev1.ServiceAccount {
	return &corev1.ServiceAccount{ObjectMeta: stripMeta(account.ObjectMeta)}
}

func stripNode(node *corev1.Node) *corev1.Node {
	out := &corev1.Node{
		ObjectMeta: stripMeta(node.ObjectMeta),
		Spec:       corev1.NodeSpec{PodCIDRs: node.Spec.PodCIDRs, Taints: node.Spec.Taints, Unschedulable: node.Spec.Unschedulable},
		Status: corev1.NodeStatus{
			Addresses:   node.Status.Addresses,
			Allocatable: node.Status.Allocatable,
			NodeInfo:    corev1.NodeSystemInfo{KubeletVersion: node.Status.NodeInfo.KubeletVersion},
		},
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Status.Conditions = append(out.Status.Conditions, c)
		} else if _, ok := scheduler.ConditionTaint(&c); ok {
			out.Status.Conditions = append(out.Status.Conditions, corev1.NodeCondition{Type: c.Type, Status: c.Status})
		}
	}
	if at, ok := node.Annotations[clusterdns.Annotation]; ok {
		out.Annotations = map[string]string{clusterdns.Annotation: at}
	}
	return out
}

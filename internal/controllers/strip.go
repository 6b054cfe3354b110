package controllers

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		ObjectMeta: stripMeta(pod.ObjectMeta),
		Spec: corev1.PodSpec{
			NodeName: pod.Spec.NodeName, Hostname: pod.Spec.Hostname, Subdomain: pod.Spec.Subdomain,
			Containers: stripContainers(pod.Spec.Containers, false), InitContainers: stripContainers(pod.Spec.InitContainers, true),
		},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, Reason: pod.Status.Reason, PodIP: pod.Status.PodIP, PodIPs: pod.Status.PodIPs,
		},
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			c.Message = ""
			out.Status.Conditions = []corev1.PodCondition{c}
		}
	}
	return out
}

// stripContainers leaves the ports that have a name, which is what a target port can ask for; of init containers only
// those that stay.
func stripContainers(in []corev1.Container, init bool) []corev1.Container {
	var ports []corev1.ContainerPort
	for i := range in {
		stays := in[i].RestartPolicy != nil && *in[i].RestartPolicy == corev1.ContainerRestartPolicyAlways
		if init && !stays {
			continue
		}
		for _, p := range in[i].Ports {
			if p.Name != "" {
				ports = append(ports, corev1.ContainerPort{Name: p.Name, ContainerPort: p.ContainerPort, Protocol: p.Protocol})
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
		Spec:       corev1.NodeSpec{PodCIDRs: node.Spec.PodCIDRs, Taints: node.Spec.Taints},
		Status: corev1.NodeStatus{
			Allocatable: corev1.ResourceList{},
			NodeInfo:    corev1.NodeSystemInfo{KubeletVersion: node.Status.NodeInfo.KubeletVersion},
		},
	}
	if cpu, ok := node.Status.Allocatable[corev1.ResourceCPU]; ok {
		out.Status.Allocatable[corev1.ResourceCPU] = cpu
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Status.Conditions = []corev1.NodeCondition{c}
		}
	}
	return out
}

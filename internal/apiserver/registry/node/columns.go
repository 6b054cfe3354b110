package node

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/apiserver/registry"
)

func columns() []registry.Column[corev1.Node] {
	info, status := corev1.NodeSystemInfo{}.SwaggerDoc(), corev1.NodeStatus{}.SwaggerDoc()
	return []registry.Column[corev1.Node]{
		{Name: "Status", Description: "Whether the node is ready, and takes new Pods.", Cell: func(n *corev1.Node) any { return state(n) }},
		{Name: "Roles", Description: "What the node is for, from its labels.", Cell: func(n *corev1.Node) any { return roles(n) }},
		registry.Age[corev1.Node](),
		{Name: "Version", Description: info["kubeletVersion"], Cell: func(n *corev1.Node) any { return n.Status.NodeInfo.KubeletVersion }},
		{Name: "Internal-IP", Description: status["addresses"], Wide: true, Cell: func(n *corev1.Node) any { return address(n, corev1.NodeInternalIP) }},
		{Name: "External-IP", Description: status["addresses"], Wide: true, Cell: func(n *corev1.Node) any { return address(n, corev1.NodeExternalIP) }},
		{Name: "OS-Image", Description: info["osImage"], Wide: true, Cell: func(n *corev1.Node) any { return orUnknown(n.Status.NodeInfo.OSImage) }},
		{Name: "Kernel-Version", Description: info["kernelVersion"], Wide: true, Cell: func(n *corev1.Node) any { return kernel(n) }},
		{Name: "Container-Runtime", Description: info["containerRuntimeVersion"], Wide: true,
			Cell: func(n *corev1.Node) any { return orUnknown(n.Status.NodeInfo.ContainerRuntimeVersion) }},
	}
}

func state(node *corev1.Node) string {
	text := "Unknown"
	for _, condition := range node.Status.Conditions {
		if condition.Type != corev1.NodeReady {
			continue
		}
		text = "NotReady"
		if condition.Status == corev1.ConditionTrue {
			text = "Ready"
		}
	}
	if node.Spec.Unschedulable {
		text += ",SchedulingDisabled"
	}
	return text
}

// roles are named by labels: node-role.kubernetes.io/<role>, or kubernetes.io/role=<role>.
func roles(node *corev1.Node) string {
	found := map[string]bool{}
	for key, value := range node.Labels {
		if role, ok := strings.CutPrefix(key, "node-role.kubernetes.io/"); ok {
			found[role] = true
		} else if key == "kubernetes.io/role" {
			found[value] = true
		}
	}
	delete(found, "")
	if len(found) == 0 {
		return "<none>"
	}
	return strings.Join(slices.Sorted(maps.Keys(found)), ",")
}

func address(node *corev1.Node, kind corev1.NodeAddressType) string {
	for _, known := range node.Status.Addresses {
		if known.Type == kind {
			return known.Address
		}
	}
	return "<none>"
}

func kernel(node *corev1.Node) string {
	text := orUnknown(node.Status.NodeInfo.KernelVersion)
	if arch := node.Status.NodeInfo.Architecture; arch != "" {
		text += " (" + arch + ")"
	}
	return text
}

func orUnknown(text string) string {
	if text == "" {
		return "<unknown>"
	}
	return text
}

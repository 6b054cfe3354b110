// Package node describes v1 Nodes: the machines that run Pods and proxy Services.
package node

import (
	"context"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
)

// New describes Nodes.
func New() *registry.Kind[corev1.Node, *corev1.Node] {
	return &registry.Kind[corev1.Node, *corev1.Node]{
		Served: corev1.SchemeGroupVersion,
		Plural: "nodes", Singular: "node", KindName: "Node",
		ShortNames:    []string{"no"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &corev1.NodeList{} },
		Default:       setDefaults,
		PrepareCreate: prepareCreate,
		PrepareUpdate: prepareUpdate,
		Validate:      validateCreate,
		Warnings:      warnings,
		Fields: func(node *corev1.Node) fields.Set {
			return fields.Set{"spec.unschedulable": strconv.FormatBool(node.Spec.Unschedulable)}
		},
		SelectableFields: []string{"spec.unschedulable"},
		Columns:          columns(),
		Status: &registry.Status[corev1.Node, *corev1.Node]{
			Prepare:  prepareStatus,
			Validate: validateStatus,
			Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("spec")},
		},
		Reset:          []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		ValidateUpdate: validateUpdate,
	}
}

func setDefaults(node *corev1.Node) {
	spec := &node.Spec
	// podCIDR is the older field; where the two disagree it wins, because who writes it knows no other.
	switch {
	case spec.PodCIDR != "" && (len(spec.PodCIDRs) == 0 || spec.PodCIDRs[0] != spec.PodCIDR):
		spec.PodCIDRs = []string{spec.PodCIDR}
	case len(spec.PodCIDRs) > 0:
		spec.PodCIDR = spec.PodCIDRs[0]
	}
	status := &node.Status
	if status.Allocatable == nil && status.Capacity != nil {
		status.Allocatable = status.Capacity.DeepCopy()
	}
	for _, list := range []corev1.ResourceList{status.Capacity, status.Allocatable} {
		for name, quantity := range list {
			quantity.RoundUp(resource.Milli)
			list[name] = quantity
		}
	}
}

// prepareCreate keeps Pods away until the node says that it is ready. A node may bring its whole status with it.
func prepareCreate(_ context.Context, node *corev1.Node) {
	notReady := corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}
	if !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&notReady) }) {
		node.Spec.Taints = append(node.Spec.Taints, notReady)
	}
	node.Spec.ConfigSource = nil
	node.Spec.PodPreemptionPolicy = nil
	node.Status.Config = nil
}

func prepareUpdate(_ context.Context, node, old *corev1.Node) {
	node.Status = old.Status
	node.Spec.ConfigSource = old.Spec.ConfigSource
	node.Spec.PodPreemptionPolicy = old.Spec.PodPreemptionPolicy
}

func prepareStatus(_ context.Context, node, old *corev1.Node) {
	node.Spec = old.Spec
	node.Status.Config = old.Status.Config
}

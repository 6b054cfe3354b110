// Package pod describes v1 Pods: all that Services lean on and that a node needs to run one. Left out are the parts of
// the API that only a container runtime gives a meaning to: ephemeral containers, resizing in place, Windows.
package pod

import (
	"context"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
)

// New describes Pods. isClusterIP says which addresses are Services'; nil: none is known to be.
func New(isClusterIP func(netip.Addr) bool) *registry.Kind[corev1.Pod, *corev1.Pod] {
	return &registry.Kind[corev1.Pod, *corev1.Pod]{
		Served: corev1.SchemeGroupVersion,
		Plural: "pods", Singular: "pod", KindName: "Pod",
		ShortNames:     []string{"po"},
		Categories:     []string{"all"},
		NewList:        func() runtime.Object { return &corev1.PodList{} },
		Default:        setDefaults,
		PrepareCreate:  prepareCreate,
		PrepareUpdate:  prepareUpdate,
		Validate:       validateCreate,
		ValidateUpdate: validateUpdate,
		Warnings: func(ctx context.Context, pod, old *corev1.Pod) []string {
			return append(warnings(ctx, pod, old), warnExternal(pod, old, isClusterIP)...)
		},
		Fields: selectable,
		// spec.host is what spec.nodeName was called once. status.podIPs can be asked for, and never matches.
		SelectableFields: []string{
			"spec.nodeName", "spec.host", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
			"spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName",
		},
		Columns: columns(),
		Status: &registry.Status[corev1.Pod, *corev1.Pod]{
			Prepare:  prepareStatus,
			Validate: validateStatus,
			Reset: []fieldpath.Path{
				fieldpath.MakePathOrDie("spec"),
				fieldpath.MakePathOrDie("metadata", "deletionTimestamp"),
				fieldpath.MakePathOrDie("metadata", "ownerReferences"),
			},
		},
		Reset:         []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		ReturnDeleted: true,
		Graceful:      graceful{},
		Customize: func(store *genericregistry.Store, storage map[string]rest.Storage) error {
			storage["pods/binding"] = &bindingREST{store: store}
			return nil
		},
	}
}

func selectable(pod *corev1.Pod) fields.Set {
	ip := ""
	if len(pod.Status.PodIPs) > 0 {
		ip = pod.Status.PodIPs[0].IP
	}
	return fields.Set{
		"spec.nodeName":            pod.Spec.NodeName,
		"spec.host":                pod.Spec.NodeName,
		"spec.restartPolicy":       string(pod.Spec.RestartPolicy),
		"spec.schedulerName":       pod.Spec.SchedulerName,
		"spec.serviceAccountName":  pod.Spec.ServiceAccountName,
		"spec.hostNetwork":         strconv.FormatBool(pod.Spec.HostNetwork),
		"status.phase":             string(pod.Status.Phase),
		"status.podIP":             ip,
		"status.nominatedNodeName": pod.Status.NominatedNodeName,
	}
}

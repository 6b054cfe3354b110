package noderestriction

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// own are the labels of Kubernetes that a node knows about itself; ownDomains are those below which a node may have any.
var (
	own = []string{
		corev1.LabelHostname, corev1.LabelTopologyZone, corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaZone,
		corev1.LabelFailureDomainBetaRegion, corev1.LabelInstanceType, corev1.LabelInstanceTypeStable, corev1.LabelOSStable,
		corev1.LabelArchStable, "beta.kubernetes.io/os", "beta.kubernetes.io/arch",
	}
	ownDomains = []string{corev1.LabelNamespaceSuffixKubelet, corev1.LabelNamespaceSuffixNode}
)

// refusedLabels are the labels that differ between two sets and that a node may not change: workloads are steered by them.
func refusedLabels(now, was map[string]string) (out []string) {
	for key, value := range now {
		if old, ok := was[key]; (!ok || old != value) && refused(key) {
			out = append(out, key)
		}
	}
	for key := range was {
		if _, ok := now[key]; !ok && refused(key) {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out
}

func refused(key string) bool {
	domain, _, found := strings.Cut(key, "/")
	if !found {
		return false
	}
	if within(domain, corev1.LabelNamespaceNodeRestriction) {
		return true
	}
	if !within(domain, "kubernetes.io") && !within(domain, "k8s.io") {
		return false
	}
	return !slices.Contains(own, key) && !slices.ContainsFunc(ownDomains, func(d string) bool { return within(domain, d) })
}

func within(domain, parent string) bool {
	return domain == parent || strings.HasSuffix(domain, "."+parent)
}

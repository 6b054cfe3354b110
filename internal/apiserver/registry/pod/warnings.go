package pod

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/externalpod"
)

// warnings are given on create only: Pods are seldom changed by people, and often by programs.
func warnings(_ context.Context, pod, old *corev1.Pod) []string {
	if old != nil {
		return nil
	}
	var out []string
	warn := func(at *field.Path, text string, args ...any) {
		out = append(out, at.String()+": "+fmt.Sprintf(text, args...))
	}
	if len(validation.IsDNS1123Label(pod.Name)) > 0 {
		warn(field.NewPath("metadata", "name"), "is the Pod's host name too, which should be a DNS label (at most 63 of a-z, 0-9 and -, no dots)")
	}
	spec := &pod.Spec
	for i, constraint := range spec.TopologySpreadConstraints {
		if constraint.LabelSelector == nil {
			warn(atSpec.Child("topologySpreadConstraints").Index(i).Child("labelSelector"), "null matches no Pod")
		}
	}
	for _, list := range affinityTerms(spec.Affinity) {
		for _, placed := range list.all {
			if placed.term.LabelSelector == nil {
				warn(placed.at.Child("labelSelector"), "null matches no Pod")
			}
		}
	}
	warnTwice(spec, warn)
	warnDeprecated(pod, warn)
	for at, c := range containers(spec) {
		warnContainer(at, c, warn)
	}
	warnPorts(spec, warn)
	if spec.DNSConfig != nil {
		for i, server := range spec.DNSConfig.Nameservers {
			out = append(out, validation.GetWarningsForIP(atSpec.Child("dnsConfig", "nameservers").Index(i), server)...)
		}
	}
	for i, alias := range spec.HostAliases {
		out = append(out, validation.GetWarningsForIP(atSpec.Child("hostAliases").Index(i).Child("ip"), alias.IP)...)
	}
	return out
}

// warnExternal warns of a Pod that stands for something at an address of a Service: no proxy sends traffic from one Service on to the next.
func warnExternal(pod, old *corev1.Pod, isClusterIP func(netip.Addr) bool) []string {
	text := pod.Annotations[externalpod.AddressesAnnotation]
	if !externalpod.Is(pod) || old != nil && old.Annotations[externalpod.AddressesAnnotation] == text {
		return nil
	}
	addresses, err := externalpod.ParseAddresses(text)
	if err != nil {
		return nil // which is an error, not a warning
	}
	return rules.ClusterIPWarning(func(yield func(*field.Path, string) bool) {
		for _, a := range addresses {
			if !yield(atAnnotations.Key(externalpod.AddressesAnnotation), a.String()) {
				return
			}
		}
	}, isClusterIP)
}

type warner func(at *field.Path, text string, args ...any)

// gone are the kinds of volumes that Kubernetes no longer mounts.
func gone(v *corev1.Volume) map[string]bool {
	return map[string]bool{
		"photonPersistentDisk": v.PhotonPersistentDisk != nil, "gitRepo": v.GitRepo != nil, "scaleIO": v.ScaleIO != nil,
		"flocker": v.Flocker != nil, "storageOS": v.StorageOS != nil, "quobyte": v.Quobyte != nil,
		"glusterfs": v.Glusterfs != nil, "cephfs": v.CephFS != nil, "rbd": v.RBD != nil,
	}
}

// warnDeprecated finds what is taken and then means nothing, or will.
func warnDeprecated(pod *corev1.Pod, warn warner) {
	for i := range pod.Spec.Volumes {
		for name, used := range gone(&pod.Spec.Volumes[i]) {
			if used {
				warn(atSpec.Child("volumes").Index(i).Child(name), "is deprecated, and nothing mounts it")
			}
		}
	}
	const useField = "means nothing any more: use the field %s"
	if _, set := pod.Annotations[corev1.SeccompPodAnnotationKey]; set && pod.Spec.SecurityContext.SeccompProfile == nil {
		warn(atAnnotations.Key(corev1.SeccompPodAnnotationKey), useField, "seccompProfile")
	}
	for _, c := range containers(&pod.Spec) {
		key := corev1.SeccompContainerAnnotationKeyPrefix + c.Name
		if _, set := pod.Annotations[key]; set && (c.SecurityContext == nil || c.SecurityContext.SeccompProfile == nil) {
			warn(atAnnotations.Key(key), useField, "seccompProfile")
		}
		if _, set := pod.Annotations[appArmorPrefix+c.Name]; set {
			warn(atAnnotations.Key(appArmorPrefix+c.Name), "is deprecated: use the field %s", "appArmorProfile")
		}
	}
}

// warnTwice finds entries of which only one counts.
func warnTwice(spec *corev1.PodSpec, warn warner) {
	aliases, secrets := map[string]bool{}, map[string]bool{}
	for i, alias := range spec.HostAliases {
		if aliases[alias.IP] {
			warn(atSpec.Child("hostAliases").Index(i).Child("ip"), "%q is there twice", alias.IP)
		}
		aliases[alias.IP] = true
	}
	for i, secret := range spec.ImagePullSecrets {
		at := atSpec.Child("imagePullSecrets").Index(i).Child("name")
		if secret.Name == "" {
			warn(at, "an empty name is no Secret's")
		}
		if secrets[secret.Name] {
			warn(at, "%q is there twice", secret.Name)
		}
		secrets[secret.Name] = true
	}
}

func warnContainer(at *field.Path, c *corev1.Container, warn warner) {
	for where, list := range map[string]corev1.ResourceList{"limits": c.Resources.Limits, "requests": c.Resources.Requests} {
		for _, name := range []corev1.ResourceName{corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			if amount, set := list[name]; set && amount.MilliValue()%1000 != 0 {
				warn(at.Child("resources", where).Key(string(name)), "%s is a fraction of a byte", amount.String())
			}
		}
	}
	seen := map[string]bool{}
	for i, variable := range c.Env {
		// A later value may build upon an earlier one, X=$(X):more, but neither replace nor repeat it.
		itself := "$(" + variable.Name + ")"
		if seen[variable.Name] && (variable.ValueFrom != nil || variable.Value == itself || !strings.Contains(variable.Value, itself)) {
			warn(at.Child("env").Index(i), "hides an earlier %q, and one of the two may get lost with apply", variable.Name)
		}
		seen[variable.Name] = true
	}
}

// warnPorts finds ports that more than one container claims.
func warnPorts(spec *corev1.PodSpec, warn warner) {
	type claim struct {
		at   *field.Path
		port corev1.ContainerPort
	}
	type key struct {
		port     int32
		protocol corev1.Protocol
	}
	claims, names := map[key][]claim{}, map[string]*field.Path{}
	for at, c := range containers(spec) {
		for i, port := range c.Ports {
			at := at.Child("ports").Index(i)
			if port.HostIP != "" && port.HostPort == 0 {
				warn(at, "hostIP means nothing without hostPort")
			}
			k := key{port.ContainerPort, port.Protocol}
			for _, other := range claims[k] {
				oneIP := (port.HostIP == "") != (other.port.HostIP == "")
				switch {
				case port.HostIP == other.port.HostIP && port.HostPort == other.port.HostPort:
					warn(at, "is the same port as %s", other.at)
				case port.HostPort == 0 || other.port.HostPort == 0:
					warn(at, "overlaps with %s", other.at)
				case port.HostPort == other.port.HostPort && oneIP:
					warn(at, "may or may not get in the way of %s", other.at)
				}
			}
			claims[k] = append(claims[k], claim{at, port})
			if port.Name == "" {
				continue
			}
			if other := names[port.Name]; other != nil {
				warn(at, "has the name %q of %s, which is the one that Services and probes will use", port.Name, other)
			} else {
				names[port.Name] = at
			}
		}
	}
}

package pod

import (
	"context"
	"fmt"
	"math"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

func validateCreate(_ context.Context, pod *corev1.Pod) field.ErrorList {
	errs := rules.Finalizers(pod)
	errs = append(errs, validateAnnotations(pod.Annotations, &pod.Spec)...)
	errs = append(errs, validateSpec(&pod.Spec, &pod.ObjectMeta)...)
	if len(pod.Spec.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(atSpec.Child("ephemeralContainers"), "are added to a Pod that is there"))
	}
	if pod.Spec.NodeName != "" && len(pod.Spec.SchedulingGates) > 0 {
		errs = append(errs, field.Forbidden(atSpec.Child("nodeName"), "can be set once all schedulingGates are gone"))
	}
	return append(errs, validateProfilesMatch(pod)...)
}

// validateSpec validates everything that a create and an update validate alike.
func validateSpec(spec *corev1.PodSpec, meta *metav1.ObjectMeta) field.ErrorList {
	volumes, errs := validateVolumes(spec.Volumes, meta)
	names, more := validateClaims(spec.ResourceClaims, meta)
	errs = append(errs, more...)
	errs = append(errs, validateContainers(spec, volumes, names)...)
	errs = append(errs, validatePodResources(spec, names)...)
	errs = append(errs, validateHostPorts(spec)...)
	errs = append(errs, validatePolicies(spec)...)
	errs = append(errs, validateDNS(spec)...)
	errs = append(errs, validateNames(spec)...)
	errs = append(errs, validateScheduling(spec)...)
	errs = append(errs, validateSecurity(spec)...)
	errs = append(errs, validateTokens(spec)...)
	return append(errs, validateEnvFiles(spec)...)
}

func validatePolicies(spec *corev1.PodSpec) field.ErrorList {
	errs := rules.RequiredOneOf(atSpec.Child("restartPolicy"), spec.RestartPolicy,
		corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)
	errs = append(errs, rules.RequiredOneOf(atSpec.Child("dnsPolicy"), spec.DNSPolicy,
		corev1.DNSClusterFirstWithHostNet, corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)...)
	if spec.TerminationGracePeriodSeconds != nil {
		errs = append(errs, rules.NotNegative(atSpec.Child("terminationGracePeriodSeconds"), *spec.TerminationGracePeriodSeconds)...)
	}
	if deadline := spec.ActiveDeadlineSeconds; deadline != nil && (*deadline < 1 || *deadline > math.MaxInt32) {
		errs = append(errs, field.Invalid(atSpec.Child("activeDeadlineSeconds"), *deadline, validation.InclusiveRangeError(1, math.MaxInt32)))
	}
	if spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace && spec.HostPID {
		errs = append(errs, field.Invalid(atSpec.Child("shareProcessNamespace"), true, "cannot be together with hostPID"))
	}
	if spec.OS != nil {
		switch spec.OS.Name {
		case corev1.Linux, corev1.Windows:
		case "":
			errs = append(errs, field.Required(atSpec.Child("os", "name"), ""))
		default:
			errs = append(errs, field.NotSupported(atSpec.Child("os"), spec.OS.Name, []corev1.OSName{corev1.Linux, corev1.Windows}))
		}
	}
	return errs
}

// validateNames validates the names of the Pod's host and of other objects it refers to.
func validateNames(spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	for _, name := range []struct {
		field, value string
		rule         func(*field.Path, string) field.ErrorList
	}{
		{"serviceAccountName", spec.ServiceAccountName, rules.DNSSubdomain},
		{"nodeName", spec.NodeName, rules.NodeName},
		{"hostname", spec.Hostname, rules.DNSLabel},
		{"subdomain", spec.Subdomain, rules.DNSLabel},
	} {
		if name.value != "" {
			errs = append(errs, name.rule(atSpec.Child(name.field), name.value)...)
		}
	}
	return append(errs, validateHostnameOverride(spec)...)
}

func validateHostnameOverride(spec *corev1.PodSpec) field.ErrorList {
	if spec.HostnameOverride == nil {
		return nil
	}
	at := atSpec.Child("hostnameOverride")
	var errs field.ErrorList
	if spec.SetHostnameAsFQDN != nil && *spec.SetHostnameAsFQDN {
		errs = append(errs, field.Forbidden(at, "cannot be together with setHostnameAsFQDN"))
	}
	if spec.HostNetwork {
		errs = append(errs, field.Forbidden(at, "cannot be together with hostNetwork: the host has its name"))
	}
	const longest = 64 // what Linux takes
	if len(*spec.HostnameOverride) > longest {
		errs = append(errs, field.TooLong(at, "", longest))
	}
	return append(errs, rules.DNSSubdomain(at, *spec.HostnameOverride)...)
}

// What a resolver of the C library takes.
const (
	maxNameservers  = 3
	maxSearches     = 32
	maxSearchesText = 2048
)

func validateDNS(spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	for i, alias := range spec.HostAliases {
		at := atSpec.Child("hostAliases").Index(i)
		errs = append(errs, rules.IP(at.Child("ip"), alias.IP)...)
		for j, name := range alias.Hostnames {
			errs = append(errs, rules.DNSSubdomain(at.Child("hostnames").Index(j), name)...)
		}
	}
	at := atSpec.Child("dnsConfig")
	config := spec.DNSConfig
	if spec.DNSPolicy == corev1.DNSNone {
		switch {
		case config == nil:
			return append(errs, field.Required(at, "where dnsPolicy is None this says everything"))
		case len(config.Nameservers) == 0:
			return append(errs, field.Required(at.Child("nameservers"), "where dnsPolicy is None there must be one"))
		}
	}
	if config == nil {
		return errs
	}
	if len(config.Nameservers) > maxNameservers {
		errs = append(errs, field.Invalid(at.Child("nameservers"), config.Nameservers, fmt.Sprintf("must be at most %d", maxNameservers)))
	}
	for i, server := range config.Nameservers {
		errs = append(errs, rules.IP(at.Child("nameservers").Index(i), server)...)
	}
	searches := at.Child("searches")
	if len(config.Searches) > maxSearches {
		errs = append(errs, field.Invalid(searches, config.Searches, fmt.Sprintf("must be at most %d", maxSearches)))
	}
	if len(strings.Join(config.Searches, " ")) > maxSearchesText {
		errs = append(errs, field.Invalid(searches, config.Searches, fmt.Sprintf("must be at most %d characters together", maxSearchesText)))
	}
	for i, search := range config.Searches {
		if search != "." {
			search = strings.TrimSuffix(search, ".")
			errs = append(errs, rules.Each(searches.Index(i), search, validation.IsDNS1123SubdomainWithUnderscore(search))...)
		}
	}
	for i, option := range config.Options {
		if option.Name == "" {
			errs = append(errs, field.Required(at.Child("options").Index(i), "an option has a name"))
		}
	}
	return errs
}

// validateHostPorts wants ports in the host's network to be what they are.
func validateHostPorts(spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	if !spec.HostNetwork {
		return nil
	}
	for i := range spec.Containers {
		for j, port := range spec.Containers[i].Ports {
			if port.HostPort != port.ContainerPort {
				errs = append(errs, field.Invalid(atSpec.Child("containers").Index(i).Child("ports").Index(j).Child("hostPort"), port.HostPort,
					"must be the containerPort: with hostNetwork there is only one network"))
			}
		}
	}
	return errs
}

// validateClaims validates the claims on devices and gives their names.
func validateClaims(claims []corev1.PodResourceClaim, meta *metav1.ObjectMeta) (map[string]bool, field.ErrorList) {
	names, seen := map[string]bool{}, map[string]bool{}
	var errs field.ErrorList
	for i := range claims {
		claim := &claims[i]
		if claim.Name != "" {
			names[claim.Name] = true
		}
		if _, static := meta.Annotations[corev1.MirrorPodAnnotationKey]; static {
			errs = append(errs, field.Forbidden(field.NewPath(""), "a static Pod cannot have resourceClaims"))
			continue
		}
		at := atSpec.Child("resourceClaims").Index(i)
		switch {
		case claim.Name == "":
			errs = append(errs, field.Required(at.Child("name"), ""))
		case seen[claim.Name]:
			errs = append(errs, field.Duplicate(at.Child("name"), claim.Name))
		default:
			errs = append(errs, rules.DNSLabel(at.Child("name"), claim.Name)...)
			seen[claim.Name] = true
		}
		if (claim.ResourceClaimName == nil) == (claim.ResourceClaimTemplateName == nil) {
			errs = append(errs, field.Invalid(at, claim.Name, "must say either resourceClaimName or resourceClaimTemplateName"))
		}
		if claim.ResourceClaimName != nil {
			errs = append(errs, rules.DNSSubdomain(at.Child("resourceClaimName"), *claim.ResourceClaimName)...)
		}
		if claim.ResourceClaimTemplateName != nil {
			errs = append(errs, rules.DNSSubdomain(at.Child("resourceClaimTemplateName"), *claim.ResourceClaimTemplateName)...)
		}
	}
	return names, errs
}

// validateTokens wants a service account where its token is.
func validateTokens(spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	if spec.ServiceAccountName != "" {
		return nil
	}
	for i := range spec.Volumes {
		if spec.Volumes[i].Projected == nil {
			continue
		}
		for j, source := range spec.Volumes[i].Projected.Sources {
			if source.ServiceAccountToken != nil {
				errs = append(errs, field.Forbidden(atSpec.Child("volumes").Index(i).Child("projected", "sources").Index(j).Child("serviceAccountToken"),
					"needs serviceAccountName"))
			}
		}
	}
	return errs
}

func validateLabels(at *field.Path, labels map[string]string) field.ErrorList {
	return metavalidation.ValidateLabels(labels, at)
}

func validateSelector(at *field.Path, selector *metav1.LabelSelector) field.ErrorList {
	return metavalidation.ValidateLabelSelector(selector, metavalidation.LabelSelectorValidationOptions{}, at)
}

func validateNamespaceName(at *field.Path, name string) field.ErrorList {
	return rules.Each(at, name, apivalidation.ValidateNamespaceName(name, false))
}

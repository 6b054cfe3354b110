package pod

import (
	"regexp"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kernel "k8s.io/component-helpers/node/util/sysctl"

	"portal/internal/apiserver/registry/rules"
)

// validateSecurity validates what a Pod may do, as a whole.
func validateSecurity(spec *corev1.PodSpec) field.ErrorList {
	errs := validateHostUsers(spec)
	sc := spec.SecurityContext
	if sc == nil {
		return errs
	}
	at := atSpec.Child("securityContext")
	errs = append(errs, validateIDs(at, sc.RunAsUser, sc.RunAsGroup)...)
	if sc.FSGroup != nil {
		errs = append(errs, rules.Each(at.Child("fsGroup"), *sc.FSGroup, validation.IsValidGroupID(*sc.FSGroup))...)
	}
	for i, group := range sc.SupplementalGroups {
		errs = append(errs, rules.Each(at.Child("supplementalGroups").Index(i), group, validation.IsValidGroupID(group))...)
	}
	errs = append(errs, validateSysctls(at.Child("sysctls"), spec)...)
	if sc.FSGroupChangePolicy != nil {
		errs = append(errs, rules.OneOf(at.Child("fsGroupChangePolicy"), *sc.FSGroupChangePolicy, corev1.FSGroupChangeOnRootMismatch,
			corev1.FSGroupChangeAlways)...)
	}
	if sc.SupplementalGroupsPolicy != nil {
		errs = append(errs, rules.OneOf(at.Child("supplementalGroupsPolicy"), *sc.SupplementalGroupsPolicy,
			corev1.SupplementalGroupsPolicyMerge, corev1.SupplementalGroupsPolicyStrict)...)
	}
	if sc.SELinuxChangePolicy != nil {
		errs = append(errs, rules.OneOf(at.Child("seLinuxChangePolicy"), *sc.SELinuxChangePolicy, corev1.SELinuxChangePolicyRecursive,
			corev1.SELinuxChangePolicyMountOption)...)
	}
	errs = append(errs, validateSeccomp(at.Child("seccompProfile"), sc.SeccompProfile)...)
	return append(errs, validateAppArmor(at.Child("appArmorProfile"), sc.AppArmorProfile)...)
}

// validateHostUsers keeps Pods with users of their own out of the host's other namespaces.
func validateHostUsers(spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	if spec.HostUsers == nil || *spec.HostUsers {
		return nil
	}
	const why = "cannot be together with hostUsers false"
	if spec.HostNetwork {
		errs = append(errs, field.Forbidden(atSpec.Child("hostNetwork"), why))
	}
	if spec.HostPID {
		errs = append(errs, field.Forbidden(atSpec.Child("HostPID"), why))
	}
	if spec.HostIPC {
		errs = append(errs, field.Forbidden(atSpec.Child("HostIPC"), why))
	}
	for at, c := range containers(spec) {
		if len(c.VolumeDevices) > 0 {
			errs = append(errs, field.Forbidden(at.Child("volumeDevices"), why))
		}
	}
	return errs
}

func validateIDs(at *field.Path, user, group *int64) field.ErrorList {
	var errs field.ErrorList
	if user != nil {
		errs = append(errs, rules.Each(at.Child("runAsUser"), *user, validation.IsValidUserID(*user))...)
	}
	if group != nil {
		errs = append(errs, rules.Each(at.Child("runAsGroup"), *group, validation.IsValidGroupID(*group))...)
	}
	return errs
}

const maxSysctlName = 253

var sysctlName = regexp.MustCompile(`^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$`)

func validateSysctls(at *field.Path, spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, sysctl := range spec.SecurityContext.Sysctls {
		at := at.Index(i).Child("name")
		switch {
		case sysctl.Name == "":
			errs = append(errs, field.Required(at, ""))
		case len(sysctl.Name) > maxSysctlName || !sysctlName.MatchString(sysctl.Name):
			errs = append(errs, field.Invalid(at, sysctl.Name, "must be the name of a kernel parameter, such as net.core.somaxconn"))
		case seen[sysctl.Name]:
			errs = append(errs, field.Duplicate(at, sysctl.Name))
		}
		seen[sysctl.Name] = true
		switch namespace, _, _ := kernel.GetNamespace(sysctl.Name); {
		case spec.HostNetwork && namespace == kernel.NetNamespace:
			errs = append(errs, field.Invalid(at, sysctl.Name, "is the host's: it cannot be together with hostNetwork"))
		case spec.HostIPC && namespace == kernel.IPCNamespace:
			errs = append(errs, field.Invalid(at, sysctl.Name, "is the host's: it cannot be together with hostIPC"))
		}
	}
	return errs
}

// privilegedAllowed is one for the whole process, as templates are validated in many places.
var privilegedAllowed atomic.Bool

// AllowPrivileged says whether containers may be privileged.
func AllowPrivileged(allow bool) { privilegedAllowed.Store(allow) }

// validateContainerSecurity validates what one container may do.
func validateContainerSecurity(at *field.Path, sc *corev1.SecurityContext, spec *corev1.PodSpec) field.ErrorList {
	if sc == nil {
		return nil
	}
	errs := validateIDs(at, sc.RunAsUser, sc.RunAsGroup)
	if sc.ProcMount != nil {
		errs = append(errs, rules.OneOf(at.Child("procMount"), *sc.ProcMount, corev1.DefaultProcMount, corev1.UnmaskedProcMount)...)
		if *sc.ProcMount == corev1.UnmaskedProcMount && (spec.HostUsers == nil || *spec.HostUsers) {
			errs = append(errs, field.Invalid(at.Child("procMount"), *sc.ProcMount, "needs hostUsers false"))
		}
	}
	errs = append(errs, validateSeccomp(at.Child("seccompProfile"), sc.SeccompProfile)...)
	if sc.Privileged != nil && *sc.Privileged && !privilegedAllowed.Load() {
		errs = append(errs, field.Forbidden(at.Child("privileged"), "privileged containers are not allowed here: see the server's --allow-privileged"))
	}
	if sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation {
		if sc.Privileged != nil && *sc.Privileged {
			errs = append(errs, field.Invalid(at, "privileged", "cannot be together with allowPrivilegeEscalation false"))
		}
		if sc.Capabilities != nil {
			for _, capability := range sc.Capabilities.Add {
				if capability == "CAP_SYS_ADMIN" {
					errs = append(errs, field.Invalid(at, capability, "cannot be together with allowPrivilegeEscalation false"))
				}
			}
		}
	}
	return append(errs, validateAppArmor(at.Child("appArmorProfile"), sc.AppArmorProfile)...)
}

func validateSeccomp(at *field.Path, profile *corev1.SeccompProfile) field.ErrorList {
	if profile == nil {
		return nil
	}
	errs := rules.RequiredOneOf(at.Child("type"), profile.Type,
		corev1.SeccompProfileTypeLocalhost, corev1.SeccompProfileTypeRuntimeDefault, corev1.SeccompProfileTypeUnconfined)
	local := at.Child("localhostProfile")
	switch {
	case profile.Type != corev1.SeccompProfileTypeLocalhost && profile.LocalhostProfile != nil:
		errs = append(errs, field.Invalid(local, *profile.LocalhostProfile, "needs type Localhost"))
	case profile.Type == corev1.SeccompProfileTypeLocalhost && profile.LocalhostProfile == nil:
		errs = append(errs, field.Required(local, "type Localhost says that this is used"))
	case profile.LocalhostProfile != nil:
		errs = append(errs, validateLocalPath(local, *profile.LocalhostProfile)...)
	}
	return errs
}

func validateAppArmor(at *field.Path, profile *corev1.AppArmorProfile) field.ErrorList {
	if profile == nil {
		return nil
	}
	errs := rules.RequiredOneOf(at.Child("type"), profile.Type,
		corev1.AppArmorProfileTypeLocalhost, corev1.AppArmorProfileTypeRuntimeDefault, corev1.AppArmorProfileTypeUnconfined)
	if len(errs) > 0 {
		return errs
	}
	local := at.Child("localhostProfile")
	if profile.Type != corev1.AppArmorProfileTypeLocalhost {
		if profile.LocalhostProfile != nil {
			errs = append(errs, field.Invalid(local, *profile.LocalhostProfile, "needs type Localhost"))
		}
		return errs
	}
	const longest = 4095 // the longest path
	switch {
	case profile.LocalhostProfile == nil || *profile.LocalhostProfile == "":
		return append(errs, field.Required(local, "type Localhost says that this is used"))
	case strings.TrimSpace(*profile.LocalhostProfile) != *profile.LocalhostProfile:
		errs = append(errs, field.Invalid(local, *profile.LocalhostProfile, "must not begin or end with white space"))
	}
	if len(*profile.LocalhostProfile) > longest {
		errs = append(errs, field.TooLong(local, "", longest))
	}
	return errs
}

// profile is a confinement, by seccomp or AppArmor: the type that the field has, and a path if it is the node's own.
type profile struct{ kind, local string }

// Names of profiles in annotations, from before there were fields. A localhost profile has its path behind a slash.
const (
	annotatedDefault    = "runtime/default"
	annotatedDocker     = "docker/default"
	annotatedUnconfined = "unconfined"
	annotatedLocal      = "localhost/"
)

// readAnnotation says which profile an annotation means; docker is another name for the runtime's, with seccomp.
func readAnnotation(text string, docker bool) (profile, bool) {
	local, isLocal := strings.CutPrefix(text, annotatedLocal)
	switch {
	case text == annotatedUnconfined:
		return profile{kind: "Unconfined"}, true
	case text == annotatedDefault, docker && text == annotatedDocker:
		return profile{kind: "RuntimeDefault"}, true
	case isLocal:
		return profile{"Localhost", local}, true
	}
	return profile{}, false
}

// validateProfile wants a field to say what an annotation beside it says.
func validateProfile(at *field.Path, kind string, local *string, said profile) field.ErrorList {
	const why = "says something else than the annotation"
	switch {
	case kind != "Unconfined" && kind != "RuntimeDefault" && kind != "Localhost":
		return nil
	case kind != said.kind:
		return field.ErrorList{field.Forbidden(at.Child("type"), why)}
	case kind == "Localhost" && (local == nil || *local != said.local):
		return field.ErrorList{field.Forbidden(at.Child("localhostProfile"), why)}
	}
	return nil
}

// validateProfilesMatch wants the annotations that profiles were once given by to say what the fields say.
func validateProfilesMatch(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	seccomp := func(at *field.Path, key string, field *corev1.SeccompProfile) {
		if text, annotated := pod.Annotations[key]; annotated && field != nil {
			said, _ := readAnnotation(text, true)
			errs = append(errs, validateProfile(at.Child("securityContext", "seccompProfile"), string(field.Type), field.LocalhostProfile, said)...)
		}
	}
	whole := pod.Spec.SecurityContext
	if whole != nil {
		seccomp(atSpec, corev1.SeccompPodAnnotationKey, whole.SeccompProfile)
	}
	for at, c := range containers(&pod.Spec) {
		if c.SecurityContext != nil {
			seccomp(at, corev1.SeccompContainerAnnotationKeyPrefix+c.Name, c.SecurityContext.SeccompProfile)
		}
		var appArmor *corev1.AppArmorProfile
		if whole != nil {
			appArmor = whole.AppArmorProfile
		}
		if c.SecurityContext != nil && c.SecurityContext.AppArmorProfile != nil {
			appArmor = c.SecurityContext.AppArmorProfile
		}
		if text, annotated := pod.Annotations[appArmorPrefix+c.Name]; annotated && appArmor != nil {
			said, _ := readAnnotation(text, false)
			errs = append(errs, validateProfile(at.Child("securityContext", "appArmorProfile"), string(appArmor.Type), appArmor.LocalhostProfile, said)...)
		}
	}
	return errs
}

// adoptAppArmor moves AppArmor profiles from annotations, where they are deprecated, into the fields.
func adoptAppArmor(pod *corev1.Pod) {
	for _, c := range containers(&pod.Spec) {
		text, annotated := pod.Annotations[appArmorPrefix+c.Name]
		if !annotated || c.SecurityContext != nil && c.SecurityContext.AppArmorProfile != nil {
			continue
		}
		said, ok := readAnnotation(text, false)
		if !ok {
			continue
		}
		adopted := &corev1.AppArmorProfile{Type: corev1.AppArmorProfileType(said.kind)}
		if said.kind == "Localhost" {
			adopted.LocalhostProfile = &said.local
		}
		if len(validateAppArmor(nil, adopted)) > 0 || equality.Semantic.DeepEqual(adopted, pod.Spec.SecurityContext.AppArmorProfile) {
			continue
		}
		orPoint(&c.SecurityContext, corev1.SecurityContext{})
		c.SecurityContext.AppArmorProfile = adopted
	}
}

package pod

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// around is what a container's rules need to know of the Pod.
type around struct {
	spec    *corev1.PodSpec
	volumes map[string]*corev1.VolumeSource
	claims  map[string]bool
}

func validateContainers(spec *corev1.PodSpec, volumes map[string]*corev1.VolumeSource, claims map[string]bool) field.ErrorList {
	pod := around{spec, volumes, claims}
	list := atSpec.Child("containers")
	if len(spec.Containers) == 0 {
		return append(validateInitContainers(pod, map[string]bool{}), field.Required(list, "a Pod runs something"))
	}
	var errs field.ErrorList
	names := map[string]bool{}
	taken := map[hostPort]bool{}
	for i := range spec.Containers {
		c, at := &spec.Containers[i], list.Index(i)
		errs = append(errs, validateContainer(at, c, pod)...)
		if names[c.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), c.Name))
		}
		names[c.Name] = true
		errs = append(errs, validateHandlers(at, c, spec.TerminationGracePeriodSeconds)...)
		errs = append(errs, validateRestart(at, c, false)...)
		errs = append(errs, takeHostPorts(at, c, taken)...)
	}
	return append(errs, validateInitContainers(pod, names)...)
}

func validateInitContainers(pod around, names map[string]bool) field.ErrorList {
	var errs field.ErrorList
	list := atSpec.Child("initContainers")
	for i := range pod.spec.InitContainers {
		c, at := &pod.spec.InitContainers[i], list.Index(i)
		errs = append(errs, validateContainer(at, c, pod)...)
		errs = append(errs, validateRestart(at, c, true)...)
		if names[c.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), c.Name))
		}
		if c.Name != "" {
			names[c.Name] = true
		}
		// Init containers run one after the other, so each may have all the ports. Its place in the list is lost
		// in the answer: the API has always said 0.
		errs = append(errs, takeHostPorts(list.Index(0), c, map[hostPort]bool{})...)
		if stays(c) {
			errs = append(errs, validateHandlers(at, c, pod.spec.TerminationGracePeriodSeconds)...)
			continue
		}
		const why = "needs restartPolicy Always: an init container that ends is never asked"
		if c.Lifecycle != nil {
			errs = append(errs, field.Forbidden(at.Child("lifecycle"), why))
		}
		for name := range probes(c) {
			errs = append(errs, field.Forbidden(at.Child(name), why))
		}
		for j, policy := range c.ResizePolicy {
			if policy.RestartPolicy == corev1.RestartContainer {
				errs = append(errs, field.Invalid(at.Child("resizePolicy").Index(j).Child("restartPolicy"), policy.RestartPolicy,
					"must be NotRequired: an init container that ends is not resized"))
			}
		}
	}
	return errs
}

// validateContainer validates what all containers have in common.
func validateContainer(at *field.Path, c *corev1.Container, pod around) field.ErrorList {
	var errs field.ErrorList
	if c.Name == "" {
		errs = append(errs, field.Required(at.Child("name"), ""))
	} else {
		errs = append(errs, rules.DNSLabel(at.Child("name"), c.Name)...)
	}
	if c.Image == "" {
		errs = append(errs, field.Required(at.Child("image"), ""))
	}
	if strings.TrimSpace(c.Image) != c.Image {
		errs = append(errs, field.Invalid(at.Child("image"), c.Image, "must not begin or end with white space"))
	}
	errs = append(errs, rules.RequiredOneOf(at.Child("terminationMessagePolicy"), c.TerminationMessagePolicy,
		corev1.TerminationMessageReadFile, corev1.TerminationMessageFallbackToLogsOnError)...)
	errs = append(errs, validatePullPolicy(at.Child("imagePullPolicy"), c.ImagePullPolicy)...)
	errs = append(errs, validatePorts(at.Child("ports"), c.Ports)...)
	errs = append(errs, validateEnv(at, c)...)
	errs = append(errs, validateMounts(at, c, pod.volumes)...)
	errs = append(errs, validateResources(at.Child("resources"), &c.Resources, validateContainerResourceName, pod.claims)...)
	errs = append(errs, validateResizePolicy(at.Child("resizePolicy"), c.ResizePolicy, pod.spec.RestartPolicy)...)
	return append(errs, validateContainerSecurity(at.Child("securityContext"), c.SecurityContext, pod.spec)...)
}

func validatePullPolicy(at *field.Path, policy corev1.PullPolicy) field.ErrorList {
	return rules.RequiredOneOf(at, policy, corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
}

func validatePorts(at *field.Path, ports []corev1.ContainerPort) field.ErrorList {
	var errs field.ErrorList
	names := map[string]bool{}
	for i, port := range ports {
		at := at.Index(i)
		if port.Name != "" {
			wrong := rules.Each(at.Child("name"), port.Name, validation.IsValidPortName(port.Name))
			switch {
			case len(wrong) > 0:
				errs = append(errs, wrong...)
			case names[port.Name]:
				errs = append(errs, field.Duplicate(at.Child("name"), port.Name))
			default:
				names[port.Name] = true
			}
		}
		if port.ContainerPort == 0 {
			errs = append(errs, field.Required(at.Child("containerPort"), ""))
		} else {
			errs = append(errs, rules.Port(at.Child("containerPort"), int(port.ContainerPort))...)
		}
		if port.HostPort != 0 {
			errs = append(errs, rules.Port(at.Child("hostPort"), int(port.HostPort))...)
		}
		errs = append(errs, rules.RequiredOneOf(at.Child("protocol"), port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
	}
	return errs
}

// hostPort is a port of the node that only one container can have.
type hostPort struct {
	protocol corev1.Protocol
	ip       string
	port     int32
}

func takeHostPorts(at *field.Path, c *corev1.Container, taken map[hostPort]bool) field.ErrorList {
	var errs field.ErrorList
	for i, port := range c.Ports {
		if port.HostPort == 0 {
			continue
		}
		key := hostPort{port.Protocol, port.HostIP, port.HostPort}
		if taken[key] {
			errs = append(errs, field.Duplicate(at.Child("ports").Index(i).Child("hostPort"), port.HostPort))
		}
		taken[key] = true
	}
	return errs
}

func validateHandlers(at *field.Path, c *corev1.Container, grace *int64) field.ErrorList {
	var errs field.ErrorList
	for name, hook := range hooks(c) {
		errs = append(errs, validateHandler(at.Child("lifecycle", name), handler{hook.Exec, hook.HTTPGet, hook.TCPSocket, nil, hook.Sleep}, grace)...)
	}
	for name, probe := range probes(c) {
		errs = append(errs, validateProbe(at.Child(name), probe)...)
		switch {
		case name != "readinessProbe" && probe.SuccessThreshold != 1:
			errs = append(errs, field.Invalid(at.Child(name, "successThreshold"), probe.SuccessThreshold, "must be 1"))
		case name == "readinessProbe" && probe.TerminationGracePeriodSeconds != nil:
			errs = append(errs, field.Invalid(at.Child(name, "terminationGracePeriodSeconds"), *probe.TerminationGracePeriodSeconds,
				"must not be set: a readiness probe ends nothing"))
		}
	}
	return errs
}

func validateProbe(at *field.Path, probe *corev1.Probe) field.ErrorList {
	errs := validateHandler(at, handler{probe.Exec, probe.HTTPGet, probe.TCPSocket, probe.GRPC, nil}, nil)
	for _, number := range []struct {
		name  string
		value int32
	}{
		{"initialDelaySeconds", probe.InitialDelaySeconds},
		{"timeoutSeconds", probe.TimeoutSeconds},
		{"periodSeconds", probe.PeriodSeconds},
		{"successThreshold", probe.SuccessThreshold},
		{"failureThreshold", probe.FailureThreshold},
	} {
		errs = append(errs, rules.NotNegative(at.Child(number.name), int64(number.value))...)
	}
	if grace := probe.TerminationGracePeriodSeconds; grace != nil && *grace <= 0 {
		errs = append(errs, field.Invalid(at.Child("terminationGracePeriodSeconds"), *grace, "must be more than 0"))
	}
	return errs
}

// handler is what a probe or a hook does, of which there must be one.
type handler struct {
	exec  *corev1.ExecAction
	http  *corev1.HTTPGetAction
	tcp   *corev1.TCPSocketAction
	grpc  *corev1.GRPCAction
	sleep *corev1.SleepAction
}

func validateHandler(at *field.Path, h handler, grace *int64) field.ErrorList {
	actions := []struct {
		name  string
		set   bool
		judge func(*field.Path) field.ErrorList
	}{
		{"exec", h.exec != nil, func(at *field.Path) field.ErrorList {
			if len(h.exec.Command) == 0 {
				return field.ErrorList{field.Required(at.Child("command"), "")}
			}
			return nil
		}},
		{"httpGet", h.http != nil, func(at *field.Path) field.ErrorList { return validateHTTP(at, h.http) }},
		{"tcpSocket", h.tcp != nil, func(at *field.Path) field.ErrorList { return validatePort(at.Child("port"), h.tcp.Port) }},
		{"grpc", h.grpc != nil, func(at *field.Path) field.ErrorList { return rules.Port(at.Child("port"), int(h.grpc.Port)) }},
		{"sleep", h.sleep != nil, func(at *field.Path) field.ErrorList {
			if grace != nil && (h.sleep.Seconds < 0 || h.sleep.Seconds > *grace) {
				return field.ErrorList{field.Invalid(at, h.sleep.Seconds, "must be from 0 to terminationGracePeriodSeconds")}
			}
			return nil
		}},
	}
	var errs field.ErrorList
	found := false
	for _, action := range actions {
		switch {
		case action.set && found:
			errs = append(errs, field.Forbidden(at.Child(action.name), "there can be only one action"))
		case action.set:
			found = true
			errs = append(errs, action.judge(at.Child(action.name))...)
		}
	}
	if !found {
		errs = append(errs, field.Required(at, "an action: exec, httpGet, tcpSocket or another"))
	}
	return errs
}

func validateHTTP(at *field.Path, get *corev1.HTTPGetAction) field.ErrorList {
	var errs field.ErrorList
	if get.Path == "" {
		errs = append(errs, field.Required(at.Child("path"), ""))
	}
	errs = append(errs, validatePort(at.Child("port"), get.Port)...)
	errs = append(errs, rules.OneOf(at.Child("scheme"), get.Scheme, corev1.URISchemeHTTP, corev1.URISchemeHTTPS)...)
	for _, header := range get.HTTPHeaders {
		errs = append(errs, rules.Each(at.Child("httpHeaders"), header.Name, validation.IsHTTPHeaderName(header.Name))...)
	}
	return errs
}

func validatePort(at *field.Path, port intstr.IntOrString) field.ErrorList {
	if port.Type == intstr.String {
		return rules.Each(at, port.StrVal, validation.IsValidPortName(port.StrVal))
	}
	return rules.Port(at, port.IntValue())
}

// validateRestart validates a container's own restart policy and the rules for single exit codes.
func validateRestart(at *field.Path, c *corev1.Container, init bool) field.ErrorList {
	var errs field.ErrorList
	if c.RestartPolicy == nil {
		if len(c.RestartPolicyRules) == 0 {
			return nil
		}
		errs = append(errs, field.Required(at.Child("restartPolicy"), "restartPolicyRules are exceptions from it"))
		if init {
			return errs
		}
	} else {
		errs = append(errs, rules.OneOf(at.Child("restartPolicy"), *c.RestartPolicy,
			corev1.ContainerRestartPolicyAlways, corev1.ContainerRestartPolicyNever, corev1.ContainerRestartPolicyOnFailure)...)
	}
	const maxRules, maxCodes = 20, 255
	list := at.Child("restartPolicyRules")
	if len(c.RestartPolicyRules) > maxRules {
		errs = append(errs, field.TooMany(list, len(c.RestartPolicyRules), maxRules))
	}
	for i, rule := range c.RestartPolicyRules {
		at := list.Index(i)
		errs = append(errs, rules.OneOf(at.Child("action"), rule.Action,
			corev1.ContainerRestartRuleActionRestart, corev1.ContainerRestartRuleActionRestartAllContainers)...)
		codes := at.Child("exitCodes")
		if rule.ExitCodes == nil {
			errs = append(errs, field.Required(codes, ""))
			continue
		}
		errs = append(errs, rules.OneOf(codes.Child("operator"), rule.ExitCodes.Operator,
			corev1.ContainerRestartRuleOnExitCodesOpIn, corev1.ContainerRestartRuleOnExitCodesOpNotIn)...)
		if len(rule.ExitCodes.Values) > maxCodes {
			errs = append(errs, field.TooMany(codes.Child("values"), len(rule.ExitCodes.Values), maxCodes))
		}
	}
	return errs
}

func validateResizePolicy(at *field.Path, policies []corev1.ContainerResizePolicy, restart corev1.RestartPolicy) field.ErrorList {
	var errs field.ErrorList
	seen := map[corev1.ResourceName]bool{}
	for i, policy := range policies {
		if seen[policy.ResourceName] {
			errs = append(errs, field.Duplicate(at.Index(i), policy.ResourceName))
		}
		seen[policy.ResourceName] = true
		errs = append(errs, rules.RequiredOneOf(at, policy.ResourceName, corev1.ResourceCPU, corev1.ResourceMemory)...)
		errs = append(errs, rules.RequiredOneOf(at, policy.RestartPolicy, corev1.NotRequired, corev1.RestartContainer)...)
		if restart == corev1.RestartPolicyNever && policy.RestartPolicy != corev1.NotRequired {
			errs = append(errs, field.Invalid(at, policy.RestartPolicy, "must be NotRequired in a Pod that never restarts"))
		}
	}
	return errs
}

// Package restarts decides whether a container that has ended starts again. The node acts on it, and the API server holds the node's word
// about a Pod against it.
package restarts

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// After says whether a container starts again after it ended with code: by its rules, by its policy, by the Pod's.
func After(c *corev1.Container, spec *corev1.PodSpec, code int32) bool {
	if ruleFor(c, code) != nil {
		return true
	}
	policy := string(spec.RestartPolicy)
	if c.RestartPolicy != nil {
		policy = string(*c.RestartPolicy)
	}
	switch policy {
	case string(corev1.RestartPolicyNever):
		return false
	case string(corev1.RestartPolicyOnFailure):
		return code != 0
	}
	return true
}

// AllAfter says whether all containers of the Pod start again, init containers first, after one of them ended with code.
func AllAfter(c *corev1.Container, code int32) bool {
	rule := ruleFor(c, code)
	return rule != nil && rule.Action == corev1.ContainerRestartRuleActionRestartAllContainers
}

// MayRestartAll says whether a container has a rule by which all containers of its Pod start again.
func MayRestartAll(c *corev1.Container) bool {
	return c.RestartPolicy != nil && slices.ContainsFunc(c.RestartPolicyRules, func(r corev1.ContainerRestartRule) bool {
		return r.Action == corev1.ContainerRestartRuleActionRestartAllContainers
	})
}

// ruleFor is the first rule for an exit code, which is the one that counts. Rules are exceptions from the container's own policy.
func ruleFor(c *corev1.Container, code int32) *corev1.ContainerRestartRule {
	if c.RestartPolicy == nil {
		return nil
	}
	for i := range c.RestartPolicyRules {
		rule := &c.RestartPolicyRules[i]
		if rule.ExitCodes == nil {
			continue
		}
		listed := slices.Contains(rule.ExitCodes.Values, code)
		if listed == (rule.ExitCodes.Operator == corev1.ContainerRestartRuleOnExitCodesOpIn) {
			return rule
		}
	}
	return nil
}

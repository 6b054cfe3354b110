// Package restarts decides whether a container that has ended starts again. The node acts on it, and the API server holds the node's word
// about a Pod against it.
package restarts

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// After says whether a container starts again after it ended with code: by its rules, by its policy, by the Pod's.
func After(c *corev1.Container, spec *corev1.PodSpec, code int32) bool {
	policy := string(spec.RestartPolicy)
	if c.RestartPolicy != nil {
		policy = string(*c.RestartPolicy)
		for _, rule := range c.RestartPolicyRules {
			if rule.ExitCodes == nil {
				continue
			}
			listed := slices.Contains(rule.ExitCodes.Values, code)
			if listed == (rule.ExitCodes.Operator == corev1.ContainerRestartRuleOnExitCodesOpIn) {
				return true
			}
		}
	}
	switch policy {
	case string(corev1.RestartPolicyNever):
		return false
	case string(corev1.RestartPolicyOnFailure):
		return code != 0
	}
	return true
}

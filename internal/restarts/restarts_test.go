package restarts

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestRules(t *testing.T) {
	const in, notIn = corev1.ContainerRestartRuleOnExitCodesOpIn, corev1.ContainerRestartRuleOnExitCodesOpNotIn
	const one, all = corev1.ContainerRestartRuleActionRestart, corev1.ContainerRestartRuleActionRestartAllContainers
	rule := func(action corev1.ContainerRestartRuleAction, op corev1.ContainerRestartRuleOnExitCodesOperator, codes ...int32) corev1.ContainerRestartRule {
		return corev1.ContainerRestartRule{Action: action, ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{Operator: op, Values: codes}}
	}
	for name, c := range map[string]struct {
		rules           []corev1.ContainerRestartRule
		code            int32
		after, all, may bool
	}{
		"no rule":            {nil, 42, false, false, false},
		"this container":     {[]corev1.ContainerRestartRule{rule(one, in, 42)}, 42, true, false, false},
		"all":                {[]corev1.ContainerRestartRule{rule(all, in, 1, 42)}, 42, true, true, true},
		"another code":       {[]corev1.ContainerRestartRule{rule(all, in, 42)}, 43, false, false, true},
		"none of these":      {[]corev1.ContainerRestartRule{rule(all, notIn, 0)}, 43, true, true, true},
		"the first counts":   {[]corev1.ContainerRestartRule{rule(one, in, 42), rule(all, notIn, 0)}, 42, true, false, true},
		"the second matches": {[]corev1.ContainerRestartRule{rule(one, in, 42), rule(all, notIn, 0)}, 1, true, true, true},
	} {
		container := &corev1.Container{RestartPolicy: ptr.To(corev1.ContainerRestartPolicyNever), RestartPolicyRules: c.rules}
		if got := After(container, &corev1.PodSpec{RestartPolicy: corev1.RestartPolicyAlways}, c.code); got != c.after {
			t.Errorf("%s: it starts again: %v", name, got)
		}
		if got := AllAfter(container, c.code); got != c.all {
			t.Errorf("%s: all start again: %v", name, got)
		}
		if got := MayRestartAll(container); got != c.may {
			t.Errorf("%s: all may start again: %v", name, got)
		}
	}
}

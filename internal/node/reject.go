package node

import (
	corev1 "k8s.io/api/core/v1"

	"portal/internal/node/life"
	"portal/internal/node/runtime/shim"
)

// reject says why this node does not run a Pod at all, if it does not: what the Pod asks for would reach beyond it.
func reject(pod *corev1.Pod) *life.Rejection {
	if s := pod.Spec.SecurityContext; s != nil {
		for _, sysctl := range s.Sysctls {
			if err := shim.CheckSysctl(shim.SysctlName(sysctl.Name), !pod.Spec.HostNetwork, !pod.Spec.HostIPC); err != nil {
				return &life.Rejection{Reason: "SysctlForbidden", Message: "spec.securityContext.sysctls: " + err.Error()}
			}
		}
	}
	return nil
}

package node

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestReject(t *testing.T) {
	sysctl := func(name string) func(*corev1.PodSpec) {
		return func(s *corev1.PodSpec) {
			s.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: name, Value: "1"}}}
		}
	}
	add := func(name corev1.Capability) func(*corev1.PodSpec) {
		return func(s *corev1.PodSpec) {
			s.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{name}}}
		}
	}
	both := func(list ...func(*corev1.PodSpec)) func(*corev1.PodSpec) {
		return func(s *corev1.PodSpec) {
			for _, f := range list {
				f(s)
			}
		}
	}
	for name, c := range map[string]struct {
		mend            func(*corev1.PodSpec)
		reason, message string
	}{
		"plain":                      {func(*corev1.PodSpec) {}, "", ""},
		"a safe sysctl":              {sysctl("net.ipv4.tcp_syncookies"), "", ""},
		"the same with slashes":      {sysctl("net/ipv4/tcp_syncookies"), "", ""},
		"the node's core_pattern":    {sysctl("kernel.core_pattern"), "SysctlForbidden", "kernel.core_pattern"},
		"the same with slashes, too": {sysctl("kernel/core_pattern"), "SysctlForbidden", "kernel.core_pattern"},
		"the node's network":         {both(sysctl("net.ipv4.tcp_syncookies"), func(s *corev1.PodSpec) { s.HostNetwork = true }), "SysctlForbidden", "net.ipv4.tcp_syncookies"},
		"the node's IPC":             {both(sysctl("kernel.shm_rmid_forced"), func(s *corev1.PodSpec) { s.HostIPC = true }), "SysctlForbidden", "kernel.shm_rmid_forced"},
		"shared processes":           {func(s *corev1.PodSpec) { s.ShareProcessNamespace = ptr.To(true) }, "", ""},
		"processes not shared":       {func(s *corev1.PodSpec) { s.ShareProcessNamespace = ptr.To(false) }, "", ""},
		"SYS_PTRACE":                 {add("SYS_PTRACE"), "", ""},
		"cap_sys_ptrace":             {add("cap_sys_ptrace"), "", ""},
		"ALL":                        {add("ALL"), "", ""},
		"NET_ADMIN":                  {add("NET_ADMIN"), "", ""},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}
		c.mend(&pod.Spec)
		got := reject(pod)
		switch {
		case c.reason == "":
			if got != nil {
				t.Errorf("%s: %+v", name, got)
			}
		case got == nil || got.Reason != c.reason || !strings.Contains(got.Message, c.message):
			t.Errorf("%s: %+v", name, got)
		}
	}
}

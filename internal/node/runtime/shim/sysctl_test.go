package shim

import "testing"

func TestCheckSysctl(t *testing.T) {
	for _, c := range []struct {
		name           string
		network, ipc   bool
		pod, fromAgent bool
	}{
		{"net.ipv4.ip_local_port_range", true, true, true, true},
		{"net.ipv4.ip_local_port_range", false, true, false, false},
		{"net.ipv4.tcp_rmem", true, false, true, true},
		{"kernel.shm_rmid_forced", true, true, true, true},
		{"kernel.shm_rmid_forced", true, false, false, false},
		{"kernel.core_pattern", true, true, false, false},
		{"kernel.modprobe", true, true, false, false},
		{"kernel.shmmax", true, true, false, false},
		{"vm.overcommit_memory", true, true, false, false},
		{"net.core.somaxconn", true, true, false, false},
		{"net.ipv4.conf.default.accept_redirects", true, true, false, true},
		{"net.ipv4.conf.default.accept_redirects", false, true, false, false},
		{"net.ipv4.conf.default./../../../kernel/core_pattern", true, true, false, false},
		{SysctlName("net.ipv4.conf.default./../../../kernel/core_pattern"), true, true, false, false},
		{SysctlName("kernel/core_pattern"), true, true, false, false},
		{SysctlName("net/ipv4/tcp_syncookies"), true, true, true, true},
		{"", true, true, false, false},
	} {
		if err := CheckSysctl(c.name, c.network, c.ipc); (err == nil) != c.pod {
			t.Errorf("%q, network %t, IPC %t: %v", c.name, c.network, c.ipc, err)
		}
		if err := checkSysctl(c.name, c.network, c.ipc); (err == nil) != c.fromAgent {
			t.Errorf("from the agent: %q, network %t, IPC %t: %v", c.name, c.network, c.ipc, err)
		}
	}
}

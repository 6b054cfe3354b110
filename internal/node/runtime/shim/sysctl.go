package shim

import (
	"fmt"
	"slices"
	"strings"
)

// The settings of the kernel that a Pod may choose: each belongs to one namespace and can't be used against others. They are those that
// kubelets allow unless configured otherwise.
var (
	ipcSysctls     = []string{"kernel.shm_rmid_forced"}
	networkSysctls = []string{
		"net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range",
		"net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time",
		"net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem",
	}
)

// SysctlName is a setting's name with dots, however it is written.
func SysctlName(name string) string { return strings.ReplaceAll(name, "/", ".") }

// CheckSysctl says why a Pod may not choose a setting, if it may not. Its name is that of SysctlName.
func CheckSysctl(name string, ownNetwork, ownIPC bool) error {
	switch {
	case slices.Contains(networkSysctls, name):
		if !ownNetwork {
			return fmt.Errorf("sysctl %s: would be the node's, as the Pod uses the node's network", name)
		}
	case slices.Contains(ipcSysctls, name):
		if !ownIPC {
			return fmt.Errorf("sysctl %s: would be the node's, as the Pod uses the node's IPC namespace", name)
		}
	default:
		return fmt.Errorf("sysctl %s: is not one that a Pod may set", name)
	}
	return nil
}

// checkSysctl also lets the agent set how interfaces of a network namespace of the Pod's own begin.
func checkSysctl(name string, ownNetwork, ownIPC bool) error {
	for _, family := range []string{"net.ipv4.conf.default.", "net.ipv6.conf.default."} {
		if rest, ok := strings.CutPrefix(name, family); ok && ownNetwork && !strings.ContainsAny(rest, "./") {
			return nil
		}
	}
	return CheckSysctl(name, ownNetwork, ownIPC)
}

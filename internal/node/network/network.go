// Package network connects Pods to their node: with a bridge and addresses of the node's Pod CIDRs, or as a CNI configuration says. It knows
// network namespaces by their paths; of processes and the API it knows nothing. Below it are the ways to the Pods of other nodes
// (peers) and to the rest of the world (nat).
package network

import (
	"context"
	"net/netip"
	"os"
	"slices"
	"strings"

	"portal/internal/hostnet"
)

// Pod is a Pod as far as its network is concerned.
type Pod struct {
	// UID is what it is known by later.
	UID, Namespace, Name string
	Ports                []Port
}

// Port is a port of the node that should lead to a Pod.
type Port struct {
	Protocol      string // TCP, UDP or SCTP
	Host          netip.Addr
	HostPort, Pod uint16
}

// Network connects Pods. What it has done it finds again after a restart of the process.
type Network interface {
	// Setup makes what Pods share, or repairs it.
	Setup() error
	// Attach connects a Pod's network namespace, and returns the Pod's addresses. What it has already it keeps.
	Attach(ctx context.Context, pod Pod, namespace string) ([]netip.Addr, error)
	// Addresses are those that a Pod has.
	Addresses(pod string) ([]netip.Addr, error)
	// Detach disconnects a Pod, if it is connected, and gives its addresses back.
	Detach(ctx context.Context, pod string) error
	// Sweep detaches all Pods but those that are kept: what an earlier process left in the middle.
	Sweep(ctx context.Context, keep map[string]bool) error
}

// PodSysctls are settings of a Pod's network namespace, to be made before it is attached: it takes no routes from neighbours, uses its
// addresses immediately, and lets its processes use low ports, which are nobody else's there.
func PodSysctls() map[string]string {
	out := map[string]string{
		"net.ipv4.conf.default.accept_redirects":     "0",
		"net.ipv4.ip_unprivileged_port_start":        "0",
		"net.ipv4.ping_group_range":                  "0 2147483647",
		"net.ipv6.conf.default.accept_redirects":     "0",
		"net.ipv6.conf.default.accept_ra":            "0",
		"net.ipv6.conf.default.accept_dad":           "0",
		"net.ipv6.conf.default.router_solicitations": "0",
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		for name := range out {
			if strings.HasPrefix(name, "net.ipv6.") {
				delete(out, name)
			}
		}
	}
	return out
}

// Forward has the node forward packets of the families. Where routes come from router advertisements, it goes on accepting those.
func Forward(four, six bool) error {
	problems := slices.DeleteFunc(hostnet.Check(hostnet.Needs{Forward4: four, Forward6: six}), func(p hostnet.Problem) bool { return !p.Lost })
	_, err := new(hostnet.Configured).Configure(problems)
	return err
}

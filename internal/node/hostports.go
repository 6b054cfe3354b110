package node

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/node/life"
	"portal/internal/node/network"
	"portal/internal/node/network/nat"
)

// hostPorts are the ports of the node that a Pod asks for.
func hostPorts(pod *corev1.Pod) (out []network.Port) {
	collect := func(c *corev1.Container) {
		for _, p := range c.Ports {
			if p.HostPort <= 0 || p.HostPort > 65535 {
				continue
			}
			port := network.Port{Protocol: string(p.Protocol), HostPort: uint16(p.HostPort), Pod: uint16(p.ContainerPort)}
			if port.Protocol == "" {
				port.Protocol = string(corev1.ProtocolTCP)
			}
			if host, err := netip.ParseAddr(p.HostIP); err == nil {
				port.Host = host.Unmap()
			}
			out = append(out, port)
		}
	}
	for i := range pod.Spec.InitContainers {
		// Others have ended before the Pod serves.
		if c := &pod.Spec.InitContainers[i]; c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			collect(c)
		}
	}
	for i := range pod.Spec.Containers {
		collect(&pod.Spec.Containers[i])
	}
	return out
}

// natPorts are ports with the addresses that they lead to, in each family that the Pod has, by an interface of the node.
func natPorts(ports []network.Port, addrs []netip.Addr, link string) (out []nat.Port) {
	for _, p := range ports {
		protocol, ok := nat.Protocol(p.Protocol)
		if !ok {
			continue
		}
		for _, a := range addrs {
			if !p.Host.IsValid() || p.Host.Is4() == a.Is4() {
				out = append(out, nat.Port{Protocol: protocol, Host: p.Host, HostPort: p.HostPort, Pod: netip.AddrPortFrom(a, p.Pod), Interface: link})
			}
		}
	}
	return out
}

// portClaims are the node's ports that Pods have, also those in the node's own network: no two have the same. The scheduler sees to
// that; Pods that were bound without it are refused here.
type portClaims struct {
	mu   sync.Mutex
	pods map[types.UID]portClaim
}

type portClaim struct {
	pod   string
	ports []network.Port
}

// take claims a Pod's ports, or says whose one of them is.
func (c *portClaims) take(pod *corev1.Pod) *life.Rejection {
	ports := hostPorts(pod)
	if len(ports) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, other := range c.pods {
		for _, taken := range other.ports {
			if i := slices.IndexFunc(ports, func(p network.Port) bool { return conflict(p, taken) }); i >= 0 && uid != pod.UID {
				return &life.Rejection{Reason: "NodePorts", Message: fmt.Sprintf("hostPort %d/%s is in use on this node by the Pod %s", ports[i].HostPort, ports[i].Protocol, other.pod)}
			}
		}
	}
	if c.pods == nil {
		c.pods = map[types.UID]portClaim{}
	}
	c.pods[pod.UID] = portClaim{pod.Namespace + "/" + pod.Name, ports}
	return nil
}

// release gives a Pod's ports back.
func (c *portClaims) release(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pods, uid)
}

func conflict(a, b network.Port) bool {
	all := func(p network.Port) bool { return !p.Host.IsValid() || p.Host.IsUnspecified() }
	return a.HostPort == b.HostPort && a.Protocol == b.Protocol && (a.Host == b.Host || all(a) || all(b))
}

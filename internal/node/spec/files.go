package spec

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Hostname is a Pod's host name, and its full name if it has one: under a subdomain.
func Hostname(pod *corev1.Pod, zone string) (name, full string) {
	if pod.Spec.HostnameOverride != nil {
		return *pod.Spec.HostnameOverride, ""
	}
	name = pod.Name
	if pod.Spec.Hostname != "" {
		name = pod.Spec.Hostname
	}
	// The kernel's limit. A name must not end in what separates its parts.
	if len(name) > 63 {
		name = strings.TrimRight(name[:63], "-.")
	}
	if pod.Spec.Subdomain != "" && zone != "" {
		full = name + "." + pod.Spec.Subdomain + "." + pod.Namespace + ".svc." + zone
	}
	return name, full
}

// longestHostname is what the kernel takes.
const longestHostname = 64

// KernelHostname is the host name that a Pod's processes see: the full name if the Pod asks for it and has one.
func KernelHostname(pod *corev1.Pod, zone string) (string, error) {
	name, full := Hostname(pod, zone)
	if full == "" || pod.Spec.SetHostnameAsFQDN == nil || !*pod.Spec.SetHostnameAsFQDN {
		return name, nil
	}
	if len(full) > longestHostname {
		return "", fmt.Errorf("setHostnameAsFQDN: the Pod's full name %s has %d characters, and a host name can have %d: shorten the Pod's name or hostname, its subdomain or its namespace", full, len(full), longestHostname)
	}
	return full, nil
}

// Hosts is a Pod's /etc/hosts. A Pod on the node's network begins with the node's.
func Hosts(pod *corev1.Pod, ips []netip.Addr, zone, nodes string) string {
	var out strings.Builder
	if pod.Spec.HostNetwork {
		out.WriteString(nodes)
		if nodes != "" && !strings.HasSuffix(nodes, "\n") {
			out.WriteByte('\n')
		}
	} else {
		// Programs recognise the file by its first line.
		out.WriteString("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::\tip6-localnet\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n")
		name, full := Hostname(pod, zone)
		for _, ip := range ips {
			fmt.Fprintf(&out, "%s\t%s\n", ip, strings.TrimSpace(full+"\t"+name))
		}
	}
	for _, alias := range pod.Spec.HostAliases {
		fmt.Fprintf(&out, "%s\t%s\n", alias.IP, strings.Join(alias.Hostnames, "\t"))
	}
	return out.String()
}

// Resolver is what a resolv.conf says.
type Resolver struct {
	Servers, Search []string
	Options         []string
}

// Local says that all servers are at loopback addresses, which are others in the network of a Pod.
func (r Resolver) Local() bool {
	return len(r.Servers) > 0 && !slices.ContainsFunc(r.Servers, func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err != nil || !a.IsLoopback()
	})
}

// ParseResolver reads a resolv.conf.
func ParseResolver(text string) (r Resolver) {
	for _, line := range strings.Split(text, "\n") {
		f := strings.Fields(line)
		if len(f) < 2 || strings.HasPrefix(f[0], "#") || strings.HasPrefix(f[0], ";") {
			continue
		}
		switch f[0] {
		case "nameserver":
			r.Servers = append(r.Servers, f[1])
		case "search", "domain":
			r.Search = f[1:]
		case "options":
			r.Options = append(r.Options, f[1:]...)
		}
	}
	return r
}

// Resolve is a Pod's resolv.conf, from its dnsPolicy and dnsConfig, the cluster's DNS servers and zone, and the node's own.
func Resolve(pod *corev1.Pod, cluster []string, zone string, node Resolver) string {
	policy := pod.Spec.DNSPolicy
	if policy == corev1.DNSClusterFirst && pod.Spec.HostNetwork {
		policy = corev1.DNSDefault
	}
	if len(cluster) == 0 && (policy == corev1.DNSClusterFirst || policy == corev1.DNSClusterFirstWithHostNet || policy == "") {
		policy = corev1.DNSDefault
	}
	var r Resolver
	switch policy {
	case corev1.DNSNone:
	case corev1.DNSDefault:
		r = Resolver{Servers: slices.Clone(node.Servers), Search: slices.Clone(node.Search), Options: slices.Clone(node.Options)}
	default:
		r.Servers = slices.Clone(cluster)
		r.Search = append([]string{pod.Namespace + ".svc." + zone, "svc." + zone, zone}, node.Search...)
		r.Options = []string{"ndots:5"}
	}
	if c := pod.Spec.DNSConfig; c != nil {
		r.Servers = unique(append(r.Servers, c.Nameservers...))
		r.Search = unique(append(r.Search, c.Searches...))
		for _, o := range c.Options {
			text := o.Name
			if o.Value != nil {
				text += ":" + *o.Value
			}
			r.Options = slices.DeleteFunc(r.Options, func(have string) bool {
				name, _, _ := strings.Cut(have, ":")
				return name == o.Name
			})
			r.Options = append(r.Options, text)
		}
	}
	var out strings.Builder
	if len(r.Search) > 0 {
		fmt.Fprintf(&out, "search %s\n", strings.Join(r.Search, " "))
	}
	// A resolver reads three.
	for _, s := range r.Servers[:min(3, len(r.Servers))] {
		fmt.Fprintf(&out, "nameserver %s\n", s)
	}
	if len(r.Options) > 0 {
		fmt.Fprintf(&out, "options %s\n", strings.Join(r.Options, " "))
	}
	return out.String()
}

func unique(list []string) (out []string) {
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// SubPath is which part of its volume a mount shows. Variables can make it one that leads out of the volume, which is a mistake in the Pod.
func SubPath(m *corev1.VolumeMount, vars map[string]string) (string, error) {
	sub := m.SubPath
	if m.SubPathExpr != "" {
		var unknown []string
		if sub, unknown = expand(m.SubPathExpr, vars); len(unknown) > 0 {
			return "", fmt.Errorf("subPathExpr %q of volume %s: the container's env has no %s", m.SubPathExpr, m.Name, strings.Join(unknown, ", "))
		}
	}
	if path.IsAbs(sub) {
		return "", fmt.Errorf("subPath %q of volume %s: must not be absolute", sub, m.Name)
	}
	if slices.Contains(strings.Split(sub, "/"), "..") {
		return "", fmt.Errorf("subPath %q of volume %s: must not contain '..'", sub, m.Name)
	}
	return sub, nil
}

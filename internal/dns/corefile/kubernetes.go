package corefile

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// readKubernetes reads the kubernetes plugin.
func (b *block) readKubernetes(d directive) error {
	if b.kubernetes != nil {
		return d.errorf("a second kubernetes plugin")
	}
	k := &kubernetes{position: d.position, Kubernetes: Kubernetes{TTL: -1, Pods: "disabled", Reverse: []string{}}}
	b.kubernetes = k
	zones := b.zones
	if len(d.args) > 0 {
		zones = nil
		for _, a := range d.args {
			z, err := zonesOf(a)
			if err != nil {
				return d.errorf("kubernetes: %v", err)
			}
			zones = append(zones, z...)
		}
	}
	for _, z := range zones {
		switch {
		case within(z, "in-addr.arpa") || within(z, "ip6.arpa"):
			k.Reverse = append(k.Reverse, z)
		case z == "":
			return d.errorf("kubernetes: the root can't be a cluster's domain; name a zone")
		default:
			k.Zones = append(k.Zones, z)
		}
	}
	if len(k.Zones) == 0 {
		return d.errorf("kubernetes: want a zone that is not of addresses")
	}
	for _, o := range d.body {
		if err := k.option(o); err != nil {
			return err
		}
	}
	if len(k.Namespaces) > 0 && k.NamespaceLabels != "" {
		return d.errorf("kubernetes: namespaces and namespace_labels exclude each other")
	}
	return nil
}

func (k *kubernetes) option(o directive) error {
	want := func(least, most int) error {
		if len(o.args) < least || len(o.args) > most {
			return o.errorf("%s: takes %d to %d arguments, has %d", o.name, least, most, len(o.args))
		}
		return nil
	}
	switch o.name {
	case "pods":
		if len(o.args) != 1 || o.args[0] != "disabled" && o.args[0] != "insecure" && o.args[0] != "verified" {
			return o.errorf("pods: want one of disabled, insecure, verified")
		}
		k.Pods = o.args[0]
	case "ttl":
		n := -1
		if len(o.args) == 1 {
			if v, err := strconv.Atoi(o.args[0]); err == nil {
				n = v
			}
		}
		if n < 0 || n > 3600 {
			return o.errorf("ttl: want a number from 0 to 3600")
		}
		k.TTL = n
	case "kubeconfig":
		if err := want(1, 2); err != nil {
			return err
		}
		k.Kubeconfig = o.args[0]
		if len(o.args) == 2 {
			k.Context = o.args[1]
		}
	case "endpoint":
		if err := want(1, 1); err != nil {
			return err
		}
		k.Endpoint = o.args[0]
	case "namespaces":
		if len(o.args) == 0 {
			return o.errorf("namespaces: want at least one")
		}
		k.Namespaces = append(k.Namespaces, o.args...)
	case "labels":
		k.Labels = strings.Join(o.args, " ")
	case "namespace_labels":
		k.NamespaceLabels = strings.Join(o.args, " ")
	case "endpoint_pod_names":
		k.EndpointPodNames = true
	case "noendpoints":
		k.NoEndpoints = true
	case "ignore":
		if len(o.args) != 1 || o.args[0] != "empty_service" {
			return o.errorf("ignore: want empty_service")
		}
		k.IgnoreEmpty = true
	case "fallthrough":
		k.Fallthrough = append(k.Fallthrough, o.args...)
		if len(o.args) == 0 {
			k.Fallthrough = []string{"."}
		}
	case "startup_timeout", "apiserver_qps", "apiserver_burst", "apiserver_max_inflight":
		// These only bound the load on the API server.
	default:
		return o.errorf("kubernetes: the option %q is not supported", o.name)
	}
	return nil
}

// zonesOf reads a zone: a name, or the prefix of a network, whose reverse zone is meant.
func zonesOf(text string) ([]string, error) {
	if !strings.Contains(text, "/") {
		name := strings.ToLower(strings.TrimSuffix(text, "."))
		for label := range strings.SplitSeq(name, ".") {
			if name != "" && (label == "" || len(label) > 63) {
				return nil, fmt.Errorf("%q is not a zone", text)
			}
		}
		return []string{name}, nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return nil, fmt.Errorf("%q is neither a zone nor a network", text)
	}
	digit, suffix := 8, "in-addr.arpa"
	if p.Addr().Is6() {
		digit, suffix = 4, "ip6.arpa"
	}
	if p.Bits()%digit != 0 {
		return nil, fmt.Errorf("%s: only networks of a multiple of %d bits have a zone of their own", text, digit)
	}
	name, bytes := suffix, p.Masked().Addr().AsSlice()
	for i := range p.Bits() / digit {
		if digit == 8 {
			name = fmt.Sprintf("%d.%s", bytes[i], name)
		} else {
			name = fmt.Sprintf("%x.%s", bytes[i/2]>>(4*(1-i%2))&15, name)
		}
	}
	return []string{name}, nil
}

package zone

import (
	"net/netip"
	"strings"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// Names with full records: the direct way from intent to records. They serve Services that do not fit the packed form, queries
// in unusual forms, and transfers.

// build makes all names of a Service.
func (z *Zones) build(e *intent.Entry) (names []*Name) {
	s := e.Service
	if s == nil {
		return nil
	}
	own, endpoints := z.records(e)
	for _, g := range z.origins {
		base := serviceName(s.Key, g.wire)
		if g.reverse || len(base) > wire.MaxName {
			continue
		}
		if len(own) > 0 {
			names = append(names, newName(base, base, z.opts.TTL, own))
		}
		if s.Type == intent.ExternalName {
			continue
		}
		names = append(names, grouped(base, z.opts.TTL, own, record.portLabels)...)
		names = append(names, grouped(base, z.opts.TTL, endpoints, record.hostLabel)...)
	}
	return names
}

// serviceName is a Service's own name in a zone.
func serviceName(k intent.Key, origin string) string {
	return serviceLabels(k) + svc + origin
}

// portLabels are _port._protocol in wire form, for ports that have a name.
func (r record) portLabels() string { return portPair(r.label, r.proto) }

// hostLabel is an endpoint's own label in wire form.
func (r record) hostLabel() string {
	if r.host == "" {
		return ""
	}
	return string(append([]byte{byte(len(r.host))}, r.host...))
}

// grouped makes a name of each group of records with the same prefix, in order of appearance.
func grouped(base string, ttl uint32, records []record, prefix func(record) string) (names []*Name) {
	var order []string
	groups := map[string][]record{}
	for _, r := range records {
		p := prefix(r)
		if p == "" || len(p)+len(base) > wire.MaxName {
			continue
		}
		if groups[p] == nil {
			order = append(order, p)
		}
		groups[p] = append(groups[p], r)
	}
	for _, p := range order {
		names = append(names, newName(p+base, base, ttl, groups[p]))
	}
	return names
}

// records returns what a Service's own name and those of its endpoints resolve to.
func (z *Zones) records(e *intent.Entry) (own, endpoints []record) {
	s := e.Service
	if s.Type == intent.ExternalName {
		if _, err := netip.ParseAddr(s.ExternalName); err == nil {
			return nil, nil // the target of a CNAME can't be an address
		}
		target, err := wire.PackName(s.ExternalName)
		if err != nil || target == "\x00" {
			return nil, nil
		}
		return []record{{target: target, port: -1}}, nil
	}
	if !z.opts.NoEndpoints {
		endpoints = z.endpointRecords(e)
	}
	if s.Headless {
		return endpoints, endpoints
	}
	if z.opts.IgnoreEmpty && len(endpoints) == 0 {
		return nil, nil
	}
	ports := s.Ports
	if len(ports) == 0 {
		ports = []intent.Port{{}}
	}
	for _, p := range ports {
		for _, a := range s.ClusterIPs {
			r := record{addr: a, port: int(p.Port), label: strings.ToLower(p.Name), proto: strings.ToLower(p.Protocol.String())}
			if p.Port == 0 {
				r.port = -1
			}
			own = append(own, r)
		}
	}
	return own, endpoints
}

func (z *Zones) endpointRecords(e *intent.Entry) []record {
	var out []record
	seen := map[record]struct{}{} // an endpoint that moves between slices is in both for a while
	for _, s := range e.Slices {
		ports := s.Ports
		if len(ports) == 0 {
			ports = []intent.EndpointPort{{}}
		}
		for i := range s.Endpoints {
			end := &s.Endpoints[i]
			if !end.Is(intent.Ready) {
				continue
			}
			r := record{host: z.hostname(s, i), addr: end.Addr.Unmap()}
			if s.Family == 0 {
				if r.target, _ = wire.PackName(s.Names[i]); r.target == "" {
					continue
				}
			}
			for _, p := range ports {
				r.port, r.label, r.proto = int(p.Port), strings.ToLower(p.Name), strings.ToLower(p.Protocol.String())
				if p.Port == 0 {
					r.port = -1
				}
				if _, dup := seen[r]; !dup {
					seen[r] = struct{}{}
					out = append(out, r)
				}
			}
		}
	}
	return out
}

// hostname is the label of an endpoint below its Service.
func (z *Zones) hostname(s *intent.Slice, i int) string {
	end := &s.Endpoints[i]
	switch {
	case end.Hostname != "" && len(end.Hostname) < 64:
		return strings.ToLower(end.Hostname)
	case z.opts.EndpointPodNames && end.Pod != "" && len(end.Pod) < 64:
		return strings.ToLower(end.Pod)
	case s.Family == 0:
		return ""
	}
	name := strings.NewReplacer(".", "-", ":", "-").Replace(end.Addr.String())
	if strings.HasSuffix(name, "-") {
		name += "0" // a label can't end in a dash
	}
	return name
}

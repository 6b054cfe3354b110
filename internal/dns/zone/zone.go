// Package zone turns intent into DNS records, prepared ahead, and answers questions about them: the names of Services,
// endpoints and pods under the cluster's domains, and their addresses' names. It knows nothing of sockets and caches.
//
// Names follow the Kubernetes DNS specification 1.1.0; where that is silent, what CoreDNS answers.
package zone

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// PodMode is how names made of a Pod's address are answered.
type PodMode string

const (
	PodsDisabled PodMode = "disabled"
	PodsInsecure PodMode = "insecure" // any address, whether a Pod has it or not
	PodsVerified PodMode = "verified"
)

// Options say which names to make.
type Options struct {
	Zones []string // the cluster's domains; the first is the one that addresses lead back to
	TTL   uint32
	Pods  PodMode
	// Namespaces, if any, are the only ones shown.
	Namespaces []string
	// EndpointPodNames calls an endpoint without a hostname by its Pod's name rather than by its address.
	EndpointPodNames bool
	// NoEndpoints leaves out all names that come from endpoints.
	NoEndpoints bool
	// IgnoreEmpty denies Services that no ready endpoint stands behind.
	IgnoreEmpty bool
	// Servers are the addresses of the name server itself.
	Servers []netip.Addr
}

// origin is a zone that is answered with authority.
type origin struct {
	wire    string
	labels  int
	reverse bool
}

// Zones holds the records. Update is for one goroutine; everything else is safe for any number.
type Zones struct {
	opts       Options
	cluster    *intent.Cluster
	origins    []origin // cluster domains first, in the order given
	table      *table
	serial     atomic.Uint32
	ready      atomic.Bool
	only       map[string]bool
	published  map[intent.Key][]string // owners of the names made for a Service
	namespaces map[string]bool
	byNS       map[string]map[intent.Key]struct{}
	reverse    reverse
	pods       atomic.Pointer[podIndex]
	names      atomic.Int64
}

// New returns the zones of a cluster, empty until the first Update.
func New(cluster *intent.Cluster, o Options) (*Zones, error) {
	z := &Zones{
		opts: o, cluster: cluster, table: newTable(), published: map[intent.Key][]string{},
		namespaces: map[string]bool{}, byNS: map[string]map[intent.Key]struct{}{}, reverse: newReverse(),
	}
	if len(o.Namespaces) > 0 {
		z.only = map[string]bool{}
		for _, n := range o.Namespaces {
			z.only[n] = true
		}
	}
	if len(o.Zones) == 0 {
		return nil, fmt.Errorf("no zone given")
	}
	for _, name := range append(append([]string{}, o.Zones...), "in-addr.arpa", "ip6.arpa") {
		w, err := wire.PackName(name)
		if err != nil || w == "\x00" {
			return nil, fmt.Errorf("zone %q: %w", name, errOr(err, "the root cannot be a cluster's domain"))
		}
		z.origins = append(z.origins, origin{wire: w, labels: strings.Count(strings.Trim(name, "."), ".") + 1, reverse: strings.HasSuffix(w, "\x04arpa\x00")})
	}
	z.touch(time.Now())
	for _, g := range z.origins {
		z.addFixed(g)
	}
	z.pods.Store(&podIndex{})
	return z, nil
}

func errOr(err error, text string) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("%s", text)
}

// touch advances the serial number, which counts seconds like CoreDNS' but never stands still between two changes.
func (z *Zones) touch(now time.Time) {
	z.serial.Store(max(z.serial.Load()+1, uint32(now.Unix())))
}

// addFixed makes the names that every zone has.
func (z *Zones) addFixed(g origin) {
	apex := &Name{owner: g.wire, kind: bare}
	if len(z.opts.Servers) > 0 {
		apex.add(z.serverSet(g))
	}
	z.table.put(apex)
	txt := appendRR(nil, toQuestion, wire.TypeTXT, 28800, 6)
	version := &Name{owner: "\x0bdns-version" + g.wire, kind: txtOnly}
	version.add(set{typ: wire.TypeTXT, an: 1, data: append(txt, "\x051.1.0"...)})
	z.table.put(version)
	z.table.put(&Name{owner: "\x03svc" + g.wire, kind: bare})
	z.table.put(&Name{owner: "\x03pod" + g.wire, kind: bare})
	ns := &Name{owner: "\x02ns\x03dns" + g.wire, kind: server}
	var records []record
	for _, a := range z.opts.Servers {
		records = append(records, record{addr: a, port: -1})
	}
	ns.addAddresses(z.opts.TTL, records)
	z.table.put(ns)
}

// serverSet is the zone's NS record with the server's addresses.
func (z *Zones) serverSet(g origin) set {
	s := set{typ: wire.TypeNS, an: 1}
	s.data = append(appendRR(nil, toQuestion, wire.TypeNS, z.opts.TTL, 9), "\x02ns\x03dns"...)
	at := wire.HeaderLen + len(g.wire) + 4 + 12
	s.data = binary.BigEndian.AppendUint16(s.data, toQuestion)
	for _, a := range z.opts.Servers {
		s.data = appendAddr(s.data, 0xC000|uint16(at), z.opts.TTL, a)
		s.ar++
	}
	return s
}

// Update brings the records in line with intent for what changed.
func (z *Zones) Update(d *intent.Changes) {
	for name := range d.Namespaces {
		z.updateNamespace(name)
	}
	for k := range d.Services {
		z.updateService(k)
	}
	if len(d.Pods) > 0 {
		z.updatePods(d.Pods)
	}
	if len(d.Namespaces)+len(d.Services) > 0 {
		z.touch(time.Now())
	}
	z.names.Store(int64(z.table.live))
	if !z.ready.Load() && z.cluster.Complete() {
		z.ready.Store(true)
	}
}

// Ready says whether the whole cluster has been seen once.
func (z *Zones) Ready() bool { return z.ready.Load() }

// Names is the number of names that are answered from memory.
func (z *Zones) Names() int { return int(z.names.Load()) }

func (z *Zones) exposed(namespace string) bool {
	return z.namespaces[namespace] && (z.only == nil || z.only[namespace])
}

func (z *Zones) updateNamespace(name string) {
	exists := z.cluster.Namespace(name) != nil
	if exists == z.namespaces[name] {
		return
	}
	if exists {
		z.namespaces[name] = true
	} else {
		delete(z.namespaces, name)
	}
	for _, g := range z.origins {
		if g.reverse {
			continue
		}
		for _, branch := range []string{"\x03svc", "\x03pod"} {
			owner := string(append(append([]byte{byte(len(name))}, name...), branch...)) + g.wire
			if exists && z.exposed(name) && (branch == "\x03svc" || z.opts.Pods != PodsDisabled) {
				z.table.put(&Name{owner: owner, kind: bare})
			} else {
				z.table.remove(owner)
			}
		}
	}
	for k := range z.byNS[name] {
		z.updateService(k)
	}
}

func (z *Zones) updateService(k intent.Key) {
	entry := z.cluster.Entry(k)
	var names []*Name
	if entry != nil {
		if z.byNS[k.Namespace] == nil {
			z.byNS[k.Namespace] = map[intent.Key]struct{}{}
		}
		z.byNS[k.Namespace][k] = struct{}{}
		if z.exposed(k.Namespace) {
			names = z.build(entry)
		}
	} else {
		delete(z.byNS[k.Namespace], k)
		if len(z.byNS[k.Namespace]) == 0 {
			delete(z.byNS, k.Namespace)
		}
	}
	was := z.published[k]
	owners := make([]string, len(names))
	fresh := make(map[string]bool, len(names))
	for i, n := range names {
		z.table.put(n)
		owners[i] = n.owner
		fresh[n.owner] = true
	}
	for _, owner := range was {
		if !fresh[owner] {
			z.table.remove(owner)
		}
	}
	if len(owners) > 0 {
		z.published[k] = owners
	} else {
		delete(z.published, k)
	}
	z.updateReverse(k, entry)
}

// build makes all names of a Service.
func (z *Zones) build(e *intent.Entry) []*Name {
	s := e.Service
	if s == nil {
		return nil
	}
	own, endpoints := z.records(e)
	var names []*Name
	for _, g := range z.origins {
		if g.reverse {
			continue
		}
		base := serviceName(s.Key, g.wire)
		if base == "" {
			continue
		}
		if len(own) > 0 {
			names = append(names, newName(base, base, z.opts.TTL, own))
		}
		if s.Type != intent.ExternalName {
			names = append(names, portNames(base, z.opts.TTL, own)...)
			names = append(names, endpointNames(base, z.opts.TTL, endpoints)...)
		}
	}
	return names
}

func serviceName(k intent.Key, origin string) string {
	if len(k.Name) > 63 || len(k.Namespace) > 63 || len(k.Name)+len(k.Namespace)+6+len(origin) > wire.MaxName {
		return ""
	}
	b := make([]byte, 0, len(k.Name)+len(k.Namespace)+6+len(origin))
	b = append(append(b, byte(len(k.Name))), strings.ToLower(k.Name)...)
	b = append(append(b, byte(len(k.Namespace))), strings.ToLower(k.Namespace)...)
	return string(append(append(b, "\x03svc"...), origin...))
}

// records returns what is behind a Service's own name, and what is behind its endpoints' names.
func (z *Zones) records(e *intent.Entry) (own, endpoints []record) {
	s := e.Service
	if s.Type == intent.ExternalName {
		if _, err := netip.ParseAddr(s.ExternalName); err == nil {
			return nil, nil // a CNAME cannot lead to an address
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
				out = append(out, r)
			}
		}
	}
	return out
}

// hostname is the label by which an endpoint is known below its Service.
func (z *Zones) hostname(s *intent.Slice, i int) string {
	end := &s.Endpoints[i]
	switch {
	case end.Hostname != "":
		return strings.ToLower(end.Hostname)
	case z.opts.EndpointPodNames && end.Pod != "" && len(end.Pod) < 64:
		return strings.ToLower(end.Pod)
	case s.Family == 0:
		return ""
	}
	name := strings.NewReplacer(".", "-", ":", "-").Replace(end.Addr.String())
	if strings.HasSuffix(name, "-") {
		name += "0" // a label cannot end in a dash
	}
	return name
}

// portNames makes _port._protocol names, for ports that have one.
func portNames(base string, ttl uint32, records []record) []*Name {
	return grouped(records, func(r record) (string, bool) {
		if r.label == "" || r.proto == "" {
			return "", false
		}
		return "\x00" + r.label + "\x00" + r.proto, true
	}, func(r record, group []record) *Name {
		prefix := make([]byte, 0, len(r.label)+len(r.proto)+4+len(base))
		prefix = append(append(prefix, byte(1+len(r.label)), '_'), r.label...)
		prefix = append(append(prefix, byte(1+len(r.proto)), '_'), r.proto...)
		return newName(string(append(prefix, base...)), base, ttl, group)
	})
}

// endpointNames makes the names of endpoints.
func endpointNames(base string, ttl uint32, records []record) []*Name {
	return grouped(records, func(r record) (string, bool) { return r.host, r.host != "" && len(r.host) < 64 },
		func(r record, group []record) *Name {
			return newName(string(append(append([]byte{byte(len(r.host))}, r.host...), base...)), base, ttl, group)
		})
}

// grouped makes a name of each group of records that share a key, in order of appearance.
func grouped(records []record, key func(record) (string, bool), build func(record, []record) *Name) []*Name {
	var order []string
	groups := map[string][]record{}
	for _, r := range records {
		k, ok := key(r)
		if !ok {
			continue
		}
		if groups[k] == nil {
			order = append(order, k)
		}
		groups[k] = append(groups[k], r)
	}
	var names []*Name
	for _, k := range order {
		if n := build(groups[k][0], groups[k]); len(n.owner) <= wire.MaxName {
			names = append(names, n)
		}
	}
	return names
}

// Package zone prepares DNS records from intent and answers queries from them: the names of Services, endpoints and Pods
// in the cluster's domains, and the reverse names of their addresses. It knows nothing of sockets and caches.
//
// Names follow the Kubernetes DNS specification 1.1.0, and CoreDNS where that is silent.
package zone

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// PodMode is how names made of a Pod's address are resolved.
type PodMode string

const (
	PodsDisabled PodMode = "disabled"
	PodsInsecure PodMode = "insecure" // any address, whether a Pod has it or not
	PodsVerified PodMode = "verified"
)

// Options configure Zones.
type Options struct {
	Zones []string // the cluster's domains; PTR records lead to names in the first
	// Reverse are the zones of addresses; nil: in-addr.arpa and ip6.arpa.
	Reverse []string
	TTL     uint32
	Pods    PodMode
	// Namespaces, if any, are the only ones served.
	Namespaces []string
	// EndpointPodNames names an endpoint without a hostname after its Pod instead of its address.
	EndpointPodNames bool
	// NoEndpoints leaves out the names of endpoints.
	NoEndpoints bool
	// IgnoreEmpty leaves out Services without a ready endpoint.
	IgnoreEmpty bool
	// Elsewhere reports whether the target of an alias is resolved by others than its zone, in which it exists or does not; nil: none is.
	Elsewhere func(q *wire.Query, exists bool) bool
	// Servers are the addresses of the name server itself.
	Servers []netip.Addr
}

// origin is a zone that the server is authoritative for.
type origin struct {
	wire    string
	bytes   []byte // the same
	labels  int
	reverse bool
}

// Zones holds the records. Update is for one goroutine; everything else is safe for any number.
type Zones struct {
	opts       Options
	cluster    *intent.Cluster
	origins    []origin // cluster domains first, in the order given
	seed       maphash.Seed
	table      *table[Name]    // names that are not a Service's
	services   *table[service] // by their labels
	reverse    *table[service] // by address
	serial     atomic.Uint32
	ready      atomic.Bool
	only       map[string]bool
	namespaces map[string]bool
	pods       atomic.Pointer[podIndex]
	ofServices int // names
	names      atomic.Int64
}

// New returns the zones of a cluster, empty until the first Update.
func New(cluster *intent.Cluster, o Options) (*Zones, error) {
	z := &Zones{opts: o, cluster: cluster, seed: maphash.MakeSeed(), namespaces: map[string]bool{}}
	z.table = newTable(func(n *Name) uint64 { return maphash.String(z.seed, n.owner) })
	z.services = newTable(func(s *service) uint64 { return maphash.String(z.seed, s.labels()) })
	z.reverse = newTable[service](nil)
	z.reverse.all = z.allAddrs
	if len(o.Namespaces) > 0 {
		z.only = map[string]bool{}
		for _, n := range o.Namespaces {
			z.only[n] = true
		}
	}
	if len(o.Zones) == 0 {
		return nil, fmt.Errorf("no zone given")
	}
	if o.Reverse == nil {
		o.Reverse = []string{"in-addr.arpa", "ip6.arpa"}
	}
	for _, name := range append(append([]string{}, o.Zones...), o.Reverse...) {
		w, err := wire.PackName(name)
		if err != nil || w == "\x00" {
			return nil, fmt.Errorf("zone %q: %w", name, errOr(err, "the root cannot be a cluster's domain"))
		}
		if slices.ContainsFunc(z.origins, func(g origin) bool { return g.wire == w }) {
			return nil, fmt.Errorf("zone %q is given twice", name)
		}
		z.origins = append(z.origins, origin{wire: w, bytes: []byte(w), labels: strings.Count(strings.Trim(name, "."), ".") + 1, reverse: strings.HasSuffix(w, "\x04arpa\x00")})
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

// touch advances the serial number: Unix time as with CoreDNS, but different after every change.
func (z *Zones) touch(now time.Time) {
	z.serial.Store(max(z.serial.Load()+1, uint32(now.Unix())))
}

// nameServer is the name of the server itself, below each zone.
const nameServer = "\x02ns\x03dns"

// addFixed adds the names that every zone has.
func (z *Zones) addFixed(g origin) {
	apex := &Name{owner: g.wire, kind: bare}
	if len(z.opts.Servers) > 0 {
		apex.add(z.serverSet(g))
	}
	z.put(apex)
	txt := appendRR(nil, toQuestion, wire.TypeTXT, 28800, 6)
	version := &Name{owner: "\x0bdns-version" + g.wire, kind: txtOnly}
	version.add(set{typ: wire.TypeTXT, an: 1, data: append(txt, "\x051.1.0"...)})
	z.put(version)
	z.putBare("\x03svc" + g.wire)
	z.putBare("\x03pod" + g.wire)
	ns := &Name{owner: nameServer + g.wire, kind: server}
	var records []record
	for _, a := range z.opts.Servers {
		records = append(records, record{addr: a, port: -1})
	}
	ns.addAddresses(z.opts.TTL, records)
	z.put(ns)
}

// serverSet is the zone's NS record with the server's addresses.
func (z *Zones) serverSet(g origin) set {
	s := set{typ: wire.TypeNS, an: 1}
	s.data = append(appendRR(nil, toQuestion, wire.TypeNS, z.opts.TTL, len(nameServer)+2), nameServer...)
	at := wire.HeaderLen + len(g.wire) + 4 + 12
	s.data = binary.BigEndian.AppendUint16(s.data, toQuestion)
	for _, a := range z.opts.Servers {
		s.data = appendAddr(s.data, 0xC000|uint16(at), z.opts.TTL, a)
		s.ar++
	}
	return s
}

// put adds a name, or replaces it.
func (z *Zones) put(n *Name) {
	z.table.put(maphash.String(z.seed, n.owner), n, func(o *Name) bool { return o.owner == n.owner })
}

// putBare adds a name without records, unless it is that of a zone, which has some.
func (z *Zones) putBare(owner string) {
	if !z.isZone(owner) {
		z.put(&Name{owner: owner, kind: bare})
	}
}

func (z *Zones) isZone(name string) bool {
	return slices.ContainsFunc(z.origins, func(g origin) bool { return g.wire == name })
}

func (z *Zones) remove(owner string) {
	z.table.remove(maphash.String(z.seed, owner), func(o *Name) bool { return o.owner == owner })
}

// get finds a name that is not a Service's.
func (z *Zones) get(owner []byte) *Name {
	return z.table.find(maphash.Bytes(z.seed, owner), func(o *Name) bool { return o.owner == string(owner) })
}

// Update updates the records of what changed in intent.
func (z *Zones) Update(d *intent.Changes) {
	changed := map[string]bool{}
	for name := range d.Namespaces {
		if z.updateNamespace(name) {
			changed[name] = true
		}
	}
	if len(changed) > 0 {
		for _, k := range z.servicesOf(changed) {
			z.updateService(k)
		}
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
	z.names.Store(int64(z.table.live + z.ofServices))
	if !z.ready.Load() && z.cluster.Complete() {
		z.ready.Store(true)
	}
}

// Ready reports whether everything has been listed once.
func (z *Zones) Ready() bool { return z.ready.Load() }

// Names is the number of names.
func (z *Zones) Names() int { return int(z.names.Load()) }

func (z *Zones) exposed(namespace string) bool {
	return z.namespaces[namespace] && (z.only == nil || z.only[namespace])
}

// updateNamespace updates the names of a namespace itself, and reports whether it was added or removed.
func (z *Zones) updateNamespace(name string) bool {
	exists := z.cluster.Namespace(name) != nil
	if exists == z.namespaces[name] {
		return false
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
		for _, kind := range []string{svc, pod} {
			owner := string(branch([]byte(name), kind, g.wire))
			if exists && z.exposed(name) && (kind == svc || z.opts.Pods != PodsDisabled) {
				z.putBare(owner)
			} else if !z.isZone(owner) {
				z.remove(owner)
			}
		}
	}
	return true
}

// servicesOf lists the Services of some namespaces.
func (z *Zones) servicesOf(namespaces map[string]bool) (out []intent.Key) {
	z.services.each(func(s *service) bool {
		if namespaces[s.namespace()] {
			out = append(out, s.key())
		}
		return true
	})
	return out
}

func (z *Zones) updateService(k intent.Key) {
	labels := serviceLabels(k)
	if labels == "" {
		return
	}
	hash := maphash.String(z.seed, labels)
	same := func(s *service) bool { return s.labels() == labels }
	was := z.services.find(hash, same)
	var now *service
	if entry := z.cluster.Entry(k); entry != nil {
		now = z.prepare(k, labels, entry)
		z.services.put(hash, now, same)
		z.ofServices += now.names
	} else {
		z.services.remove(hash, same)
	}
	if was != nil {
		z.ofServices -= was.names
	}
	z.updateReverse(was, now)
}

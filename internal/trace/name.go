package trace

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// resolved is what the cluster's DNS answers.
type resolved struct {
	// full is the name that had an answer.
	full  string
	addrs []netip.Addr
	// outside is where an alias leads that others must resolve.
	outside string
	tried   []string
}

// ndots is the number of dots from which on a Pod's resolver tries a name as it is first.
const ndots = 5

// resolve asks the cluster's DNS for a name, the way a Pod's resolver would, with the search path of a namespace.
func (w *World) resolve(name, namespace string) (*resolved, error) {
	z, err := zone.New(w.cluster, zone.Options{Zones: []string{w.Zone}, TTL: 30, Pods: zone.PodsInsecure})
	if err != nil {
		return nil, fmt.Errorf("the cluster's domain: %w", err)
	}
	feed := w.cluster.Follow()
	z.Update(feed.Take())
	feed.Close()
	r := &resolved{}
	for _, full := range w.candidates(name, namespace) {
		r.tried = append(r.tried, full)
		for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA} {
			if err := r.ask(z, full, typ); err != nil {
				return nil, err
			}
		}
		if len(r.addrs) > 0 || r.outside != "" {
			r.full = full
			return r, nil
		}
	}
	return r, nil
}

// candidates are the names that are tried, in order.
func (w *World) candidates(name, namespace string) (out []string) {
	if strings.HasSuffix(name, ".") {
		return []string{name}
	}
	whole := name + "."
	if strings.Count(name, ".") >= ndots {
		out = append(out, whole)
	}
	for _, search := range []string{namespace + ".svc." + w.Zone, "svc." + w.Zone, w.Zone} {
		out = append(out, name+"."+search+".")
	}
	if len(out) == 3 {
		out = append(out, whole)
	}
	return out
}

func (r *resolved) ask(z *zone.Zones, name string, typ uint16) error {
	packed, err := wire.PackName(strings.ToLower(name))
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	msg := make([]byte, wire.HeaderLen, wire.HeaderLen+len(packed)+4)
	msg[2], msg[5] = 1, 1 // recursion desired, one question
	msg = binary.BigEndian.AppendUint16(append(msg, packed...), typ)
	msg = binary.BigEndian.AppendUint16(msg, wire.ClassIN)
	var q wire.Query
	if q.Parse(msg) != wire.OK {
		return fmt.Errorf("%s is no name that DNS can ask for", name)
	}
	const limit = 64 << 10
	request := zone.Request{Query: &q, Limit: limit}
	out, outcome := z.Answer(make([]byte, 0, limit), &request)
	switch outcome {
	case zone.Foreign:
		return nil
	case zone.Chase:
		r.outside = wire.UnpackName([]byte(request.Chain.Outside[0]))
		return nil
	}
	var answer dns.Msg
	if err := answer.Unpack(out); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, rr := range answer.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			r.add(rr.A)
		case *dns.AAAA:
			r.add(rr.AAAA)
		}
	}
	return nil
}

func (r *resolved) add(ip []byte) {
	if a, ok := netip.AddrFromSlice(ip); ok {
		r.addrs = append(r.addrs, a.Unmap())
	}
}

// of are the addresses of a family.
func (r *resolved) of(f intent.Family) (out []netip.Addr) {
	for _, a := range r.addrs {
		if intent.FamilyOf(a) == f {
			out = append(out, a)
		}
	}
	return out
}

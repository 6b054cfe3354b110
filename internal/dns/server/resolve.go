package server

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/forward"
	"portal/internal/dns/wire"
	"portal/internal/dns/zone"
)

// resolveTimeout is when clients have given up.
const resolveTimeout = 6 * time.Second

// resolve answers, in a goroutine of its own, a query that upstreams are needed for. The message is copied.
func (s *Server) resolve(msg []byte, from netip.Addr, p proto, send func([]byte)) {
	msg = append([]byte(nil), msg...)
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	self, evicted := s.waiting.enter(from, cancel)
	if evicted {
		s.metrics.evicted.Inc()
	}
	s.resolving.Go(func() {
		defer cancel()
		defer s.waiting.leave(self)
		w := s.takeWorker(p)
		defer s.giveWorker(w)
		w.now = began
		out, z, src := w.resolve(ctx, msg, from)
		w.count.mu.Lock()
		out, v := w.done(out, z, from, src)
		w.count.spent(1, time.Since(began))
		w.count.mu.Unlock()
		if v == silent {
			out = nil
		}
		send(out)
	})
}

// takeWorker returns a worker for one query. Those of UDP are reused: their counters and buffers would be most of the
// garbage that a forwarded query makes.
func (s *Server) takeWorker(p proto) *worker {
	if p == protoUDP {
		select {
		case w := <-s.spare:
			return w
		default:
		}
	}
	return s.newWorker(p)
}

func (s *Server) giveWorker(w *worker) {
	if w.proto == protoUDP {
		select {
		case s.spare <- w:
			return
		default:
		}
	}
	s.metrics.merge(w.proto, w.count)
}

func (w *worker) resolve(ctx context.Context, msg []byte, from netip.Addr) ([]byte, int, source) {
	s, q := w.s, &w.q
	w.from = from
	q.Parse(msg)
	if w.buf == nil {
		w.buf = make([]byte, 0, 4096)
	}
	buf := w.buf
	if w.proto.stream() || int(q.UDPSize) > cap(buf) {
		buf = make([]byte, 0, bigSize)
	}
	w.r.Cut, w.r.Chain, w.r.Zone = false, nil, -1
	w.r.Limit = w.limit(buf)
	if s.stubbed(q) {
		return w.forwarded(ctx, buf, s.forwarder(q), nil)
	}
	own, outcome := s.zones.Answer(buf, &w.r)
	switch outcome {
	case zone.Chase:
		left := maxChased
		return w.chase(ctx, buf, s.mayRecurse(from), &left), w.r.Zone, sourceZone
	case zone.Denied:
		if s.opts.Autopath && s.searches(q, from) {
			return w.searched(ctx, buf, own, from)
		}
	case zone.Answered: // the name has been created meanwhile
		return own, w.r.Zone, sourceZone
	}
	return w.forwarded(ctx, buf, s.forwarder(q), own)
}

// forwarded responds with what an upstream says; without one, with the zone's own answer.
func (w *worker) forwarded(ctx context.Context, buf []byte, f *forward.Forwarder, own []byte) ([]byte, int, source) {
	q := &w.q
	if f == nil {
		if len(own) == 0 {
			own = q.Error(buf, wire.Refused, false, false)
		}
		return own, w.r.Zone, sourceZone
	}
	out, err := f.Resolve(ctx, buf, q, w.r.Limit)
	if err != nil {
		w.s.opts.Log.Debug("forwarding failed", "name", wire.UnpackName(q.Name()), "err", err)
		return q.Error(buf, wire.ServFail, false, true), -1, sourceForward
	}
	return out, -1, sourceForward
}

// chase resolves the target of an ExternalName Service. If that fails, so does the response: an alias without addresses would
// say that there are none, and clients would not try again. (CoreDNS says so.) recurse: upstreams may be asked. left is how many more
// names may be looked up.
func (w *worker) chase(ctx context.Context, buf []byte, recurse bool, left *int) []byte {
	chain := w.r.Chain
	var found [][]byte
	failed, resolved := false, false
	for _, name := range chain.Outside {
		m, err := w.s.lookup(ctx, name, w.q.QType, recurse, left)
		if m == nil {
			failed = failed || err != nil
			continue
		}
		failed = failed || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError
		for _, rr := range m.Answer {
			b := make([]byte, dns.Len(rr)+1)
			if n, err := dns.PackRR(rr, b, 0, nil, false); err == nil {
				found = append(found, b[:n])
				resolved = resolved || rr.Header().Rrtype == w.q.QType
			}
		}
	}
	rcode := uint8(wire.NoError)
	if failed && !resolved {
		rcode = wire.ServFail
	}
	return w.s.zones.Finish(buf, &w.r, chain, rcode, found)
}

// maxChased bounds how many names are looked up for one query: names of two zones can be aliases of each other.
const maxChased = 64

var errTooManyAliases = fmt.Errorf("more than %d aliases", maxChased)

// lookup resolves a name, of the cluster or not, as for a client; neither a message nor an error if there is no upstream, or none may be
// asked. left is how many more names may be looked up.
func (s *Server) lookup(ctx context.Context, name string, typ uint16, recurse bool, left *int) (*dns.Msg, error) {
	if *left--; *left < 0 {
		return nil, errTooManyAliases
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	msg := make([]byte, wire.HeaderLen, wire.HeaderLen+len(name)+4)
	msg[2], msg[5] = 1, 1
	msg = binary.BigEndian.AppendUint16(append(msg, name...), typ)
	var q wire.Query
	if q.Parse(append(msg, 0, wire.ClassIN)) != wire.OK {
		return nil, nil
	}
	size := bigSize
	if !recurse { // answered at once, where a large buffer costs too much
		size = outSize
	}
	buf := make([]byte, 0, size)
	r := zone.Request{Query: &q, Limit: size}
	var out []byte
	outcome := zone.Foreign
	if found, ok := s.fromHosts(buf, &q, size); ok {
		out, outcome = found, zone.Answered
	} else if !s.stubbed(&q) {
		if out, outcome = s.zones.Answer(buf, &r); outcome == zone.Denied && recurse && s.fallsThrough(&q) {
			outcome = zone.Foreign
		}
	}
	switch outcome {
	case zone.Foreign:
		f := s.forwarder(&q)
		if f == nil || !recurse {
			return nil, nil
		}
		var err error
		if cached, hit := f.Cached(buf, &q, size, time.Now()); hit != forward.Miss {
			out = cached
		} else if out, err = f.Resolve(ctx, buf, &q, size); err != nil {
			return nil, err
		}
	case zone.Chase:
		w := &worker{s: s, r: r}
		w.q = q
		w.r.Query = &w.q
		out = w.chase(ctx, buf, recurse, left)
	}
	m := new(dns.Msg)
	if err := m.Unpack(out); err != nil {
		return nil, err
	}
	return m, nil
}

// searches reports whether a query is the first of a Pod's search path: a name below <its namespace>.svc.<zone>. It
// is not if the client's address is not that of exactly one Pod, so that nobody gets an answer for another namespace.
func (s *Server) searches(q *wire.Query, from netip.Addr) bool {
	_, _, ok := s.searchBase(q, from)
	return ok && (q.QType == wire.TypeA || q.QType == wire.TypeAAAA)
}

// searchBase splits a query's name into what the client looked up, and the cluster's zone.
func (s *Server) searchBase(q *wire.Query, from netip.Addr) (name, origin string, ok bool) {
	origin, reverse, ok := s.zones.Origin(q)
	if !ok || reverse {
		return "", "", false
	}
	namespace := s.zones.NamespaceOf(from)
	if namespace == "" {
		return "", "", false
	}
	suffix := string(append([]byte{byte(len(namespace))}, namespace...)) + "\x03svc" + origin
	whole := string(q.Name())
	if !strings.HasSuffix(whole, suffix) || len(whole) == len(suffix) {
		return "", "", false
	}
	for i := range q.Labels() {
		if q.LabelAt(i) == len(whole)-len(suffix) {
			return whole[:len(whole)-len(suffix)], origin, true
		}
	}
	return "", "", false
}

// searched answers for a name at the beginning of a search path that its zone denies: with what an upstream says, if its zone falls
// through and they don't deny it; with what the rest of the path leads to; or with the denial.
func (w *worker) searched(ctx context.Context, buf, own []byte, from netip.Addr) ([]byte, int, source) {
	z, src := w.r.Zone, sourceZone
	if w.s.fallsThrough(&w.q) && w.s.mayRecurse(from) {
		if own, z, src = w.forwarded(ctx, buf, w.s.forwarder(&w.q), own); own[3]&15 != wire.NXDomain {
			return own, z, src
		}
	}
	if out := w.autopath(ctx, make([]byte, 0, bigSize), from); out != nil {
		return out, w.r.Zone, sourceZone
	}
	return own, z, src
}

// autopath tries the rest of the search path, and answers what is known of the first name that exists: its records after a CNAME, or
// that it has none. nil: none exists, or a lookup has failed: then the client must try by itself, since what comes later
// in the path may be another name's.
func (w *worker) autopath(ctx context.Context, buf []byte, from netip.Addr) []byte {
	name, origin, ok := w.s.searchBase(&w.q, from)
	if !ok {
		return nil
	}
	path, recurse := []string{"\x03svc" + origin, origin}, w.s.mayRecurse(from)
	if recurse { // the rest of the path leads out of the cluster
		path = append(append(path, w.s.search...), "\x00")
	}
	for _, suffix := range path {
		if len(name)+len(suffix) > wire.MaxName {
			continue
		}
		left := maxChased
		m, err := w.s.lookup(ctx, name+suffix, w.q.QType, recurse, &left)
		switch {
		case m == nil && err == nil, m != nil && m.Rcode == dns.RcodeNameError:
		case m == nil || m.Rcode != dns.RcodeSuccess:
			return nil
		default:
			return w.alias(buf, name+suffix, m)
		}
	}
	return nil
}

// alias answers a query with a CNAME and the records of its target, or with the SOA record that says that it has none.
func (w *worker) alias(buf []byte, target string, m *dns.Msg) []byte {
	q := &w.q
	out := q.Begin(buf)
	room := w.r.Limit
	if q.EDNS {
		room -= wire.OPTLen
	}
	tc := false
	add := func(list []dns.RR) (n int) {
		for _, rr := range list {
			b := make([]byte, dns.Len(rr)+1)
			length, err := dns.PackRR(rr, b, 0, nil, false)
			if err != nil {
				continue
			}
			if tc = len(out)+length > room; tc {
				break
			}
			out = append(out, b[:length]...)
			n++
		}
		return n
	}
	an, ns, ar := 0, 0, 0
	if len(m.Answer) > 0 {
		out = append(out, 0xC0, wire.HeaderLen, 0, wire.TypeCNAME, 0, wire.ClassIN)
		out = binary.BigEndian.AppendUint32(out, m.Answer[0].Header().Ttl)
		out = append(binary.BigEndian.AppendUint16(out, uint16(len(target))), target...)
		an = 1 + add(m.Answer)
	} else {
		ns = add(m.Ns)
	}
	if q.EDNS {
		out, ar = q.AppendOPT(out, 0, wire.Advertised), 1
	}
	q.Header(out, wire.NoError, m.Authoritative, w.r.Recursive, tc, 1, an, ns, ar)
	return out
}

package server

import (
	"context"
	"net/netip"
	"time"

	"portal/internal/dns/forward"
	"portal/internal/dns/wire"
	"portal/internal/dns/zone"
)

// worker answers the queries of one socket or connection. It belongs to one goroutine; others only read its counters.
type worker struct {
	s     *Server
	proto proto
	from  netip.Addr // the client of the current query
	count *counters
	turn  uint32
	q     wire.Query
	r     zone.Request
	now   time.Time
	buf   []byte // of resolve
}

// verdict is what a worker does about a message.
type verdict uint8

const (
	reply  verdict = iota
	silent         // no answer
	later          // upstreams are needed: see Server.resolve
	transfer
)

func (s *Server) newWorker(p proto) *worker {
	w := &worker{s: s, proto: p, count: s.metrics.counters(p)}
	w.r.Query = &w.q
	w.r.Recursive = s.recursive
	return w
}

// handle answers a message into dst if it can be done at once: by a lookup and a copy, without allocating.
func (w *worker) handle(dst, msg []byte, from netip.Addr) ([]byte, verdict) {
	w.from = from
	s, q := w.s, &w.q
	w.r.Cut = false
	switch q.Parse(msg) {
	case wire.Drop:
		w.count.dropped++
		return nil, silent
	case wire.Reject:
		return w.done(q.Error(dst, int(q.Rcode), false, false), -1, from, sourceServer)
	}
	w.r.Limit = w.limit(dst)
	switch {
	case q.EDNS && q.Version != 0:
		return w.done(q.Error(dst, wire.BadVers, false, false), -1, from, sourceServer)
	case q.QClass != wire.ClassIN:
		return w.done(q.Error(dst, wire.Refused, false, false), -1, from, sourceServer)
	case q.QType == wire.TypeAXFR || q.QType == wire.TypeIXFR:
		if w.proto.stream() && s.mayTransfer(from) && q.QType == wire.TypeAXFR && s.zones.IsApex(q) {
			return nil, transfer
		}
		return w.done(q.Error(dst, wire.Refused, false, false), -1, from, sourceServer)
	}
	if out, ok := s.fromHosts(dst, q, w.r.Limit); ok {
		return w.done(out, -1, from, sourceHosts)
	}
	if s.stubbed(q) {
		return w.outside(dst, from)
	}
	w.turn++
	w.r.Rotate, w.r.Chain = w.turn, nil
	out, outcome := s.zones.Answer(dst, &w.r)
	switch outcome {
	case zone.Denied:
		if s.elsewhere(q, from) {
			return nil, later
		}
		fallthrough
	case zone.Answered:
		return w.done(out, w.r.Zone, from, sourceZone)
	case zone.Chase:
		if !s.recursive || !s.mayRecurse(from) {
			left := maxChased
			return w.done(w.chase(context.Background(), dst, false, &left), w.r.Zone, from, sourceZone)
		}
		return nil, later
	}
	return w.outside(dst, from)
}

// outside answers a query for a name that is not the cluster's, if the cache can.
func (w *worker) outside(dst []byte, from netip.Addr) ([]byte, verdict) {
	f := w.s.forwarder(&w.q)
	if f == nil || !w.s.mayRecurse(from) {
		if f != nil {
			w.s.metrics.refusedRecursion.Inc()
		}
		return w.done(w.q.Error(dst, wire.Refused, false, false), -1, from, sourceServer)
	}
	out, hit := f.Cached(dst, &w.q, w.r.Limit, w.now)
	if hit != forward.Miss {
		return w.done(out, -1, from, sourceCache)
	}
	upstream, news, ok := f.CameBack(&w.q)
	if !ok {
		return nil, later
	}
	if news {
		w.s.opts.Log.Error("queries to an upstream come back to this server, not asking it until they no longer do: a loop", "upstream", upstream, "via", from.String(), "fix", "name a server that knows the names outside the cluster")
	}
	return w.done(w.q.Error(dst, wire.Refused, false, false), -1, from, sourceServer)
}

// limit is the longest response that the client accepts.
func (w *worker) limit(dst []byte) int {
	if w.proto.stream() {
		return min(cap(dst), 65535)
	}
	return min(w.udpLimit(), cap(dst))
}

// udpLimit is the longest response over UDP that the client of the current query may get.
func (w *worker) udpLimit() int {
	if w.s.opts.MaxUDPSize > 0 {
		return min(int(w.q.UDPSize), w.s.opts.MaxUDPSize)
	}
	if w.from.Unmap().IsLoopback() { // no network that could fragment, and no victim of forged queries
		return int(w.q.UDPSize)
	}
	return min(int(w.q.UDPSize), DefaultUDPSize)
}

// done counts a response, and applies the rate limit.
func (w *worker) done(out []byte, z int, from netip.Addr, src source) ([]byte, verdict) {
	w.count.response(&w.q, out, z, from, src)
	if w.proto == protoUDP && w.s.limiter != nil {
		switch w.s.limiter.check(from, &w.q, out, w.now) {
		case limitDrop:
			w.count.limited++
			return nil, silent
		case limitTruncate: // if the address is forged, its owner can still use TCP
			w.count.limited++
			out = truncated(&w.q, out)
			w.r.Cut = false
		}
	}
	if w.s.queries != nil {
		w.s.queries.write(&w.q, out, from, w.proto)
	}
	return out, reply
}

// truncated reduces a response to what makes the client retry over TCP.
func truncated(q *wire.Query, out []byte) []byte {
	out = q.Begin(out)
	q.Header(out, wire.NoError, false, false, true, 1, 0, 0, 0)
	return out
}

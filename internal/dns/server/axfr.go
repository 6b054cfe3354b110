package server

import (
	"github.com/miekg/dns"

	"portal/internal/dns/wire"
	"portal/internal/dns/zone"
)

// transferChunk is the approximate length of a transfer's messages.
const transferChunk = 16 << 10

// transfer sends a whole zone, between two copies of its SOA record.
func (s *Server) transfer(q *wire.Query, write func([]byte) error) error {
	origin, _, _ := s.zones.Origin(q)
	soa := s.lookupZone(origin, wire.TypeSOA)
	if soa == nil || len(soa.Answer) == 0 {
		return write(q.Error(make([]byte, 0, 512), wire.ServFail, false, false))
	}
	request := new(dns.Msg)
	if err := request.Unpack(q.Raw); err != nil {
		return err
	}
	m := new(dns.Msg)
	size := 0
	flush := func() error {
		m.SetReply(request)
		m.Authoritative, m.Compress = true, true
		b, err := m.Pack()
		if err != nil {
			return err
		}
		m, size = new(dns.Msg), 0
		return write(b)
	}
	m.Answer = append(m.Answer, soa.Answer...)
	err := s.zones.Walk(origin, func(records []byte) error {
		part := new(dns.Msg)
		if part.Unpack(records) != nil {
			return nil
		}
		for _, rr := range part.Answer {
			m.Answer = append(m.Answer, rr)
			if size += dns.Len(rr); size > transferChunk {
				if err := flush(); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	m.Answer = append(m.Answer, soa.Answer...)
	return flush()
}

// lookupZone resolves a name in the cluster's zones only.
func (s *Server) lookupZone(name string, typ uint16) *dns.Msg {
	msg := make([]byte, wire.HeaderLen, wire.HeaderLen+len(name)+4)
	msg[5] = 1
	msg = append(append(msg, name...), byte(typ>>8), byte(typ), 0, wire.ClassIN)
	var q wire.Query
	if q.Parse(msg) != wire.OK {
		return nil
	}
	out, outcome := s.zones.Answer(make([]byte, 0, bigSize), &zone.Request{Query: &q, Limit: bigSize})
	m := new(dns.Msg)
	if outcome != zone.Answered || m.Unpack(out) != nil {
		return nil
	}
	return m
}

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/miekg/dns"

	"portal/bench/report"
)

// answers waits until a server resolves a name.
func answers(ctx context.Context, addr, name string, limit, every time.Duration) error {
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	c := dns.Client{Timeout: time.Second}
	if err := report.Until(ctx, limit, every, func() error {
		r, _, err := c.Exchange(m, addr)
		if err == nil && len(r.Answer) == 0 {
			err = errors.New("an answer without records")
		}
		return err
	}); err != nil {
		return fmt.Errorf("%s does not answer for %s after %v: %w", addr, name, limit, err)
	}
	return nil
}

// startStub is the upstream of both subjects: it answers every query with one address.
func startStub() (net.PacketConn, error) {
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go (&dns.Server{PacketConn: c, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(r)
		if r.Question[0].Qtype == dns.TypeA {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}, A: net.IPv4(192, 0, 2, 1)}}
		}
		w.WriteMsg(m)
	})}).ActivateAndServe()
	return c, nil
}

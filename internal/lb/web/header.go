package web

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"strings"

	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// forwarded is what endpoints are sent about a connection, prepared once.
type forwarded struct {
	client []byte // the address
	proto  []byte // two field lines
	local  []byte // the Host of a request that has none
	// trusted is set if what the client's own fields say is kept.
	trusted bool
}

func newForwarded(info *Info) *forwarded {
	proto := "http"
	if info.TLS != nil {
		proto = "https"
	}
	f := &forwarded{trusted: info.Trusted, client: []byte(info.Client.Addr().Unmap().String()), local: []byte(info.Local.String())}
	f.proto = append(f.proto, "X-Forwarded-Proto: "+proto+"\r\nX-Forwarded-Port: "...)
	f.proto = strconv.AppendUint(f.proto, uint64(info.Local.Port()), 10)
	f.proto = append(f.proto, "\r\n"...)
	return f
}

// appendHead appends the head of the request as the endpoint gets it.
func (x *exchange) appendHead(out []byte) []byte {
	r := x.req
	out = append(out, r.Method...)
	out = append(out, ' ')
	out = append(out, r.Target...)
	out = append(out, " HTTP/1.1\r\nHost: "...)
	if len(r.Host) > 0 {
		out = append(out, r.Host...)
	} else {
		out = append(out, x.via.local...)
	}
	out = append(out, "\r\n"...)
	chain, proto, port := false, false, false
	for i := range r.Fields {
		f := &r.Fields[i]
		switch f.Known {
		case wire.Host, wire.ForwardedFor:
			chain = chain || f.Known == wire.ForwardedFor
			continue
		case wire.ForwardedProto:
			if !x.via.trusted || proto || spoofed(f) {
				continue
			}
			proto = true
		case wire.ForwardedPort:
			if !x.via.trusted || port || spoofed(f) {
				continue
			}
			port = true
		case wire.Expect:
			// It is the endpoint's to answer, if the body is still to come.
			if !r.Continue || x.small != nil || x.body == nil {
				continue
			}
		default:
			if f.Dropped || f.Known.Hop() {
				continue
			}
		}
		out = wire.AppendField(out, f.Name, f.Value)
	}
	out = append(out, "X-Forwarded-For: "...)
	if chain {
		for i := range r.Fields {
			if f := &r.Fields[i]; f.Known == wire.ForwardedFor && len(f.Value) > 0 && !spoofed(f) {
				out = append(out, f.Value...)
				out = append(out, ", "...)
			}
		}
	}
	out = append(out, x.via.client...)
	out = append(out, "\r\n"...)
	out = x.appendProto(out, proto, port)
	switch {
	case r.Length < 0:
		out = append(out, "Transfer-Encoding: chunked\r\n"...)
	case r.HasLength:
		out = append(out, "Content-Length: "...)
		out = strconv.AppendInt(out, r.Length, 10)
		out = append(out, "\r\n"...)
	}
	switch {
	case x.upgrade:
		out = append(out, "Connection: Upgrade\r\nUpgrade: "...)
		out = append(out, r.Upgrade...)
		out = append(out, "\r\n"...)
	case r.Trailers:
		out = append(out, "TE: trailers\r\nConnection: TE\r\n"...)
	}
	return append(out, "\r\n"...)
}

// spoofed says whether a field only looks to some programs like the one that it is known as.
func spoofed(f *wire.Field) bool { return bytes.IndexByte(f.Name, '_') >= 0 }

// appendProto appends the two fields, except those that a trusted proxy sent.
func (x *exchange) appendProto(out []byte, proto, port bool) []byte {
	if !proto && !port {
		return append(out, x.via.proto...)
	}
	first, second, _ := bytes.Cut(x.via.proto, []byte("\r\n"))
	if !proto {
		out = append(append(out, first...), "\r\n"...)
	}
	if !port {
		out = append(out, second...)
	}
	return out
}

// hash is what the pool's policy hashes of this request.
func (x *exchange) hash(cfg *config.Pool) string {
	if cfg.Policy.Kind != config.ConsistentHash && cfg.Policy.Kind != config.Shard {
		return ""
	}
	switch cfg.Policy.Hash {
	case config.HashHeader:
		for i := range x.req.Fields {
			if f := &x.req.Fields[i]; len(f.Name) == len(cfg.Policy.Name) && strings.EqualFold(string(f.Name), cfg.Policy.Name) {
				return string(f.Value)
			}
		}
	case config.HashCookie:
		if value := x.cookieValue(cfg.Policy.Name); value != "" {
			return value
		}
		return x.newCookie(cfg.Policy.Name)
	}
	return ""
}

// cookieValue finds a cookie of the request.
func (x *exchange) cookieValue(name string) string {
	for i := range x.req.Fields {
		f := &x.req.Fields[i]
		if f.Known != wire.Cookie {
			continue
		}
		for pair := range bytes.SplitSeq(f.Value, []byte(";")) {
			key, value, found := bytes.Cut(bytes.TrimSpace(pair), []byte("="))
			if found && string(key) == name {
				return string(bytes.Trim(value, `"`))
			}
		}
	}
	return ""
}

// newCookie chooses a value, and has it set with the response.
func (x *exchange) newCookie(name string) string {
	var random [16]byte
	rand.Read(random[:])
	value := hex.EncodeToString(random[:])
	x.cookie = name + "=" + value + "; Path=/; HttpOnly; SameSite=Lax"
	if x.info.TLS != nil {
		x.cookie += "; Secure"
	}
	return value
}

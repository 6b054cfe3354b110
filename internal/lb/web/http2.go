package web

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/net/http2"

	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// Bounds of HTTP/2 connections. What a client can make the library keep, the library bounds; how often it may do so: floodLimits.
const (
	streams      = 250
	connWindow   = 1 << 20
	streamWindow = 256 << 10
)

// serveHTTP2 serves a connection whose client speaks HTTP/2.
func (s *Server) serveHTTP2(ctx context.Context, nc net.Conn, info Info) {
	site := info.Site()
	stats := s.Stats(site.Listener.Name)
	stats.HTTP2.Add(1)
	defer stats.HTTP2.Add(-1)
	idle := orDefault(site.Listener.IdleTimeout, config.DefaultIdleTimeout)
	base := &http.Server{MaxHeaderBytes: limitsOf(site.Listener).Bytes, ErrorLog: log.New(io.Discard, "", 0)}
	h2 := &http2.Server{
		MaxConcurrentStreams: streams, IdleTimeout: idle, WriteByteTimeout: idle,
		MaxUploadBufferPerConnection: connWindow, MaxUploadBufferPerStream: streamWindow,
	}
	if err := http2.ConfigureServer(base, h2); err != nil {
		return
	}
	// Requests outlive ctx: when that ends, the client is asked to open no more.
	alive, cancel := context.WithCancel(context.Background())
	defer cancel()
	w := &watch{server: s, site: info.Site, draining: ctx, drain: func() { go base.Shutdown(alive) }}
	w.enter(phaseBusy)
	s.watched.add(w)
	defer s.watched.remove(w)
	// The library waits for a preface as long as it takes.
	nc.SetReadDeadline(time.Now().Add(orDefault(site.Listener.Limits.HeaderTimeout, config.DefaultHeaderTimeout)))
	h2.ServeConn(newGuarded(s, nc), &http2.ServeConnOpts{
		Context: alive, BaseConfig: base, Handler: &streamHandler{server: s, draining: ctx, info: info, via: newForwarded(&info), stats: stats},
	})
}

// streamHandler answers the requests of an HTTP/2 connection.
type streamHandler struct {
	server   *Server
	draining context.Context
	info     Info
	via      *forwarded
	stats    *Stats
}

func (h *streamHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	site := h.info.Site()
	one := &watch{server: h.server, site: h.info.Site, draining: h.draining, request: r.Context()}
	one.enter(phaseBusy)
	h.server.watched.add(one)
	defer h.server.watched.remove(one)
	// A client that does not read keeps who writes waiting for room, whatever becomes of the endpoint. The library's writer is gone after this function.
	one.setStalled(func() { _ = http.NewResponseController(w).SetWriteDeadline(past) })
	defer one.setStalled(nil)
	out := &streamSink{w: w}
	x := &exchange{server: h.server, watch: one, info: &h.info, site: site, stats: h.stats, sink: out, via: h.via, ctx: r.Context(), req: &wire.Request{}}
	out.x = x
	x.log.proto = "HTTP/2.0"
	if refused := x.fromHTTP2(r); refused != nil {
		x.beginLog()
		x.answer(refused.Status, refused.Reason)
		x.endLog()
	} else {
		x.serve()
	}
	if x.mine != nil {
		x.mine.close()
	}
	if body, ok := x.body.(*streamBody); ok {
		giveBuffer(body.buf)
	}
	if x.broken || !x.started {
		panic(http.ErrAbortHandler) // the library resets the stream
	}
}

// fromHTTP2 turns a request of HTTP/2 into what HTTP/1 has.
func (x *exchange) fromHTTP2(r *http.Request) *wire.Error {
	q := x.req
	q.Method, q.Target, q.Host, q.Minor = bytesOf(r.Method), bytesOf(r.RequestURI), bytesOf(r.Host), 1
	q.Fields = make([]wire.Field, 0, len(r.Header)+2)
	q.Path = q.Target
	if path, _, found := strings.Cut(r.RequestURI, "?"); found {
		q.Path = q.Target[:len(path)]
	}
	x.isHead = r.Method == "HEAD"
	switch {
	case r.Method == "CONNECT" || r.Method == "TRACE":
		return &wire.Error{Status: 405, Reason: r.Method + " is not supported"}
	case !wire.CheckHost(q.Host):
		return &wire.Error{Status: 400, Reason: ":authority is no host"}
	case len(q.Target) == 0 || q.Target[0] != '/' && !(r.RequestURI == "*" && r.Method == "OPTIONS"):
		return &wire.Error{Status: 400, Reason: ":path is no path"}
	}
	if err := wire.CheckTarget(q.Target); err != nil {
		return err
	}
	for name, values := range r.Header {
		known := wire.Lookup(bytesOf(name))
		for _, value := range values {
			f := wire.Field{Name: bytesOf(name), Value: bytesOf(value), Known: known}
			switch known {
			case wire.Expect, wire.ContentLength, wire.Host:
				continue // the library has answered or checked it
			case wire.TE:
				q.Trailers = q.Trailers || strings.EqualFold(value, "trailers")
			}
			q.Fields = append(q.Fields, f)
		}
	}
	if len(q.Fields) > wire.DefaultFields {
		return &wire.Error{Status: 431, Reason: "too many fields"}
	}
	if len(r.Trailer) > 0 {
		var names []string
		for name := range r.Trailer {
			names = append(names, name)
		}
		q.Fields = append(q.Fields, wire.Field{Name: []byte("Trailer"), Value: []byte(strings.Join(names, ", ")), Known: wire.Trailer})
	}
	lengths := r.Header["Content-Length"]
	q.Length = r.ContentLength
	if len(lengths) > 1 || len(lengths) == 1 && lengths[0] != itoa(q.Length) {
		// Also a length without a body, which the library takes for 0.
		return &wire.Error{Status: 400, Reason: "content-length is not the body's"}
	}
	q.HasLength = len(lengths) == 1
	if r.ContentLength == 0 || r.Body == http.NoBody {
		q.Length = 0
		return nil
	}
	most := bodyLimit(x.site.Listener)
	if most >= 0 && q.Length > most {
		return &wire.Error{Status: 413, Reason: "the body is too large"}
	}
	x.body = &streamBody{r: r, most: most}
	return nil
}

// bytesOf is a string's bytes, which nobody may change: the parts of a request are only read.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// streamBody is the body of a request in HTTP/2.
type streamBody struct {
	r     *http.Request
	most  int64
	total int64
	buf   []byte
	done  bool
}

func (b *streamBody) Next(wait bool) ([]byte, error) {
	if b.done {
		return nil, io.EOF
	}
	if !wait {
		return nil, wire.ErrWouldRead
	}
	if b.buf == nil {
		b.buf = takeBuffer()
	}
	for {
		n, err := b.r.Body.Read(b.buf)
		b.total += int64(n)
		if b.most >= 0 && b.total > b.most {
			return nil, &wire.Error{Status: 413, Reason: "the body is too large"}
		}
		if err == io.EOF {
			b.done = true
		}
		if n > 0 {
			b.done = b.done || b.r.ContentLength >= 0 && b.total == b.r.ContentLength
			return b.buf[:n], nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (b *streamBody) Done() bool   { return b.done }
func (b *streamBody) Total() int64 { return b.total }
func (b *streamBody) interrupt()   { b.r.Body.Close() }

func (b *streamBody) trailer() []wire.Field {
	var fields []wire.Field
	for name, values := range b.r.Trailer {
		for _, value := range values {
			fields = append(fields, field(name, value))
		}
	}
	return fields
}

// streamSink writes a response in HTTP/2.
type streamSink struct {
	w http.ResponseWriter
	x *exchange
}

func isHTTP2(s sink) bool {
	_, is := s.(*streamSink)
	return is
}

func (s *streamSink) fields(fields []wire.Field) {
	header := s.w.Header()
	for i := range fields {
		if f := &fields[i]; !f.Dropped && !f.Known.Hop() {
			name := canonical(f.Name)
			header[name] = append(header[name], string(f.Value))
		}
	}
}

func (s *streamSink) interim(res *wire.Response) error {
	if res.Status == 100 || res.Status == 101 {
		return nil // the library says 100 itself
	}
	s.fields(res.Fields)
	s.w.WriteHeader(res.Status)
	clear(s.w.Header())
	return nil
}

func (s *streamSink) head(res *wire.Response, length int64, bodiless bool) error {
	s.fields(res.Fields)
	header := s.w.Header()
	if _, set := header["Content-Type"]; !set {
		header["Content-Type"] = nil // the library would guess one
	}
	if s.x.cookie != "" {
		header.Add("Set-Cookie", s.x.cookie)
	}
	if length >= 0 && (!bodiless || res.HasLength && res.Status != 204) {
		header["Content-Length"] = []string{itoa(length)}
	}
	s.w.WriteHeader(res.Status)
	return nil
}

func (s *streamSink) data(p []byte) error {
	_, err := s.w.Write(p)
	s.x.watch.progress()
	return err
}

func (s *streamSink) flush() error {
	s.w.(http.Flusher).Flush()
	return s.x.ctx.Err()
}

func (s *streamSink) end(trailer []wire.Field) error {
	for _, f := range trailer {
		s.w.Header().Add(http.TrailerPrefix+canonical(f.Name), string(f.Value))
	}
	return nil
}

// canonical is a field's name as net/http spells it.
func canonical(name []byte) string { return http.CanonicalHeaderKey(string(name)) }

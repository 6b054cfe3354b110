package web

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// http2Conn is a connection to an endpoint that speaks HTTP/2; many requests share it.
type http2Conn struct {
	cc    *http2.ClientConn
	owner *endpointConns
	once  sync.Once
	used  atomic.Int64 // when a request ended last
}

// transport makes client connections; it keeps none.
var transport = &http2.Transport{AllowHTTP: true, DisableCompression: true, MaxHeaderListSize: config.DefaultHeaderBytes, ReadIdleTimeout: 30 * time.Second, PingTimeout: 15 * time.Second}

// retire lets a connection go when its requests have ended. It ends none of them: how long they may last is the sweeper's to say.
func (h *http2Conn) retire() {
	h.once.Do(func() {
		h.owner.endpoint.Close()
		h.cc.SetDoNotReuse()
		if h.unused(math.MaxInt64) {
			h.cc.Close()
			return
		}
		go func() {
			h.cc.Shutdown(context.Background())
			h.cc.Close()
		}()
	})
}

// unused says whether nobody uses the connection since before a time.
func (h *http2Conn) unused(before int64) bool {
	state := h.cc.State()
	return state.Closed || state.StreamsActive+state.StreamsReserved+state.StreamsPending == 0 && h.used.Load() < before
}

// takeHTTP2 returns a connection with room for one more request, which is reserved.
func (c *endpointConns) takeHTTP2(ctx context.Context, cfg *config.Pool, info *Info) (*http2Conn, bool, error) {
	if cfg.ProxyProtocol == 0 {
		c.mu.Lock()
		for i := 0; i < len(c.http2); {
			one := c.http2[i]
			if one.cc.ReserveNewRequest() {
				c.mu.Unlock()
				return one, true, nil
			}
			if state := one.cc.State(); state.Closed || state.Closing {
				one.retire()
				c.http2 = append(c.http2[:i], c.http2[i+1:]...)
				continue
			}
			i++
		}
		c.mu.Unlock()
	}
	nc, err := c.connect(ctx, cfg, info)
	if err != nil {
		return nil, false, err
	}
	cc, err := transport.NewClientConn(nc)
	if err != nil {
		nc.Close()
		c.endpoint.Close()
		return nil, false, err
	}
	one := &http2Conn{cc: cc, owner: c}
	one.used.Store(c.server.now())
	if !cc.ReserveNewRequest() {
		one.retire()
		return nil, false, errors.New("the endpoint takes no request")
	}
	if cfg.ProxyProtocol == 0 {
		c.mu.Lock()
		c.http2 = append(c.http2, one)
		c.mu.Unlock()
	}
	return one, false, nil
}

// attemptHTTP2 sends the request to an endpoint that speaks HTTP/2.
func (x *exchange) attemptHTTP2(conns *endpointConns, cfg *config.Pool) (balance.Result, bool, error) {
	ctx, cancel := context.WithCancel(x.context())
	defer cancel()
	body := &bodyReader{x: x, owner: conns, cancel: cancel}
	x.watch.setCall(body)
	defer x.watch.setCall(nil)
	if !x.watch.enter(phaseWaiting) {
		return balance.Abandoned, false, errors.New("time-out")
	}
	if x.body != nil && x.small == nil && x.req.Continue {
		// The library can't say when the endpoint has asked for the body.
		if err := x.sink.interim(&wire.Response{Status: 100}); err != nil {
			return balance.Abandoned, false, errClient{err}
		}
		x.req.Continue = false // also for another attempt
	}
	// From here to RoundTrip nothing may fail: only that gives back the place that is reserved in the connection.
	one, reused, err := conns.takeHTTP2(ctx, cfg, x.info)
	if err != nil {
		return x.noConnection(err)
	}
	if cfg.ProxyProtocol != 0 {
		defer one.retire()
	}
	defer func() { one.used.Store(x.server.now()) }()
	req := x.httpRequest(ctx, cfg, body)
	res, err := one.cc.RoundTrip(req)
	x.log.sent(x)
	if err != nil {
		body.Close()
		return x.noAnswerHTTP2(body, reused, err)
	}
	defer res.Body.Close()
	x.log.answered(res.StatusCode)
	result, err := x.deliverHTTP2(res, body)
	body.Close()
	x.closing = x.closing || body.begun && !x.body.Done()
	return result, false, err
}

func (x *exchange) noAnswerHTTP2(body *bodyReader, reused bool, err error) (balance.Result, bool, error) {
	fresh := !body.begun
	var stream http2.StreamError
	switch {
	case x.endedByClient():
		return balance.Abandoned, false, errClient{err}
	case body.failed != nil:
		p := &pump{done: make(chan struct{}), client: true, err: body.failed}
		close(p.done)
		x.pump = p
		return balance.Abandoned, false, errClient{err}
	case errors.As(err, &stream) && stream.Code == http2.ErrCodeRefusedStream:
		return balance.Abandoned, fresh, err
	case reused:
		return balance.Abandoned, fresh && x.repeatable, err
	}
	return balance.Failed, fresh && x.repeatable, err
}

// httpRequest is the request as the library wants it.
func (x *exchange) httpRequest(ctx context.Context, cfg *config.Pool, body *bodyReader) *http.Request {
	q := x.req
	scheme, host := "http", string(q.Host)
	if cfg.Protocol.Encrypted() {
		scheme = "https"
	}
	if host == "" {
		host = string(x.via.local)
	}
	header := make(http.Header, len(q.Fields)+4)
	var chain []string
	var trailer http.Header
	for i := range q.Fields {
		f := &q.Fields[i]
		value := string(f.Value)
		switch {
		case f.Known == wire.Host || f.Known == wire.Expect:
			continue
		case f.Known == wire.ForwardedFor:
			if !spoofed(f) && value != "" {
				chain = append(chain, value)
			}
			continue
		case (f.Known == wire.ForwardedProto || f.Known == wire.ForwardedPort) && (!x.via.trusted || spoofed(f)):
			continue
		case f.Known == wire.Trailer:
			trailer = http.Header{}
			wire.Tokens(f.Value, func(name []byte) {
				// The library refuses a request that announces what no trailer may have: that would look like the endpoint's fault.
				if key := canonical(name); httpguts.ValidHeaderFieldName(key) && httpguts.ValidTrailerHeader(key) {
					trailer[key] = nil
				}
			})
			continue
		case f.Dropped || f.Known.Hop():
			continue
		}
		name := http.CanonicalHeaderKey(string(f.Name))
		header[name] = append(header[name], value)
	}
	header["X-Forwarded-For"] = []string{strings.Join(append(chain, string(x.via.client)), ", ")}
	proto := "http"
	if x.info.TLS != nil {
		proto = "https"
	}
	if header["X-Forwarded-Proto"] == nil {
		header["X-Forwarded-Proto"] = []string{proto}
	}
	if header["X-Forwarded-Port"] == nil {
		header["X-Forwarded-Port"] = []string{itoa(int64(x.info.Local.Port()))}
	}
	if q.Trailers {
		header["Te"] = []string{"trailers"}
	}
	if header["User-Agent"] == nil {
		header["User-Agent"] = []string{""} // the library would name itself
	}
	// In this form the library takes the target as it is, and cuts off what is before it.
	req := &http.Request{Method: string(q.Method), URL: &url.URL{Scheme: scheme, Host: host, Opaque: "//" + host + string(q.Target)}, Host: host, Header: header, ContentLength: q.Length, Trailer: trailer}
	if string(q.Target) == "*" {
		req.URL.Opaque = "*"
	}
	switch {
	case x.small != nil:
		// The library may read it after the request has ended, when the buffer is somebody else's.
		req.Body = io.NopCloser(bytes.NewReader(bytes.Clone(x.small)))
	case x.body != nil:
		body.declared = trailer
		req.Body = body
	}
	return req.WithContext(ctx)
}

// deliverHTTP2 passes a response on.
func (x *exchange) deliverHTTP2(res *http.Response, body *bodyReader) (balance.Result, error) {
	result := resultOf(res.StatusCode)
	if !x.watch.enter(phaseResponse) {
		return result, errors.New("time-out")
	}
	x.watch.progress()
	head := &wire.Response{Status: res.StatusCode, Minor: 1, Length: res.ContentLength, HasLength: res.Header["Content-Length"] != nil}
	for name, values := range res.Header {
		known := wire.Lookup([]byte(name))
		for _, value := range values {
			head.Fields = append(head.Fields, wire.Field{Name: []byte(name), Value: []byte(value), Known: known})
		}
	}
	bodiless := x.isHead || res.StatusCode == 204 || res.StatusCode == 304
	if head.Length < 0 || len(res.Trailer) > 0 {
		// In HTTP/1 a trailer comes only after chunks.
		head.Length, head.HasLength = wire.Chunked, false
	}
	x.started = true
	if err := x.sink.head(head, head.Length, bodiless); err != nil {
		return balance.Abandoned, errClient{err}
	}
	buf := takeBuffer()
	defer giveBuffer(buf)
	for whole := int64(0); !bodiless; {
		// A body of known length that has come in whole needs no flush of its own: its end is one.
		if whole == 0 && (res.ContentLength < 0 || res.ContentLength > bufferSize) {
			if err := x.sink.flush(); err != nil {
				return balance.Abandoned, errClient{err}
			}
		}
		n, err := res.Body.Read(buf)
		x.watch.progress()
		whole += int64(n)
		x.log.body(int64(n))
		if n > 0 {
			if err := x.sink.data(buf[:n]); err != nil {
				return balance.Abandoned, errClient{err}
			}
			if err == nil && whole != res.ContentLength {
				if err := x.sink.flush(); err != nil {
					return balance.Abandoned, errClient{err}
				}
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			if body.clientFailed() {
				return balance.Abandoned, errClient{err}
			}
			return x.cutOff(err)
		}
	}
	var trailer []wire.Field
	for name, values := range res.Trailer {
		for _, value := range values {
			trailer = append(trailer, field(name, value))
		}
	}
	if err := x.sink.end(trailer); err != nil {
		return balance.Abandoned, errClient{err}
	}
	return result, nil
}

// bodyReader is a request's body for the library, which reads it from a goroutine of its own, and what ends the request.
type bodyReader struct {
	x        *exchange
	owner    *endpointConns
	cancel   func()
	declared http.Header

	mu     sync.Mutex
	piece  []byte
	begun  bool
	closed bool
	failed error // of the client's side
	reads  sync.Mutex
}

func (b *bodyReader) Read(p []byte) (int, error) {
	b.reads.Lock()
	defer b.reads.Unlock()
	b.mu.Lock()
	closed, first := b.closed, !b.begun
	if !closed {
		b.begun = true
	}
	b.mu.Unlock()
	if closed {
		return 0, io.ErrClosedPipe
	}
	x := b.x
	if first {
		// Messages of gRPC come when there is something to say, and a call that streams them may be answered only at its end.
		x.watch.beginBody(x.grpc)
	}
	if len(b.piece) == 0 {
		piece, err := x.nextPiece()
		if err == io.EOF {
			x.watch.bodySince.Store(0)
			x.watch.refresh(phaseWaiting)
			for _, f := range x.body.trailer() {
				if name := canonical(f.Name); b.declared != nil {
					b.declared[name] = append(b.declared[name], string(f.Value))
				}
			}
			return 0, io.EOF
		}
		if err != nil {
			x.watch.bodySince.Store(0)
			b.mu.Lock()
			if !b.closed {
				b.failed = err
			}
			b.mu.Unlock()
			return 0, err
		}
		x.watch.bodyBytes.Add(int64(len(piece)))
		x.watch.progress()
		b.piece = piece
	}
	n := copy(p, b.piece)
	b.piece = b.piece[n:]
	return n, nil
}

// clientFailed says whether the rest can't be had from the client.
func (b *bodyReader) clientFailed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed != nil
}

// abort ends the request. The library does not look at the context while it waits for the body.
func (b *bodyReader) abort() {
	b.stop()
	b.cancel()
}

// stop has one who reads return, without waiting for that.
func (b *bodyReader) stop() {
	b.mu.Lock()
	was := b.closed
	b.closed = true
	begun := b.begun
	b.mu.Unlock()
	if begun && !was && !b.x.bodyDone(b) {
		b.x.body.interrupt()
	}
}

// Close stops reading: nobody reads any more when it returns.
func (b *bodyReader) Close() error {
	b.stop()
	b.reads.Lock()
	b.x.watch.bodySince.Store(0)
	b.reads.Unlock()
	return nil
}

// bodyDone says whether all of the body was read, without waiting for one who reads.
func (x *exchange) bodyDone(b *bodyReader) bool {
	if !b.reads.TryLock() {
		return false
	}
	defer b.reads.Unlock()
	return x.body.Done()
}

// canonical is a field's name as net/http spells it.
func canonical(name []byte) string { return http.CanonicalHeaderKey(string(name)) }

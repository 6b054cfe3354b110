package web

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"

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
	// alone: it is for the request that it was made for, since it began with a PROXY header or was made in a way that has changed since.
	alone bool
}

// transport makes client connections; it keeps none. It sends no pings: a gRPC server ends connections with more than a few in five minutes in which
// it has nothing to say. That a machine is gone the kernel finds out: see noticeLoss.
var transport = &http2.Transport{AllowHTTP: true, DisableCompression: true, MaxHeaderListSize: config.DefaultHeaderBytes}

// After quietBeforeProbe without a packet the kernel asks whether the endpoint's machine is there, and lossAfter it gives up; so it does if what was
// sent is not acknowledged for as long.
const (
	quietBeforeProbe = 30 * time.Second
	probeInterval    = 5 * time.Second
	lossAfter        = 45 * time.Second
)

// noticeLoss has a connection break whose other end is gone without a word. Requests share it, and new ones would be sent over it without end.
func noticeLoss(nc net.Conn) {
	raw := rawOf(nc)
	if raw == nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		set := func(level, option int, value int64) { _ = unix.SetsockoptInt(int(fd), level, option, int(value)) }
		set(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
		set(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int64(quietBeforeProbe/time.Second))
		set(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int64(probeInterval/time.Second))
		set(unix.IPPROTO_TCP, unix.TCP_KEEPCNT, int64((lossAfter-quietBeforeProbe)/probeInterval))
		set(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, lossAfter.Milliseconds())
	})
}

// retire lets a connection go when its requests have ended, and counts it until then. It ends none of them: how long they may last is the
// sweeper's to say.
func (h *http2Conn) retire() {
	h.once.Do(func() {
		uncount := sync.OnceFunc(h.owner.endpoint.Close)
		if h.cc.State().Closing {
			uncount() // the endpoint has given it up, and expects another one
		}
		h.cc.SetDoNotReuse()
		if h.unused(math.MaxInt64) {
			h.cc.Close()
			uncount()
			return
		}
		go func() {
			h.cc.Shutdown(context.Background())
			h.cc.Close()
			uncount()
		}()
	})
}

// unused says whether nobody uses the connection since before a time.
func (h *http2Conn) unused(before int64) bool {
	state := h.cc.State()
	return state.Closed || state.StreamsActive+state.StreamsReserved+state.StreamsPending == 0 && h.used.Load() < before
}

// dialing is a connection that is being made. Requests that come meanwhile wait for it: it has room for many.
type dialing struct {
	done chan struct{}
	err  error // for others after done
}

// takeHTTP2 returns a connection with room for one more request, which is reserved.
func (c *endpointConns) takeHTTP2(ctx context.Context, cfg *config.Pool, info *Info) (_ *http2Conn, reused bool, _ error) {
	if cfg.ProxyProtocol != 0 {
		one, err := c.dialHTTP2(ctx, cfg, info)
		if one != nil {
			one.alone = true
		}
		return one, false, err
	}
	for {
		c.mu.Lock()
		one, d := c.reserve(), c.dialing
		if one != nil {
			c.mu.Unlock()
			return one, true, nil
		}
		if d == nil {
			d = &dialing{done: make(chan struct{})}
			c.dialing = d
			c.mu.Unlock()
			one, d.err = c.dialHTTP2(ctx, cfg, info)
			c.mu.Lock()
			c.dialing = nil
			switch {
			case one == nil:
			case sameDialing(c.cfg, cfg):
				c.http2 = append(c.http2, one)
			default:
				one.alone = true
			}
			c.mu.Unlock()
			close(d.done)
			return one, false, d.err
		}
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, false, ctx.Err()
		case <-d.done:
			// That the client left for which it was made says nothing to others.
			if d.err != nil && !errors.Is(d.err, context.Canceled) {
				return nil, false, d.err
			}
		}
	}
}

// reserve takes room for a request in a connection that is there; nil: there is none. The caller holds mu.
func (c *endpointConns) reserve() *http2Conn {
	for i := 0; i < len(c.http2); {
		one := c.http2[i]
		if one.cc.ReserveNewRequest() {
			return one
		}
		if state := one.cc.State(); state.Closed || state.Closing {
			one.retire()
			c.http2 = append(c.http2[:i], c.http2[i+1:]...)
			continue
		}
		i++
	}
	return nil
}

// dialHTTP2 makes a connection, with room for one request reserved.
func (c *endpointConns) dialHTTP2(ctx context.Context, cfg *config.Pool, info *Info) (*http2Conn, error) {
	nc, err := c.connect(ctx, cfg, info)
	if err != nil {
		return nil, err
	}
	noticeLoss(nc)
	cc, err := transport.NewClientConn(nc)
	if err != nil {
		nc.Close()
		c.endpoint.Close()
		return nil, err
	}
	one := &http2Conn{cc: cc, owner: c}
	one.used.Store(c.server.now())
	if !cc.ReserveNewRequest() {
		one.retire()
		return nil, errors.New("the endpoint takes no request")
	}
	return one, nil
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
	if one.alone {
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
	broken := errors.As(err, &stream)
	switch {
	case x.endedByClient():
		return balance.Abandoned, false, errClient{err}
	case body.failed != nil:
		p := &pump{done: make(chan struct{}), client: true, err: body.failed}
		close(p.done)
		x.pump = p
		return balance.Abandoned, false, errClient{err}
	case tooLarge(err):
		return balance.Abandoned, false, errHeaderTooLarge
	case x.deadlineOver(err):
		return balance.Abandoned, false, err
	case notBegun(err) && !reused:
		return balance.Failed, fresh, err
	case notBegun(err), broken && stream.Code == http2.ErrCodeRefusedStream:
		return balance.Abandoned, fresh, err
	case reused && !broken && x.watch.reason() != reasonEndpoint:
		// The connection was lost, with all that it carried: that may have been one request's doing.
		return balance.Abandoned, fresh && x.repeatable, err
	}
	return balance.Failed, fresh && x.repeatable, err
}

// notBegun says whether the endpoint has not begun a request because its connection takes no more: it has said GOAWAY, or the connection was
// retired. The library tells it by the text alone.
func notBegun(err error) bool {
	switch err.Error() {
	case "http2: Transport received Server's graceful shutdown GOAWAY", "http2: client conn not usable":
		return true
	}
	return false
}

// errHeaderTooLarge: the endpoint has said that it takes no header as large as the request's.
var errHeaderTooLarge = errors.New("the header is larger than the endpoint takes")

// tooLarge says whether a request was not sent for that reason, which the library, too, tells by the text alone.
func tooLarge(err error) bool {
	return strings.HasSuffix(err.Error(), "request header list larger than peer's advertised limit")
}

// deadlineOver says whether the endpoint has cancelled a call without a status: it has found that the deadline is over that the client gave.
func (x *exchange) deadlineOver(err error) bool {
	var stream http2.StreamError
	return x.grpc && errors.As(err, &stream) && stream.Code == http2.ErrCodeCancel
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

// canonical is a field's name as net/http spells it.
func canonical(name []byte) string { return http.CanonicalHeaderKey(string(name)) }

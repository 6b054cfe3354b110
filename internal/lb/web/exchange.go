package web

import (
	"context"
	"errors"
	"io"
	"net"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
	"portal/internal/lb/route"
	"portal/internal/lb/web/wire"
)

// requestBody is what comes from a client after the head: of HTTP/1 or HTTP/2.
type requestBody interface {
	// Next is that of wire.Body.
	Next(wait bool) ([]byte, error)
	Done() bool
	Total() int64
	// trailer is complete when Next has returned io.EOF.
	trailer() []wire.Field
	// interrupt makes a Next that waits return, and all that follow.
	interrupt()
}

// sink takes a response for the client: in HTTP/1 or HTTP/2.
type sink interface {
	interim(res *wire.Response) error
	// head begins the response; length is a number, or wire.Chunked if it is not known. bodiless responses have no body whatever length is.
	head(res *wire.Response, length int64, bodiless bool) error
	data(p []byte) error
	flush() error
	end(trailer []wire.Field) error
}

// exchange is one request and its response.
type exchange struct {
	server *Server
	watch  *watch
	info   *Info
	site   *Site
	stats  *Stats
	req    *wire.Request
	sink   sink
	via    *forwarded
	ctx    context.Context

	// body is nil if there is none. small is all of it, if it came with the head: it can be sent again.
	body  requestBody
	small []byte

	// What is needed of req after its buffer is used for the body.
	isHead, repeatable, upgrade, grpc bool

	// The results: whether the response has begun, whether the client's connection can't be used for another request, and whether the
	// response was cut off, which the client must be able to see.
	started, closing, broken bool
	// tunnel is the endpoint's connection after an upgrade.
	tunnel *endpointConn
	use    *balance.Use

	tried  []*balance.Endpoint
	out    []byte
	cookie string // to be set: NAME=VALUE and attributes
	pump   *pump
	mine   *endpointConn // the client's own connection to an endpoint, if connections can't be shared
	log    logged
}

// errClient is wrapped around failures of the client's side.
type errClient struct{ error }

// reset prepares for the next request. The buffers stay.
func (x *exchange) reset() {
	*x = exchange{server: x.server, watch: x.watch, info: x.info, req: x.req, sink: x.sink, via: x.via, ctx: x.ctx, mine: x.mine, stats: x.stats,
		tried: x.tried[:0], out: x.out[:0]}
}

// context ends with the request.
func (x *exchange) context() context.Context {
	if st, is := x.sink.(*http2Stream); is {
		return st.context()
	}
	return x.ctx
}

// serve answers a request whose head was read.
func (x *exchange) serve() {
	x.isHead = string(x.req.Method) == "HEAD"
	x.repeatable = idempotent(x.req.Method)
	x.upgrade = len(x.req.Upgrade) > 0
	x.grpc = isHTTP2(x.sink) && isGRPC(x.req.Fields)
	x.stats.Active.Add(1)
	x.beginLog()
	x.answerByRoute()
	x.stats.Active.Add(-1)
	x.endLog()
}

func (x *exchange) answerByRoute() {
	path := string(x.req.Path)
	if err := route.CheckPath(path); err != nil {
		x.answer(400, "the path is ambiguous: "+err.Error())
		return
	}
	found := x.site.Routes.Find(string(x.req.Host), path)
	switch {
	case found == nil:
		x.answer(404, "no route leads from here")
	case found.Redirect != nil:
		x.redirect(found.Redirect)
	case found.Status != 0:
		x.answer(found.Status, found.Message)
	default:
		pool := x.info.Pool(found.Pool)
		if pool == nil {
			x.answer(503, "there is no endpoint")
			return
		}
		x.forward(pool)
	}
}

func idempotent(method []byte) bool {
	switch string(method) {
	case "GET", "HEAD", "OPTIONS", "PUT", "DELETE":
		return true
	}
	return false
}

// forward passes the request on to an endpoint, and tries others as long as that can't be done twice.
func (x *exchange) forward(pool *balance.Pool) {
	cfg := pool.Config()
	key := balance.Key{Client: x.info.Client.Addr(), Hash: x.hash(cfg)}
	retries := cfg.Retries
	switch {
	case retries == 0:
		retries = config.DefaultRetries
	case retries < 0:
		retries = 0
	}
	var last error
	for attempt := 0; ; attempt++ {
		use, err := pool.Pick(key, x.tried)
		if err != nil {
			x.unavailable(err, last)
			return
		}
		x.use = use
		x.log.endpoint = use.Endpoint.Address
		result, again, err := x.attempt(use, cfg)
		if x.tunnel != nil {
			return // the use goes on with the tunnel
		}
		use.Done(result)
		if err == nil || x.started {
			x.broken = x.broken || err != nil
			return
		}
		last = err
		if !again || attempt >= retries || x.watch.reason() != reasonNone {
			x.failed(err)
			return
		}
		x.stats.Retries.Add(1)
		pool.Counters.Retries.Add(1)
		x.log.retries++
		x.tried = append(x.tried, use.Endpoint)
	}
}

// attempt sends the request to one endpoint. again says whether another may be tried after an error.
func (x *exchange) attempt(use *balance.Use, cfg *config.Pool) (result balance.Result, again bool, err error) {
	conns, err := x.server.connsOf(use.Endpoint, cfg)
	if err != nil {
		return balance.ConnectFailed, false, err
	}
	if cfg.Protocol == config.H2 || cfg.Protocol == config.H2C {
		result, again, err = x.attemptHTTP2(conns, cfg)
		if !again || !notBegun(err) || x.watch.reason() != reasonNone {
			return result, again, err
		}
		// That its connection takes no more requests says nothing about the endpoint: it gets another chance, over another one.
		x.stats.Retries.Add(1)
		return x.attemptHTTP2(conns, cfg)
	}
	for fresh := false; ; fresh = true {
		e, err := x.connection(conns, cfg, fresh)
		if err != nil {
			return x.noConnection(err)
		}
		reused := e.reused
		result, again, err = x.over(e)
		// That a kept connection was closed says nothing about the endpoint: it gets another chance, over a new one.
		if err == nil || !again || !reused || x.watch.reason() != reasonNone {
			return result, again, err
		}
		x.stats.Retries.Add(1)
	}
}

// noConnection is what it means that an endpoint could not be connected to: nothing, if it has as many as it may have, or if the client
// did not wait for it.
func (x *exchange) noConnection(err error) (result balance.Result, again bool, _ error) {
	switch {
	case errors.Is(err, errBusy):
		return balance.Abandoned, true, err
	case x.endedByClient():
		return balance.Abandoned, false, errClient{err}
	}
	return balance.ConnectResult(err), true, err
}

// endedByClient says whether an attempt failed because the client left or did not send what it began: that says nothing about the endpoint.
func (x *exchange) endedByClient() bool {
	switch x.watch.reason() {
	case reasonGone, reasonBody:
		return true
	}
	return x.pump != nil && x.pump.clientFailed() || x.context().Err() != nil
}

// cutOff is what it means that a connection to an endpoint broke while it was used.
func (x *exchange) cutOff(err error) (balance.Result, error) {
	switch {
	case x.endedByClient():
		return balance.Abandoned, errClient{err}
	case x.watch.reason() == reasonStalled, x.deadlineOver(err):
		// A watch on which nothing happens is no failure, nor is a call that has lasted for as long as its client wanted.
		return balance.Abandoned, err
	}
	return balance.Failed, err
}

// over sends the request over one connection, and keeps or closes that.
func (x *exchange) over(e *endpointConn) (balance.Result, bool, error) {
	x.watch.setEndpoint(e)
	result, again, err := x.carry(e)
	x.watch.setEndpoint(nil)
	x.stopPump(e)
	switch {
	case x.tunnel != nil:
	case err == nil && e.res.KeepAlive && e.body.Done() && len(e.src.Buffered()) == 0 && x.sentWhole():
		x.keep(e)
	default:
		e.close()
	}
	return result, again, err
}

// sentWhole says whether the endpoint got the whole request: if not, the connection can't be used again.
func (x *exchange) sentWhole() bool { return x.pump == nil || x.pump.complete }

// connection returns one that is there already, or makes one; fresh: only the latter.
func (x *exchange) connection(conns *endpointConns, cfg *config.Pool, fresh bool) (*endpointConn, error) {
	if mine := x.mine; mine != nil {
		x.mine = nil
		if mine.owner == conns && mine.cfg == cfg && mine.clean() {
			mine.reused = true
			mine.src.Buf = takeBuffer()
			return mine, nil
		}
		mine.close()
	}
	if cfg.ProxyProtocol == 0 && !fresh {
		if e := conns.take(); e != nil {
			return e, nil
		}
	}
	return conns.dial(x.context(), cfg, x.info)
}

func (x *exchange) keep(e *endpointConn) {
	if !e.private {
		e.owner.put(e)
		return
	}
	giveBuffer(e.src.Buf)
	e.src.Buf, e.src.R, e.src.W = nil, 0, 0
	x.mine = e
}

// carry sends the request over a connection and passes the response on.
func (x *exchange) carry(e *endpointConn) (balance.Result, bool, error) {
	x.out = x.appendHead(x.out[:0])
	x.out = append(x.out, x.small...)
	if !x.watch.enter(phaseWaiting) {
		return balance.Abandoned, false, errors.New("time-out")
	}
	n, err := e.nc.Write(x.out)
	if err != nil {
		// An endpoint that answers before it has read everything has perhaps answered.
		if e.reused && n == 0 {
			return balance.Abandoned, true, err
		}
		if len(e.src.Buf) == 0 || !x.answered(e) {
			result, err := x.cutOff(err)
			return result, x.repeatable && result == balance.Failed, err
		}
	}
	x.log.sent(x)
	if x.body != nil && x.small == nil {
		x.startPump(e)
	}
	return x.receive(e)
}

// answered waits for the first bytes of an answer.
func (x *exchange) answered(e *endpointConn) bool { return e.src.Fill() == nil }

// receive reads the response and passes it on.
func (x *exchange) receive(e *endpointConn) (balance.Result, bool, error) {
	for interims := 0; ; interims++ {
		if err := x.readHead(e); err != nil {
			return x.noAnswer(e, err)
		}
		res := &e.res
		x.log.answered(res.Status)
		switch {
		case res.Status == 101:
			if !x.upgrade || len(res.Upgrade) == 0 {
				return balance.Failed, false, &wire.Error{Status: 502, Reason: "the endpoint switched protocols unasked"}
			}
			x.started = true
			if err := x.sink.interim(res); err != nil {
				return balance.Abandoned, false, errClient{err}
			}
			x.tunnel = e
			return balance.OK, false, nil
		case res.Status < 200:
			if interims > 32 {
				return balance.Failed, false, &wire.Error{Status: 502, Reason: "the endpoint sends only interim answers"}
			}
			if err := x.sink.interim(res); err != nil {
				return balance.Abandoned, false, errClient{err}
			}
		default:
			return x.deliver(e)
		}
	}
}

// noAnswer is what it means that an endpoint did not answer.
func (x *exchange) noAnswer(e *endpointConn, err error) (balance.Result, bool, error) {
	var invalid *wire.Error
	switch {
	case x.endedByClient():
		return balance.Abandoned, false, errClient{err}
	case errors.As(err, &invalid):
		return balance.Failed, false, err
	case len(e.src.Buffered()) > 0:
		return balance.Failed, false, err
	case e.reused && x.watch.reason() != reasonEndpoint && !e.reached(len(x.out)):
		// It was closed while the request was under way; that says nothing about the endpoint.
		return balance.Abandoned, x.repeatable && x.pump == nil, err
	}
	return balance.Failed, x.repeatable && x.pump == nil, err
}

// readHead reads the head of a response.
func (x *exchange) readHead(e *endpointConn) error {
	limits := wire.Limits{Bytes: config.DefaultHeaderBytes, Fields: 4 * wire.DefaultFields}
	e.res.Reset()
	for {
		if len(e.src.Buffered()) > 0 {
			n, failed := e.res.Parse(e.src.Buffered(), limits)
			if failed != nil {
				return failed
			}
			if n > 0 {
				e.src.R += n
				return nil
			}
		}
		switch err := e.src.Fill(); err {
		case nil:
		case io.ErrShortBuffer:
			grown := make([]byte, config.DefaultHeaderBytes+bufferSize)
			copy(grown, e.src.Buf[:e.src.W])
			giveBuffer(e.src.Buf)
			e.src.Buf = grown
		case io.EOF:
			return io.ErrUnexpectedEOF
		default:
			return err
		}
	}
}

// deliver passes the final response on.
func (x *exchange) deliver(e *endpointConn) (balance.Result, bool, error) {
	res := &e.res
	result := resultOf(res.Status)
	if !x.watch.enter(phaseResponse) {
		return result, false, errors.New("time-out")
	}
	x.watch.progress()
	bodiless := x.isHead || res.Status == 204 || res.Status == 304
	length := res.Length
	if bodiless {
		e.body.Reset(&e.src, 0, -1, wire.Limits{})
	} else {
		e.body.Reset(&e.src, length, -1, wire.Limits{Bytes: config.DefaultHeaderBytes, Fields: wire.DefaultFields})
	}
	if length == wire.UntilClose {
		res.KeepAlive = res.KeepAlive && bodiless
		length = wire.Chunked
	}
	x.started = true
	if err := x.sink.head(res, length, bodiless); err != nil {
		return balance.Abandoned, false, errClient{err}
	}
	for {
		piece, err := e.body.Next(false)
		if err == wire.ErrWouldRead {
			if err := x.sink.flush(); err != nil {
				return balance.Abandoned, false, errClient{err}
			}
			piece, err = e.body.Next(true)
			x.watch.progress()
		}
		switch {
		case err == io.EOF:
			x.log.body(e.body.Total())
			if err := x.sink.end(e.body.Trailer); err != nil {
				return balance.Abandoned, false, errClient{err}
			}
			return result, false, nil
		case err != nil:
			x.log.body(e.body.Total())
			result, err := x.cutOff(err)
			return result, false, err
		}
		if err := x.sink.data(piece); err != nil {
			x.log.body(e.body.Total())
			return balance.Abandoned, false, errClient{err}
		}
	}
}

func resultOf(status int) balance.Result {
	if status == 502 || status == 503 || status == 504 {
		return balance.Failed
	}
	return balance.OK
}

// failed answers after an attempt that can't be repeated.
func (x *exchange) failed(err error) {
	if p := x.pump; p != nil && p.clientFailed() {
		var refused *wire.Error
		switch {
		case x.watch.reason() == reasonBody:
			x.answer(408, "the body took too long")
		case errors.As(p.err, &refused):
			x.answer(refused.Status, refused.Reason)
		case errors.Is(p.err, io.ErrUnexpectedEOF):
			x.answer(400, "the body is incomplete")
		default:
			x.closing, x.broken = true, true
		}
		return
	}
	var timeout net.Error
	switch why := x.watch.reason(); {
	case why == reasonGone:
		x.closing, x.broken = true, true
	case why == reasonBody:
		x.answer(408, "the body took too long")
	case why == reasonEndpoint:
		x.answer(504, "the endpoint took too long to answer")
	case errors.Is(err, errBusy):
		x.answer(503, "every endpoint is busy")
	case errors.Is(err, errHeaderTooLarge):
		x.answer(431, "the header is larger than the endpoint takes")
	case x.deadlineOver(err):
		x.answer(504, "the endpoint cancelled the call")
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded):
		x.answer(504, "the endpoint could not be reached in time")
	default:
		x.answer(502, "the endpoint gave no valid answer")
	}
}

// unavailable answers if there is no endpoint to try, or none any more.
func (x *exchange) unavailable(err, last error) {
	switch {
	case last != nil:
		x.failed(last)
	case errors.Is(err, balance.ErrBusy):
		x.answer(503, "every endpoint is busy")
	default:
		x.answer(503, "there is no endpoint")
	}
}

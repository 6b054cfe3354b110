package web

import (
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// retryAfter is what clients are asked to wait for if there is no endpoint.
const retryAfter = "5"

// answer responds from here: a status and a line that says why. Nothing in it is about endpoints' addresses.
func (x *exchange) answer(status int, why string) {
	text := strconv.Itoa(status) + " " + http.StatusText(status)
	if why != "" {
		text += ": " + why
	}
	if x.grpc {
		x.answerGRPC(status, text)
		return
	}
	var fields []wire.Field
	if status == 503 {
		fields = append(fields, field("Retry-After", retryAfter))
	}
	if status == 405 {
		fields = append(fields, field("Allow", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"))
	}
	x.respond(status, fields, text+"\n")
}

// isGRPC says whether the client expects answers in the way of gRPC.
func isGRPC(fields []wire.Field) bool {
	for i := range fields {
		if f := &fields[i]; len(f.Name) == len("content-type") && wire.EqualFold(f.Name, "content-type") {
			return strings.HasPrefix(string(f.Value), "application/grpc") && !strings.HasPrefix(string(f.Value), "application/grpc-web")
		}
	}
	return false
}

// The status codes of gRPC that a balancer answers with.
const (
	grpcDeadlineExceeded  = "4"
	grpcResourceExhausted = "8"
	grpcUnimplemented     = "12"
	grpcInternal          = "13"
	grpcUnavailable       = "14"
)

// answerGRPC says in gRPC's words what a status means: clients make little of an HTTP status.
func (x *exchange) answerGRPC(status int, why string) {
	code := grpcInternal
	switch status {
	case 404:
		code = grpcUnimplemented
	case 413, 431:
		code = grpcResourceExhausted
	case 502, 503:
		code = grpcUnavailable
	case 504, 408:
		code = grpcDeadlineExceeded
	}
	x.started = true
	x.log.own(status)
	x.watchAnswer()
	x.closing = x.closing || x.body != nil && !x.body.Done()
	res := &wire.Response{Status: 200, Minor: 1, Fields: []wire.Field{field("Content-Type", "application/grpc"), field("Grpc-Status", code), field("Grpc-Message", why)}}
	if err := x.sink.head(res, 0, true); err != nil {
		x.closing = true
		return
	}
	if err := x.sink.end(nil); err != nil {
		x.closing = true
	}
}

func (x *exchange) redirect(to *config.Redirect) {
	scheme := to.Scheme
	if scheme == "" {
		scheme = "http"
		if x.info.TLS != nil {
			scheme = "https"
		}
	}
	host := string(x.req.Host)
	if host == "" {
		host = x.info.Local.Addr().String()
		if x.info.Local.Addr().Is6() {
			host = "[" + host + "]"
		}
	}
	if to.Scheme != "" || to.Port != 0 {
		host = withPort(host, scheme, to.Port)
	}
	status := to.Status
	if status == 0 {
		status = 308
	}
	target := string(x.req.Target)
	if target == "*" {
		target = "/"
	}
	x.respond(status, []wire.Field{field("Location", scheme+"://"+host+target)}, strconv.Itoa(status)+" "+http.StatusText(status)+"\n")
}

// withPort replaces the port of a host; the scheme's own is left out.
func withPort(host, scheme string, port uint16) string {
	if colon := strings.LastIndexByte(host, ':'); colon > strings.LastIndexByte(host, ']') {
		host = host[:colon]
	}
	if addr, err := netip.ParseAddr(host); err == nil && addr.Is6() {
		host = "[" + host + "]"
	}
	if port == 0 || scheme == "http" && port == 80 || scheme == "https" && port == 443 {
		return host
	}
	return host + ":" + strconv.Itoa(int(port))
}

func field(name, value string) wire.Field {
	return wire.Field{Name: []byte(name), Value: []byte(value)}
}

// watchAnswer has the time-outs of a response hold for an answer from here: a client that asks again and again without reading must not hold
// its connection for ever.
func (x *exchange) watchAnswer() {
	x.watch.progress()
	x.watch.enter(phaseResponse)
}

// respond sends a whole response, unless one has begun.
func (x *exchange) respond(status int, fields []wire.Field, text string) {
	if x.started {
		x.closing, x.broken = true, true
		return
	}
	x.started = true
	x.log.own(status)
	x.watchAnswer()
	if x.body != nil && !x.body.Done() {
		// What is left of the body is not read: it can't be distinguished from the next request.
		x.closing = true
	}
	res := &wire.Response{Status: status, Reason: []byte(http.StatusText(status)), Minor: 1, HasLength: true, Length: int64(len(text))}
	res.Fields = append(fields, field("Content-Type", "text/plain; charset=utf-8"), field("Date", time.Now().UTC().Format(http.TimeFormat)))
	bodiless := x.isHead || status == 204 || status == 304
	if err := x.sink.head(res, int64(len(text)), bodiless); err != nil {
		x.closing = true
		return
	}
	if !bodiless {
		x.log.body(int64(len(text)))
		if err := x.sink.data([]byte(text)); err != nil {
			x.closing = true
			return
		}
	}
	if err := x.sink.end(nil); err != nil {
		x.closing = true
	}
}

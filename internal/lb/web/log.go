package web

import (
	"net/netip"
	"strconv"
	"time"

	"portal/internal/lb/accesslog"
	"portal/internal/lb/web/wire"
)

// logged is what becomes an access log's line, and a count.
type logged struct {
	on                    bool
	status, endpointState int
	retries               int
	endpoint              netip.AddrPort
	began, passed, heard  time.Time
	bodyBytes             int64
	method, url, agent    string
	proto                 string
}

// beginLog keeps what the line says of the request: the buffer may be gone when it is written.
func (x *exchange) beginLog() {
	l := &x.log
	l.on = x.site.Listener.AccessLog != nil && x.server.options.Log != nil
	if !l.on {
		return
	}
	l.began = time.Now()
	scheme, host := "http", string(x.req.Host)
	if x.info.TLS != nil {
		scheme = "https"
	}
	if host == "" {
		host = x.info.Local.String()
	} else if wire.CheckHost(x.req.Host) && !hasPort(host) {
		host += ":" + itoa(int64(x.info.Local.Port()))
	}
	l.method, l.url = string(x.req.Method), scheme+"://"+host+string(x.req.Target)
	if l.proto == "" {
		l.proto = "HTTP/1.1"
		if x.req.Minor == 0 {
			l.proto = "HTTP/1.0"
		}
	}
	for i := range x.req.Fields {
		if f := &x.req.Fields[i]; f.Known == wire.UserAgent {
			l.agent = string(f.Value)
		}
	}
	if l.method == "" { // it could not be read
		l.method, l.url, l.proto = "-", "-", "-"
	}
}

func (l *logged) sent(*exchange) {
	if l.on {
		l.passed = time.Now()
	}
}

func (l *logged) answered(status int) {
	l.status, l.endpointState = status, status
	if l.on {
		l.heard = time.Now()
	}
}

// own is an answer that is not an endpoint's.
func (l *logged) own(status int) { l.status = status }

func (l *logged) body(n int64) { l.bodyBytes += n }

func (x *exchange) endLog() {
	l := &x.log
	class := l.status / 100
	if !x.started || class > 5 {
		class = 0
	}
	x.stats.Requests[class].Add(1)
	received := int64(len(x.small))
	if x.body != nil && x.small == nil {
		received = x.body.Total()
	}
	if x.use != nil {
		x.use.Endpoint.Counters.BytesIn.Add(uint64(received))
		x.use.Endpoint.Counters.BytesOut.Add(uint64(l.bodyBytes))
	}
	if !l.on {
		return
	}
	now := time.Now()
	r := &accesslog.Record{
		Time: l.began, Balancer: x.site.Listener.AccessLog.Balancer, Listener: x.site.Listener.Name, Owner: x.site.Listener.Owner, Tags: x.site.Listener.Tags,
		Client: x.info.Client, Endpoint: l.endpoint, RequestTime: -1, EndpointTime: -1, ResponseTime: -1, Duration: now.Sub(l.began),
		Status: l.status, EndpointStatus: l.endpointState, Received: received, Sent: l.bodyBytes,
		Method: l.method, URL: l.url, Proto: l.proto, UserAgent: l.agent, Retries: l.retries,
	}
	if !l.passed.IsZero() && !l.heard.IsZero() {
		r.RequestTime, r.EndpointTime, r.ResponseTime = l.passed.Sub(l.began), l.heard.Sub(l.passed), now.Sub(l.heard)
	}
	if x.info.TLS != nil {
		r.TLSVersion, r.TLSSuite = x.info.TLS.Version, x.info.TLS.CipherSuite
	}
	x.server.options.Log(x.site.Listener, r)
}

func hasPort(host string) bool {
	for i := len(host) - 1; i >= 0 && host[i] != ']'; i-- {
		if host[i] == ':' {
			return true
		}
	}
	return false
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

package web

import (
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/internal/lb/web/wire"
)

// mostContinuations is how many frames a header may be spread over after its first.
const mostContinuations = 64

// http2Head is a header as it is decoded: of a request, or a trailer.
type http2Head struct {
	method, scheme, path, authority string
	// pseudo are the fields above that were there.
	pseudo    uint8
	fields    []wire.Field
	size      int
	limits    wire.Limits
	malformed bool // against HTTP/2's own rules
	tooLarge  bool
}

const (
	pseudoMethod = 1 << iota
	pseudoScheme
	pseudoPath
	pseudoAuthority
)

func (h *http2Head) reset(limits wire.Limits) { *h = http2Head{fields: h.fields[:0], limits: limits} }

// field takes a field from the decoder.
func (h *http2Head) field(f hpack.HeaderField) {
	h.size += int(f.Size())
	if h.size > h.limits.Bytes || len(h.fields) >= h.limits.Fields {
		h.tooLarge = true
		return
	}
	if strings.HasPrefix(f.Name, ":") {
		h.pseudoField(f)
		return
	}
	name, value := bytesOf(f.Name), bytesOf(f.Value)
	if !wire.LowerName(name) || !wire.CheckValue(value) {
		h.malformed = true
		return
	}
	known := wire.Lookup(name)
	switch known {
	case wire.Connection, wire.KeepAlive, wire.ProxyConnection, wire.TransferEncoding, wire.Upgrade:
		h.malformed = true
	case wire.TE:
		h.malformed = h.malformed || !wire.EqualFold(value, "trailers")
	}
	h.fields = append(h.fields, wire.Field{Name: name, Value: value, Known: known})
}

func (h *http2Head) pseudoField(f hpack.HeaderField) {
	var bit uint8
	var to *string
	switch f.Name {
	case ":method":
		bit, to = pseudoMethod, &h.method
	case ":scheme":
		bit, to = pseudoScheme, &h.scheme
	case ":path":
		bit, to = pseudoPath, &h.path
	case ":authority":
		bit, to = pseudoAuthority, &h.authority
	}
	if to == nil || h.pseudo&bit != 0 || len(h.fields) > 0 || !wire.CheckValue(bytesOf(f.Value)) {
		h.malformed = true
		return
	}
	h.pseudo |= bit
	*to = f.Value
}

// complete says whether it is a request's: all that one must have, and nothing twice.
func (h *http2Head) complete() bool {
	if h.malformed {
		return false
	}
	if h.tooLarge {
		return true // it is answered, whatever was left out
	}
	if h.method == "CONNECT" {
		return h.pseudo&(pseudoScheme|pseudoPath) == 0 && h.authority != ""
	}
	return h.method != "" && wire.CheckMethod(bytesOf(h.method)) && h.path != "" && (h.scheme == "http" || h.scheme == "https")
}

// decode reads a header and the frames that it goes on in.
func (c *http2Client) decode(f *http2.HeadersFrame) error {
	c.head.reset(c.limits)
	block, ended := f.HeaderBlockFragment(), f.HeadersEnded()
	for n, total := 0, 0; ; n++ {
		if total += len(block); n > mostContinuations || total > 2*c.limits.Bytes {
			return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
		}
		if _, err := c.decoder.Write(block); err != nil {
			return http2.ConnectionError(http2.ErrCodeCompression)
		}
		if ended {
			break
		}
		if !c.hasFrame() {
			c.startWaiting()
		}
		// Others than CONTINUATION are an error of the framer here.
		frame, err := c.framer.ReadFrame()
		if err != nil {
			return err
		}
		more, is := frame.(*http2.ContinuationFrame)
		if !is {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		block, ended = more.HeaderBlockFragment(), more.HeadersEnded()
	}
	if c.decoder.Close() != nil {
		return http2.ConnectionError(http2.ErrCodeCompression)
	}
	return nil
}

// handleHeaders begins a request, or ends a body with a trailer.
func (c *http2Client) handleHeaders(f *http2.HeadersFrame) error {
	id, ended := f.StreamID, f.StreamEnded()
	itself := f.HasPriority() && f.Priority.StreamDep == id
	if err := c.decode(f); err != nil {
		return err
	}
	c.mu.Lock()
	st, err := c.opened(id, ended, itself)
	c.mu.Unlock()
	switch {
	case err != nil || st == nil:
		return err
	case st.ended:
		c.start(st)
	default:
		c.waiting = append(c.waiting, st)
	}
	return nil
}

// opened is the stream that a header is for, if it can be answered now or soon. The lock is held.
func (c *http2Client) opened(id uint32, ended, itself bool) (*http2Stream, error) {
	malformed := http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	if st := c.open[id]; st != nil {
		return c.trailerOf(st, ended)
	}
	switch was := c.remembered(id); {
	case id%2 == 0:
		return nil, http2.ConnectionError(http2.ErrCodeProtocol)
	case id > c.last:
	case was.id != id:
		return nil, http2.ConnectionError(http2.ErrCodeProtocol)
	case was.reset:
		return nil, nil // it was on its way
	default:
		return nil, http2.ConnectionError(http2.ErrCodeStreamClosed)
	}
	c.last = id
	switch {
	case c.ending:
		// GOAWAY names an earlier one as the last that is answered.
		c.remember(id, true)
		return nil, nil
	case itself || !c.head.complete():
		return nil, malformed
	case len(c.open) >= streams || c.running >= mostRunning:
		return nil, http2.StreamError{StreamID: id, Code: http2.ErrCodeRefusedStream}
	case c.running == 0 && !c.watch.enter(phaseBusy):
		return nil, errGraceful // it was idle for too long already
	}
	c.accepted = id
	st := c.take(id)
	st.ended = ended
	st.req.Fields, c.head.fields = c.head.fields, st.req.Fields[:0]
	st.refused = st.interpret(&c.head)
	if ended && st.declared > 0 {
		c.remove(st, true)
		c.free = append(c.free, st)
		c.running--
		c.settle()
		return nil, malformed
	}
	return st, nil
}

// trailerOf takes what follows a body.
func (c *http2Client) trailerOf(st *http2Stream, ended bool) (*http2Stream, error) {
	switch {
	case st.ended:
		return nil, http2.StreamError{StreamID: st.id, Code: http2.ErrCodeStreamClosed}
	case !ended || c.head.malformed || c.head.tooLarge || c.head.pseudo != 0, st.declared >= 0 && st.received != st.declared:
		return nil, http2.StreamError{StreamID: st.id, Code: http2.ErrCodeProtocol}
	}
	for _, f := range c.head.fields {
		// As with HTTP/1: fields that mean something to a proxy do nothing here.
		switch f.Known {
		case wire.Other, wire.UserAgent:
			st.trailers = append(st.trailers, f)
		case wire.ContentLength, wire.Host:
			return nil, http2.StreamError{StreamID: st.id, Code: http2.ErrCodeProtocol}
		}
	}
	st.ended = true
	if st.ready {
		return st, nil
	}
	st.changed.Broadcast()
	return nil, nil
}

// interpret turns a header into what HTTP/1 has. What it returns is the answer.
func (st *http2Stream) interpret(h *http2Head) *wire.Error {
	q := &st.req
	fields := q.Fields
	q.Reset()
	q.Fields = fields
	q.Method, q.Target, q.Host, q.Minor, q.KeepAlive = bytesOf(h.method), bytesOf(h.path), bytesOf(h.authority), 1, true
	q.Path = q.Target
	if path, _, found := strings.Cut(h.path, "?"); found {
		q.Path = q.Target[:len(path)]
	}
	st.declared = -1
	if h.tooLarge {
		q.Fields = q.Fields[:0]
		return &wire.Error{Status: 431, Reason: "the header is too large"}
	}
	if refused := st.interpretFields(); refused != nil {
		return refused
	}
	switch {
	case h.method == "CONNECT" || h.method == "TRACE":
		return &wire.Error{Status: 405, Reason: h.method + " is not supported"}
	case !wire.CheckHost(q.Host):
		return &wire.Error{Status: 400, Reason: ":authority is no host"}
	case q.Target[0] != '/' && !(h.path == "*" && h.method == "OPTIONS"):
		return &wire.Error{Status: 400, Reason: ":path is no path"}
	}
	return wire.CheckTarget(q.Target)
}

// interpretFields reads the fields that concern the message itself.
func (st *http2Stream) interpretFields() *wire.Error {
	q := &st.req
	cookies := 0
	var refused *wire.Error
	for i := range q.Fields {
		switch f := &q.Fields[i]; f.Known {
		case wire.Host:
			if len(q.Host) == 0 {
				q.Host = f.Value
			} else if !wire.EqualHosts(q.Host, f.Value) {
				refused = &wire.Error{Status: 400, Reason: "host names another one than :authority"}
			}
		case wire.ContentLength:
			n, ok := wire.Decimal(f.Value)
			if !ok || st.declared >= 0 {
				st.declared = -1
				return &wire.Error{Status: 400, Reason: "content-length is no number, or there are several"}
			}
			st.declared = n
		case wire.Expect:
			if !wire.EqualFold(f.Value, "100-continue") {
				refused = &wire.Error{Status: 417, Reason: "only 100-continue can be expected"}
			}
			q.Continue = true
		case wire.TE:
			q.Trailers = true
		case wire.Cookie:
			cookies++
		}
	}
	q.HasLength = st.declared >= 0
	switch {
	case st.ended:
		q.Length = max(st.declared, 0)
	default:
		q.Length = st.declared
	}
	if cookies > 1 {
		q.Fields = joinCookies(q.Fields)
	}
	return refused
}

// joinCookies makes one field of cookies that came in several, which only HTTP/2 has.
func joinCookies(fields []wire.Field) []wire.Field {
	var all []byte
	first := -1
	for i := range fields {
		if fields[i].Known != wire.Cookie {
			continue
		}
		if first < 0 {
			first = i
		} else {
			all = append(all, "; "...)
		}
		all = append(all, fields[i].Value...)
	}
	fields[first].Value = all
	seen := false
	return slices.DeleteFunc(fields, func(f wire.Field) bool {
		if f.Known != wire.Cookie {
			return false
		}
		defer func() { seen = true }()
		return seen
	})
}

// bytesOf is a string's bytes, which nobody may change: the parts of a request are only read.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

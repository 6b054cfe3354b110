package wire

import (
	"bytes"
)

// Request is the head of a request. Its slices are of the buffer that was parsed, and as good as that.
type Request struct {
	Method []byte
	// Target is in origin form (path and query), or * for OPTIONS; Path is it up to the question mark.
	Target, Path []byte
	// Host is the Host field, or the authority of a target in absolute form; it may be empty in HTTP/1.0.
	Host   []byte
	Minor  int // of HTTP/1.x
	Fields []Field
	// Length is that of the body, -1 if it is chunked. HasLength says whether the client gave a length.
	Length    int64
	HasLength bool
	// KeepAlive says whether the client wants to send another request after this one.
	KeepAlive bool
	// Upgrade is what the client wants to speak instead, if it asks for that in a way that may be passed on.
	Upgrade []byte
	// Continue is set if the client waits for 100 before it sends the body, Trailers if it understands trailer fields.
	Continue, Trailers bool

	scan scanner
}

// Preface is how a client begins that speaks HTTP/2 without having asked.
const Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// Reset forgets everything.
func (r *Request) Reset() {
	fields := r.Fields[:0]
	*r = Request{Fields: fields}
}

// Parse reads a head. It returns its length, or 0 if buf holds only a part of it: then it is called again with more. After an error
// nothing that follows in the connection can be believed.
func (r *Request) Parse(buf []byte, limits Limits) (int, *Error) {
	// A client may end its last request with an empty line too many.
	skip := 0
	if bytes.HasPrefix(buf, []byte("\r\n")) {
		skip = 2
	}
	message := buf[skip:]
	switch {
	case len(message) == 0 || skip == 0 && string(message) == "\r":
		return 0, nil
	case !tokenByte[message[0]]:
		return 0, bad("this is no HTTP request")
	}
	n, err := r.scan.find(message)
	switch {
	case err != nil:
		return 0, err
	case n == 0 && len(message) >= limits.Bytes || n > limits.Bytes:
		if first := bytes.IndexByte(message, '\n'); first < 0 || first >= limits.Bytes {
			return 0, &Error{414, "the request line is too long"}
		}
		return 0, &Error{431, "the header is too large"}
	case n == 0:
		return 0, nil
	}
	head := message[:n]
	end := bytes.IndexByte(head, '\r')
	if head[end+1] != '\n' {
		return 0, bad("CR within the request line")
	}
	absolute, err := r.parseLine(head[:end])
	if err != nil {
		return 0, err
	}
	if r.Fields, err = parseFields(head[end+2:], r.Fields[:0], limits.Fields); err != nil {
		return 0, err
	}
	if err := r.interpret(absolute); err != nil {
		return 0, err
	}
	return skip + n, nil
}

// parseLine reads the request line, and returns the authority if the target is in absolute form.
func (r *Request) parseLine(line []byte) (authority []byte, err *Error) {
	space := bytes.IndexByte(line, ' ')
	if space <= 0 || !isToken(line[:space]) {
		return nil, bad("the request line has no method")
	}
	if space > maxMethod {
		return nil, &Error{501, "an unknown method"}
	}
	r.Method = line[:space]
	rest := line[space+1:]
	space = bytes.LastIndexByte(rest, ' ')
	if space <= 0 {
		return nil, bad("the request line has no target or no version")
	}
	target, version := rest[:space], rest[space+1:]
	if len(version) != 8 || !bytes.HasPrefix(version, []byte("HTTP/")) || version[6] != '.' || version[5] < '0' || version[5] > '9' || version[7] < '0' || version[7] > '9' {
		return nil, bad("the request line has no version")
	}
	if version[5] != '1' || version[7] > '1' {
		return nil, &Error{505, "this version of HTTP is not supported here"}
	}
	r.Minor = int(version[7] - '0')
	if err := CheckTarget(target); err != nil {
		return nil, err
	}
	return r.parseTarget(target)
}

// CheckMethod says whether a method is one: a token that is not longer than any registered one.
func CheckMethod(method []byte) bool { return isToken(method) && len(method) <= maxMethod }

// EqualHosts says whether two names of hosts are the same.
func EqualHosts(a, b []byte) bool { return bytes.EqualFold(a, b) }

// CheckTarget refuses characters that no target may have.
func CheckTarget(target []byte) *Error {
	for _, c := range target {
		if !urlByte[c] {
			return bad("the target has a forbidden character")
		}
	}
	return nil
}

func (r *Request) parseTarget(target []byte) (authority []byte, err *Error) {
	switch {
	case string(r.Method) == "CONNECT":
		return nil, &Error{405, "CONNECT is not supported"}
	case string(r.Method) == "TRACE":
		return nil, &Error{405, "TRACE is not supported"}
	case target[0] == '/':
	case len(target) == 1 && target[0] == '*':
		if string(r.Method) != "OPTIONS" {
			return nil, bad("the target * is for OPTIONS")
		}
	default:
		scheme := bytes.Index(target, []byte("://"))
		if scheme < 0 || !EqualFold(target[:scheme], "http") && !EqualFold(target[:scheme], "https") {
			return nil, bad("the target is neither a path nor a URL")
		}
		authority, target = target[scheme+3:], nil
		if end := bytes.IndexAny(authority, "/?"); end >= 0 {
			authority, target = authority[:end], authority[end:]
		}
		if len(authority) == 0 || bytes.IndexByte(authority, '@') >= 0 {
			return nil, bad("the target's authority is no host")
		}
		// Without a path in front, a query alone would be no target for the endpoint.
		switch {
		case len(target) == 0:
			target = []byte("/")
		case target[0] == '?':
			return nil, bad("the target has a query but no path")
		}
	}
	r.Target, r.Path = target, target
	if query := bytes.IndexByte(target, '?'); query >= 0 {
		r.Path = target[:query]
	}
	return authority, nil
}

// interpret reads the fields that concern the message itself.
func (r *Request) interpret(authority []byte) *Error {
	f, err := readFraming(r.Fields)
	if err != nil {
		return err
	}
	if f.chunked && r.Minor == 0 {
		return bad("Transfer-Encoding in HTTP/1.0")
	}
	r.Length, r.HasLength = max(f.length, 0), f.length >= 0
	if f.chunked {
		r.Length = -1
	}
	r.KeepAlive = r.Minor == 1
	hosts, upgrade, asked := 0, []byte(nil), false
	for i := range r.Fields {
		field := &r.Fields[i]
		switch field.Known {
		case Host:
			hosts++
			r.Host = field.Value
		case Connection:
			asked = r.connection(field.Value) || asked
		case Upgrade:
			if upgrade != nil {
				return bad("several Upgrade fields")
			}
			upgrade = field.Value
		case Expect:
			if !EqualFold(field.Value, "100-continue") {
				return &Error{417, "only 100-continue can be expected"}
			}
			r.Continue = r.Minor == 1
		case TE:
			Tokens(field.Value, func(token []byte) { r.Trailers = r.Trailers || EqualFold(token, "trailers") })
		}
	}
	switch {
	case hosts > 1:
		return bad("several Host fields")
	case hosts == 0 && r.Minor == 1:
		return bad("no Host field")
	case hosts == 1 && !CheckHost(r.Host):
		return bad("the Host field is no host")
	case authority != nil && !CheckHost(authority):
		return bad("the target's authority is no host")
	case authority != nil && hosts == 1 && !bytes.EqualFold(authority, r.Host):
		return bad("the target names another host than the Host field")
	case authority != nil:
		r.Host = authority
	}
	// An endpoint that switched to h2c would get bytes that nobody has checked; with a body before the switch it is not clear where that ends.
	if asked && len(upgrade) > 0 && r.Minor == 1 && r.Length == 0 && !namesHTTP2(upgrade) {
		r.Upgrade = upgrade
	}
	return nil
}

func namesHTTP2(upgrade []byte) bool {
	found := false
	Tokens(upgrade, func(token []byte) {
		found = found || EqualFold(token, "h2c") || EqualFold(token, "h2") || bytes.HasPrefix(bytes.ToLower(token), []byte("http/"))
	})
	return found
}

// connection reads a Connection field, and says whether it asks for an upgrade.
func (r *Request) connection(value []byte) (upgrade bool) {
	Tokens(value, func(token []byte) {
		switch {
		case EqualFold(token, "close"):
			r.KeepAlive = false
		case EqualFold(token, "keep-alive"):
			r.KeepAlive = r.KeepAlive || r.Minor == 0
		case EqualFold(token, "upgrade"):
			upgrade = true
		default:
			dropNamed(r.Fields, token)
		}
	})
	// close wins, in whatever order they come.
	Tokens(value, func(token []byte) { r.KeepAlive = r.KeepAlive && !EqualFold(token, "close") })
	return upgrade
}

func dropNamed(fields []Field, name []byte) {
	for i := range fields {
		if bytes.EqualFold(fields[i].Name, name) {
			fields[i].Dropped = true
		}
	}
}

// CheckHost says whether a Host field's value is a name or address, with or without a port.
func CheckHost(host []byte) bool {
	name := host
	if len(host) > 0 && host[0] == '[' {
		end := bytes.IndexByte(host, ']')
		if end < 3 {
			return false
		}
		for _, c := range host[1:end] {
			if c != ':' && c != '.' && (lowerCase[c] < 'a' || lowerCase[c] > 'f') && (c < '0' || c > '9') {
				return false
			}
		}
		if end+1 == len(host) {
			return true
		}
		if host[end+1] != ':' {
			return false
		}
		return port(host[end+2:])
	}
	if colon := bytes.IndexByte(host, ':'); colon >= 0 {
		if !port(host[colon+1:]) {
			return false
		}
		name = host[:colon]
	}
	for _, c := range name {
		if !hostByte[c] {
			return false
		}
	}
	return len(name) > 0 && len(name) <= 255
}

func port(b []byte) bool {
	n, ok := Decimal(b)
	return len(b) == 0 || ok && n <= 65535
}

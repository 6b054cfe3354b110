// Package wire reads HTTP/1 strictly: heads of requests and responses, and bodies. It does no more than turn bytes into what they mean,
// without copying them, and refuses whatever another program might read differently: two programs that disagree about where a request
// ends are how requests are smuggled. It knows nothing of connections beyond an io.Reader, nor of routes and endpoints.
package wire

import (
	"bytes"
	"fmt"
)

// Error is why a message is refused, and the status that says so to a client.
type Error struct {
	Status int
	Reason string
}

func (e *Error) Error() string { return fmt.Sprintf("%d: %s", e.Status, e.Reason) }

func bad(reason string) *Error { return &Error{400, reason} }

// Limits bound what a head may take.
type Limits struct {
	// Bytes is for the first line and all fields.
	Bytes int
	// Fields is how many there may be.
	Fields int
}

// DefaultFields is enough for every browser.
const DefaultFields = 128

// maxMethod is longer than any registered method.
const maxMethod = 32

// Known are the fields that mean something to a proxy.
type Known uint8

// The known fields.
const (
	Other Known = iota
	Host
	ContentLength
	TransferEncoding
	Connection
	KeepAlive
	ProxyConnection
	ProxyAuthorization
	ProxyAuthenticate
	Upgrade
	Expect
	TE
	Trailer
	Cookie
	SetCookie
	UserAgent
	ForwardedFor
	ForwardedProto
	ForwardedPort
	HTTP2Settings
)

var knownNames = map[string]Known{
	"host": Host, "content-length": ContentLength, "transfer-encoding": TransferEncoding, "connection": Connection, "keep-alive": KeepAlive,
	"proxy-connection": ProxyConnection, "proxy-authorization": ProxyAuthorization, "proxy-authenticate": ProxyAuthenticate, "upgrade": Upgrade,
	"expect": Expect, "te": TE, "trailer": Trailer, "cookie": Cookie, "set-cookie": SetCookie, "user-agent": UserAgent,
	"x-forwarded-for": ForwardedFor, "x-forwarded-proto": ForwardedProto, "x-forwarded-port": ForwardedPort, "http2-settings": HTTP2Settings,
}

// longestKnown bounds what is compared.
const longestKnown = len("proxy-authorization")

// Lookup says which field a name is. In names that begin with X an underscore is as good as a hyphen: programs that turn fields into
// variables (CGI, WSGI) don't see the difference.
func Lookup(name []byte) Known {
	if len(name) > longestKnown {
		return Other
	}
	// Most unknown names are ruled out by their first letter.
	switch name[0] | 0x20 {
	case 'h', 'c', 't', 'k', 'p', 'u', 'e', 's', 'x':
	default:
		return Other
	}
	var lower [longestKnown]byte
	for i, c := range name {
		lower[i] = lowerCase[c]
		if c == '_' && lower[0] == 'x' {
			lower[i] = '-'
		}
	}
	return knownNames[string(lower[:len(name)])]
}

// Hop says whether a field is between two neighbours only, and never passed on.
func (k Known) Hop() bool {
	switch k {
	case ContentLength, TransferEncoding, Connection, KeepAlive, ProxyConnection, ProxyAuthorization, ProxyAuthenticate, Upgrade, TE, HTTP2Settings:
		return true
	}
	return false
}

// Field is a header field: both parts are of the buffer that was parsed.
type Field struct {
	Name, Value []byte
	Known       Known
	// Dropped is set if the Connection field names it.
	Dropped bool
}

// Classes of bytes.
var (
	lowerCase [256]byte
	tokenByte [256]bool
	valueByte [256]bool
	urlByte   [256]bool
	hostByte  [256]bool
)

// The tables are filled by a function call at their declaration, since nothing may happen in init functions.
var _ = fill()

func fill() struct{} {
	for i := range 256 {
		c := byte(i)
		lowerCase[c] = c
		if 'A' <= c && c <= 'Z' {
			lowerCase[c] = c + 'a' - 'A'
		}
		letter := 'a' <= lowerCase[c] && lowerCase[c] <= 'z' || '0' <= c && c <= '9'
		tokenByte[c] = letter || bytes.IndexByte([]byte("!#$%&'*+-.^_`|~"), c) >= 0
		valueByte[c] = c == '\t' || c >= ' ' && c != 0x7f
		urlByte[c] = c > ' ' && c < 0x7f && c != '#'
		hostByte[c] = letter || bytes.IndexByte([]byte("-._~!$&'()*+,;=%"), c) >= 0
	}
	return struct{}{}
}

func isToken(b []byte) bool {
	for _, c := range b {
		if !tokenByte[c] {
			return false
		}
	}
	return len(b) > 0
}

// LowerName says whether a field's name is one that HTTP/2 allows: a token without capitals.
func LowerName(name []byte) bool {
	for _, c := range name {
		if !tokenByte[c] || lowerCase[c] != c {
			return false
		}
	}
	return len(name) > 0
}

// ToLower is a name in lower case.
func ToLower(name []byte) string {
	lower := make([]byte, len(name))
	for i, c := range name {
		lower[i] = lowerCase[c]
	}
	return string(lower)
}

// CheckValue says whether a field's value has no forbidden character.
func CheckValue(value []byte) bool {
	for _, c := range value {
		if !valueByte[c] {
			return false
		}
	}
	return true
}

// EqualFold compares with a string in lower case.
func EqualFold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if lowerCase[c] != lower[i] {
			return false
		}
	}
	return true
}

// Tokens calls f with every element of a comma-separated list, without spaces around it.
func Tokens(list []byte, f func(token []byte)) {
	for len(list) > 0 {
		element := list
		if comma := bytes.IndexByte(list, ','); comma >= 0 {
			element, list = list[:comma], list[comma+1:]
		} else {
			list = nil
		}
		if element = trim(element); len(element) > 0 {
			f(element)
		}
	}
}

func trim(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// scanner finds the end of a head in bytes that come bit by bit, and looks at none of them twice.
type scanner struct {
	scanned int // up to here there is no end
	line    int // where the line begins
}

// find returns the length of the head with its empty line, or 0 if it has not come to an end. All line ends before it are CRLF.
func (s *scanner) find(buf []byte) (int, *Error) {
	for {
		at := bytes.IndexByte(buf[s.scanned:], '\n')
		if at < 0 {
			s.scanned = len(buf)
			return 0, nil
		}
		end := s.scanned + at
		if end == s.line || buf[end-1] != '\r' {
			return 0, bad("a line ends without CR")
		}
		empty := end-1 == s.line
		s.scanned, s.line = end+1, end+1
		if empty {
			return end + 1, nil
		}
	}
}

// parseFields reads field lines; block ends with the empty line. Of what the fields mean it checks nothing.
func parseFields(block []byte, fields []Field, most int) ([]Field, *Error) {
	for {
		end := bytes.IndexByte(block, '\r')
		if end < 0 || end+1 >= len(block) || block[end+1] != '\n' {
			return fields, bad("CR within a field")
		}
		line := block[:end]
		block = block[end+2:]
		if len(line) == 0 {
			return fields, nil
		}
		if len(fields) == most {
			return fields, &Error{431, "too many fields"}
		}
		colon := bytes.IndexByte(line, ':')
		if line[0] == ' ' || line[0] == '\t' {
			return fields, bad("a field goes on in the next line")
		}
		if colon <= 0 {
			return fields, bad("a line of the header has no name")
		}
		name := line[:colon]
		if !isToken(name) {
			return fields, bad("a field's name has a forbidden character")
		}
		value := trim(line[colon+1:])
		if !CheckValue(value) {
			return fields, bad("a field's value has a forbidden character")
		}
		fields = append(fields, Field{Name: name, Value: value, Known: Lookup(name)})
	}
}

// framing is what decides where a body ends.
type framing struct {
	length  int64 // -1: not given
	chunked bool
}

// readFraming reads Content-Length and Transfer-Encoding, and refuses everything but one of them, once.
func readFraming(fields []Field) (framing, *Error) {
	f := framing{length: -1}
	coded := false
	for i := range fields {
		switch fields[i].Known {
		case ContentLength:
			if f.length >= 0 {
				return f, bad("several Content-Length fields")
			}
			n, ok := Decimal(fields[i].Value)
			if !ok {
				return f, bad("Content-Length is no number")
			}
			f.length = n
		case TransferEncoding:
			if coded {
				return f, bad("several Transfer-Encoding fields")
			}
			coded = true
			if !EqualFold(fields[i].Value, "chunked") {
				return f, unknownCoding(fields[i].Value)
			}
			f.chunked = true
		}
	}
	if coded && f.length >= 0 {
		return f, bad("Content-Length beside Transfer-Encoding")
	}
	return f, nil
}

// unknownCoding tells codings that exist from attempts to look like chunked to somebody else.
func unknownCoding(value []byte) *Error {
	chunks, others, unknown, last := 0, 0, false, []byte(nil)
	Tokens(value, func(token []byte) {
		last = token
		switch {
		case EqualFold(token, "chunked"):
			chunks++
		case !isToken(token) || EqualFold(token, "identity"):
			unknown = true
		default:
			others++
		}
	})
	if unknown || others == 0 || chunks != 1 || !EqualFold(last, "chunked") {
		return bad("Transfer-Encoding is not chunked")
	}
	return &Error{501, "a transfer coding that is not supported"}
}

// Decimal reads digits, and nothing but digits.
func Decimal(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

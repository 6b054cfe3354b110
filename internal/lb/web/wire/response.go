package wire

import "bytes"

// Response is the head of a response. Its slices are of the buffer that was parsed.
type Response struct {
	Status int
	Reason []byte
	Minor  int
	Fields []Field
	// Length is the body's, by its fields alone: -1 chunked, -2 up to the end of the connection.
	Length int64
	// HasLength is set if there is a Content-Length: it stands also where there is no body, after HEAD and with 304.
	HasLength bool
	// KeepAlive says whether the endpoint takes another request.
	KeepAlive bool
	Upgrade   []byte

	scan scanner
}

// Kinds of Length that are no number.
const (
	Chunked    = -1
	UntilClose = -2
)

// Reset forgets everything.
func (r *Response) Reset() {
	fields := r.Fields[:0]
	*r = Response{Fields: fields}
}

// Parse reads a head, like Request.Parse. Status in an error is 502.
func (r *Response) Parse(buf []byte, limits Limits) (int, *Error) {
	n, err := r.parse(buf, limits)
	if err != nil {
		err = &Error{502, "the endpoint's answer is invalid: " + err.Reason}
	}
	return n, err
}

func (r *Response) parse(buf []byte, limits Limits) (int, *Error) {
	n, err := r.scan.find(buf)
	if err != nil {
		return 0, err
	}
	if n == 0 && len(buf) >= limits.Bytes || n > limits.Bytes {
		return 0, bad("the header is too large")
	}
	const start = "HTTP/1.x 200"
	if len(buf) >= len(start) && !bytes.HasPrefix(buf, []byte("HTTP/1.")) {
		return 0, bad("no HTTP/1 response")
	}
	if n == 0 {
		return 0, nil
	}
	end := bytes.IndexByte(buf[:n], '\r')
	if end < len(start) || buf[end+1] != '\n' {
		return 0, bad("no status line")
	}
	line := buf[:end]
	if line[7] != '0' && line[7] != '1' || line[8] != ' ' {
		return 0, bad("no version")
	}
	r.Minor = int(line[7] - '0')
	status, ok := Decimal(line[9:12])
	if !ok || status < 100 || status > 999 || len(line) > 12 && line[12] != ' ' {
		return 0, bad("no status")
	}
	r.Status = int(status)
	if len(line) > 13 {
		r.Reason = line[13:]
	}
	for _, c := range r.Reason {
		if !valueByte[c] {
			return 0, bad("a forbidden character in the status line")
		}
	}
	if r.Fields, err = parseFields(buf[end+2:n], r.Fields[:0], limits.Fields); err != nil {
		return 0, err
	}
	return n, r.interpret()
}

func (r *Response) interpret() *Error {
	f, err := readFraming(r.Fields)
	if err != nil {
		return err
	}
	switch {
	case f.chunked && r.Minor == 0:
		return bad("Transfer-Encoding in HTTP/1.0")
	case f.chunked:
		r.Length = Chunked
	case f.length >= 0:
		r.Length, r.HasLength = f.length, true
	default:
		r.Length = UntilClose
	}
	r.KeepAlive = r.Minor == 1
	closed := false
	for i := range r.Fields {
		switch field := &r.Fields[i]; field.Known {
		case Connection:
			Tokens(field.Value, func(token []byte) {
				switch {
				case EqualFold(token, "close"):
					closed = true
				case EqualFold(token, "keep-alive"):
					r.KeepAlive = true
				case !EqualFold(token, "upgrade"):
					dropNamed(r.Fields, token)
				}
			})
		case Upgrade:
			r.Upgrade = field.Value
		}
	}
	r.KeepAlive = r.KeepAlive && !closed
	return nil
}

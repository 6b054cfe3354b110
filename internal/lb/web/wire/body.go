package wire

import (
	"bytes"
	"errors"
	"io"
)

// ErrWouldRead is returned instead of waiting.
var ErrWouldRead = errors.New("no more in the buffer")

// Source is what came from a connection and was not used yet.
type Source struct {
	From io.Reader
	// Buf[R:W] is unread.
	Buf  []byte
	R, W int
	// OnRead is called after every read that brought something.
	OnRead func(n int)
}

// Buffered is what came and was not used yet.
func (s *Source) Buffered() []byte { return s.Buf[s.R:s.W] }

// Fill reads once, and makes room first. It fails with io.ErrShortBuffer if the buffer is full.
func (s *Source) Fill() error {
	if s.R == s.W {
		s.R, s.W = 0, 0
	}
	if s.W == len(s.Buf) {
		if s.R == 0 {
			return io.ErrShortBuffer
		}
		s.W = copy(s.Buf, s.Buf[s.R:s.W])
		s.R = 0
	}
	n, err := s.From.Read(s.Buf[s.W:])
	s.W += n
	if n > 0 {
		if s.OnRead != nil {
			s.OnRead(n)
		}
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

// Body reads a message's body piece by piece.
type Body struct {
	src *Source
	// Left is what is to come of a body with a length, or of the present chunk.
	left    int64
	chunked bool
	ends    bool // with the connection
	state   chunkState
	done    bool
	// total is what has come; most bounds it, -1: no bound.
	total, most int64
	limits      Limits
	overhead    int64
	// Trailer are the fields after the last chunk. They are of a buffer of their own.
	Trailer []Field
}

type chunkState uint8

const (
	chunkSize chunkState = iota
	chunkData
	chunkEnd
	chunkTrailer
)

// maxChunkLine bounds the line with a chunk's size, and thereby extensions.
const maxChunkLine = 256

// Reset begins a body. length is a number, Chunked or UntilClose; most bounds it, -1: no bound.
func (b *Body) Reset(src *Source, length, most int64, limits Limits) {
	*b = Body{src: src, most: most, limits: limits}
	switch length {
	case Chunked:
		b.chunked = true
	case UntilClose:
		b.ends = true
	default:
		b.left, b.done = length, length == 0
	}
}

// Done says whether the body has come to its end.
func (b *Body) Done() bool { return b.done }

// Total is what has come of it.
func (b *Body) Total() int64 { return b.total }

// Whole says whether what is left of the body is in the buffer; only bodies with a length are looked at.
func (b *Body) Whole() bool {
	return b.done || !b.chunked && !b.ends && b.left <= int64(b.src.W-b.src.R)
}

// Next returns the next piece, which is good until the next call, or io.EOF after the last. It returns ErrWouldRead instead of waiting
// if wait is not set. A connection that ends too early is io.ErrUnexpectedEOF, a violation an *Error.
func (b *Body) Next(wait bool) ([]byte, error) {
	for {
		if b.done {
			return nil, io.EOF
		}
		if b.chunked && b.state != chunkData {
			more, err := b.chunkLine()
			if err != nil {
				return nil, err
			}
			if !more {
				continue
			}
		} else if b.src.R < b.src.W {
			return b.piece()
		}
		if !wait {
			return nil, ErrWouldRead
		}
		if err := b.src.Fill(); err != nil {
			if b.ends && err == io.EOF {
				b.done = true
				continue
			}
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
}

func (b *Body) piece() ([]byte, error) {
	data := b.src.Buffered()
	if !b.ends && int64(len(data)) > b.left {
		data = data[:b.left]
	}
	b.src.R += len(data)
	b.total += int64(len(data))
	if b.most >= 0 && b.total > b.most {
		return nil, &Error{413, "the body is too large"}
	}
	if !b.ends {
		b.left -= int64(len(data))
		if b.left == 0 {
			if b.chunked {
				b.state = chunkEnd
			} else {
				b.done = true
			}
		}
	}
	return data, nil
}

// chunkLine reads what is between the data of chunks. It returns true if more must be read.
func (b *Body) chunkLine() (bool, error) {
	data := b.src.Buffered()
	switch b.state {
	case chunkEnd:
		if len(data) < 2 {
			if len(data) == 1 && data[0] != '\r' {
				return false, bad("a chunk is longer than its size")
			}
			return true, nil
		}
		if data[0] != '\r' || data[1] != '\n' {
			return false, bad("a chunk is longer than its size")
		}
		b.src.R += 2
		b.state = chunkSize
	case chunkSize:
		end := bytes.IndexByte(data, '\n')
		if end < 0 {
			if len(data) > maxChunkLine {
				return false, bad("the line of a chunk's size is too long")
			}
			return true, nil
		}
		if end > maxChunkLine {
			return false, bad("the line of a chunk's size is too long")
		}
		size, err := parseChunkSize(data[:end])
		if err != nil {
			return false, err
		}
		b.src.R += end + 1
		// Tiny chunks cost more to read than they carry: a client that sends nothing else is stopped.
		b.overhead += int64(end) + 3
		if b.overhead > 64<<10 && b.overhead > 16*(b.total+size) {
			return false, bad("the chunks are too small")
		}
		if b.most >= 0 && b.total+size > b.most {
			return false, &Error{413, "the body is too large"}
		}
		b.left = size
		b.state = chunkData
		if size == 0 {
			b.state = chunkTrailer
		}
	case chunkTrailer:
		return b.trailer(data)
	}
	return false, nil
}

// parseChunkSize reads a chunk's first line without its LF.
func parseChunkSize(line []byte) (int64, *Error) {
	if len(line) == 0 || line[len(line)-1] != '\r' {
		return 0, bad("the line of a chunk's size ends without CR")
	}
	line = line[:len(line)-1]
	var size int64
	digits := 0
	for digits < len(line) {
		c := lowerCase[line[digits]]
		switch {
		case '0' <= c && c <= '9':
			size = size<<4 | int64(c-'0')
		case 'a' <= c && c <= 'f':
			size = size<<4 | int64(c-'a'+10)
		default:
			c = 0
		}
		if c == 0 {
			break
		}
		digits++
		if digits > 15 {
			return 0, bad("a chunk's size is too large")
		}
	}
	if digits == 0 {
		return 0, bad("a chunk's size is no number")
	}
	return size, checkExtensions(line[digits:])
}

// checkExtensions accepts ;name and ;name=value with a token or a quoted string. They are not passed on.
func checkExtensions(rest []byte) *Error {
	err := bad("a chunk's extension is invalid")
	for len(rest) > 0 {
		if rest[0] != ';' {
			return err
		}
		rest = rest[1:]
		n := tokenLength(rest)
		if n == 0 {
			return err
		}
		rest = rest[n:]
		if len(rest) == 0 || rest[0] != '=' {
			continue
		}
		rest = rest[1:]
		if len(rest) > 0 && rest[0] == '"' {
			end := bytes.IndexByte(rest[1:], '"')
			if end < 0 {
				return err
			}
			for _, c := range rest[1 : 1+end] {
				if !valueByte[c] || c == '\\' {
					return err
				}
			}
			rest = rest[end+2:]
			continue
		}
		if n = tokenLength(rest); n == 0 {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

func tokenLength(b []byte) int {
	n := 0
	for n < len(b) && tokenByte[b[n]] {
		n++
	}
	return n
}

func (b *Body) trailer(data []byte) (bool, error) {
	var scan scanner
	n, failed := scan.find(data)
	switch {
	case failed != nil:
		return false, failed
	case n == 0 && len(data) >= min(b.limits.Bytes, len(b.src.Buf)) || n > b.limits.Bytes:
		return false, &Error{431, "the trailer is too large"}
	case n == 0:
		return true, nil
	}
	if n > 2 {
		// The buffer may be used for something else before the trailer is passed on.
		fields, failed := parseFields(bytes.Clone(data[:n]), nil, b.limits.Fields)
		if failed != nil {
			return false, failed
		}
		for _, f := range fields {
			switch f.Known {
			case Other, UserAgent:
				b.Trailer = append(b.Trailer, f)
			case ContentLength, TransferEncoding, Host, Connection:
				return false, bad("a field in the trailer that belongs in the header")
			}
		}
	}
	b.src.R += n
	b.done = true
	return false, nil
}

// AppendChunk appends a chunk.
func AppendChunk(out, data []byte) []byte {
	out = appendHex(out, uint64(len(data)))
	out = append(out, "\r\n"...)
	out = append(out, data...)
	return append(out, "\r\n"...)
}

// AppendLastChunk appends the last chunk and the trailer.
func AppendLastChunk(out []byte, trailer []Field) []byte {
	out = append(out, "0\r\n"...)
	for _, f := range trailer {
		out = AppendField(out, f.Name, f.Value)
	}
	return append(out, "\r\n"...)
}

// AppendField appends a field line.
func AppendField(out, name, value []byte) []byte {
	out = append(out, name...)
	out = append(out, ": "...)
	out = append(out, value...)
	return append(out, "\r\n"...)
}

func appendHex(out []byte, n uint64) []byte {
	const digits = "0123456789abcdef"
	var b [16]byte
	i := len(b)
	for {
		i--
		b[i] = digits[n&15]
		n >>= 4
		if n == 0 {
			return append(out, b[i:]...)
		}
	}
}

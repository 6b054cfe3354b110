package wire

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"portal/internal/lb/web/probes"
)

var limits = Limits{Bytes: 64 << 10, Fields: DefaultFields}

// Bytes that come one by one mean the same as all at once.
func TestPiecewise(t *testing.T) {
	for _, p := range probes.All() {
		if len(p.Send) > 5000 {
			continue
		}
		var whole, parts Request
		n, failed := whole.Parse([]byte(p.Send), limits)
		var m int
		var late *Error
		for end := 1; end <= len(p.Send) && m == 0 && late == nil; end++ {
			m, late = parts.Parse([]byte(p.Send[:end]), limits)
		}
		if n != m || (failed == nil) != (late == nil) {
			t.Errorf("%s: %d %v at once, %d %v byte by byte", p.Name, n, failed, m, late)
		}
		if failed == nil && n > 0 && (whole.Length != parts.Length || string(whole.Target) != string(parts.Target) || len(whole.Fields) != len(parts.Fields)) {
			t.Errorf("%s: %+v at once, %+v byte by byte", p.Name, whole, parts)
		}
	}
}

// read reads a body through a buffer of some size.
func read(t *testing.T, from io.Reader, size int, length, most int64) (string, []Field, error) {
	t.Helper()
	src := &Source{From: from, Buf: make([]byte, size)}
	var b Body
	b.Reset(src, length, most, limits)
	var out bytes.Buffer
	for {
		piece, err := b.Next(true)
		if err == io.EOF {
			return out.String(), b.Trailer, nil
		}
		if err != nil {
			return out.String(), nil, err
		}
		out.Write(piece)
	}
}

func TestBodyThroughSmallBuffers(t *testing.T) {
	text := strings.Repeat("0123456789", 1000)
	var coded []byte
	for i := 0; i < len(text); i += 777 {
		coded = AppendChunk(coded, []byte(text[i:min(i+777, len(text))]))
	}
	coded = AppendLastChunk(coded, []Field{{Name: []byte("A"), Value: []byte("b")}})
	for _, size := range []int{512, 1000, 1 << 16} {
		for name, wrap := range map[string]func(io.Reader) io.Reader{"whole": func(r io.Reader) io.Reader { return r }, "by byte": iotest.OneByteReader, "by half": iotest.HalfReader} {
			got, trailer, err := read(t, wrap(bytes.NewReader(coded)), size, Chunked, -1)
			if got != text || err != nil || len(trailer) != 1 || string(trailer[0].Value) != "b" {
				t.Errorf("chunks, buffer %d, %s: %d bytes, %v, %v", size, name, len(got), trailer, err)
			}
			if got, _, err := read(t, wrap(strings.NewReader(text+"more")), size, int64(len(text)), -1); got != text || err != nil {
				t.Errorf("length, buffer %d, %s: %d bytes, %v", size, name, len(got), err)
			}
			if got, _, err := read(t, wrap(strings.NewReader(text)), size, UntilClose, -1); got != text || err != nil {
				t.Errorf("until close, buffer %d, %s: %d bytes, %v", size, name, len(got), err)
			}
			var refused *Error
			if _, _, err := read(t, wrap(bytes.NewReader(coded)), size, Chunked, 5000); !errors.As(err, &refused) || refused.Status != 413 {
				t.Errorf("too large: %v", err)
			}
			if _, _, err := read(t, wrap(bytes.NewReader(coded[:len(coded)-1])), size, Chunked, -1); err != io.ErrUnexpectedEOF {
				t.Errorf("cut off: %v", err)
			}
		}
	}
}

// What is accepted must be read the same way after it was written anew: that is what the endpoint gets.
func FuzzRequest(f *testing.F) {
	for _, p := range probes.All() {
		if len(p.Send) < 2000 {
			f.Add([]byte(p.Send))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var r Request
		n, failed := r.Parse(data, limits)
		if failed != nil || n == 0 {
			return
		}
		if r.Length < -1 || bytes.ContainsAny(r.Target, " \r\n\x00") || bytes.ContainsAny(r.Method, " \r\n\x00:") || bytes.ContainsAny(r.Host, " \r\n\x00/@") {
			t.Fatalf("accepted %q", data[:n])
		}
		out := append(append(append([]byte(nil), r.Method...), ' '), r.Target...)
		out = append(out, " HTTP/1.1\r\n"...)
		for _, field := range r.Fields {
			if field.Known != Host {
				out = AppendField(out, field.Name, field.Value)
			}
		}
		host := r.Host
		if len(host) == 0 {
			host = []byte("none")
		}
		out = append(AppendField(out, []byte("Host"), host), "\r\n"...)
		var again Request
		m, failed := again.Parse(out, Limits{Bytes: limits.Bytes * 2, Fields: limits.Fields + 1})
		if failed != nil || m != len(out) || again.Length != r.Length || !bytes.Equal(again.Target, r.Target) || !bytes.Equal(again.Method, r.Method) {
			t.Fatalf("%q became %q: %v", data[:n], out, failed)
		}
	})
}

func FuzzResponse(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n"))
	f.Add([]byte("HTTP/1.0 304\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 101 x\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var r Response
		n, failed := r.Parse(data, limits)
		if failed != nil && failed.Status != 502 || n > len(data) {
			t.Fatal(n, failed)
		}
		if n > 0 && (r.Status < 100 || r.Status > 999 || bytes.ContainsAny(r.Reason, "\r\n\x00")) {
			t.Fatalf("accepted %q", data[:n])
		}
	})
}

func FuzzChunks(f *testing.F) {
	f.Add([]byte("3\r\nabc\r\n0\r\n\r\n"))
	f.Add([]byte("3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		whole, trailer, err := read(t, bytes.NewReader(data), 1<<16, Chunked, -1)
		if len(data) > 1<<15 {
			return
		}
		parts, trailer2, err2 := read(t, iotest.OneByteReader(bytes.NewReader(data)), 1<<16, Chunked, -1)
		if whole != parts && err == nil || (err == nil) != (err2 == nil) || len(trailer) != len(trailer2) {
			t.Fatalf("%q: %q %v at once, %q %v byte by byte", data, whole, err, parts, err2)
		}
	})
}

func BenchmarkRequest(b *testing.B) {
	data := []byte("GET /some/path?with=query HTTP/1.1\r\nHost: www.example.com\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\nAccept: text/html,application/xhtml+xml\r\n" +
		"Accept-Language: en\r\nAccept-Encoding: gzip, deflate, br\r\nCookie: session=0123456789abcdef; theme=dark\r\nConnection: keep-alive\r\n\r\n")
	var r Request
	b.ReportAllocs()
	for b.Loop() {
		r.Reset()
		if n, err := r.Parse(data, limits); n == 0 || err != nil {
			b.Fatal(err)
		}
	}
}

package web

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// impatient is a listener that waits for nothing longer than a second.
func impatient(_ *site, l *config.Listener) {
	l.IdleTimeout, l.Limits.HeaderTimeout, l.Limits.RequestTimeout = time.Second, time.Second, time.Second
}

// A request whose body may be right behind its head does not wait for a frame of which only a part has come: that could be for ever.
func TestHTTP2HalfFrame(t *testing.T) {
	t.Parallel()
	s := start(t, pool(named(t, "a")), impatient)
	for name, half := range map[string]func(f *http2.Framer, out *bytes.Buffer){
		"of a header of a frame": func(_ *http2.Framer, out *bytes.Buffer) { out.Write([]byte{0, 0, 5}) },
		"of data": func(f *http2.Framer, out *bytes.Buffer) {
			f.WriteData(1, true, make([]byte, 100))
			out.Truncate(out.Len() - 1)
		},
		"of another request": func(f *http2.Framer, _ *bytes.Buffer) {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: []byte{0x82}})
		},
	} {
		c := s.dial()
		var out, block bytes.Buffer
		f := http2.NewFramer(&out, c)
		enc := hpack.NewEncoder(&block)
		for i, fields := 0, post("/"); i < len(fields); i += 2 {
			enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
		}
		out.WriteString(wire.Preface)
		f.WriteSettings()
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true})
		half(f, &out)
		c.Write(out.Bytes()) // at once, so that it is read at once
		h := &h2raw{t: t, c: c, Framer: f, dec: hpack.NewDecoder(4096, nil)}
		if got := h.answer(1); got != "408" {
			t.Errorf("half %s: %s, want 408", name, got)
		}
		eventually(t, "the connection ends", func() bool { return s.server.Stats("test").HTTP2.Load() == 0 })
		unharmed(t, s)
	}
}

// A client that takes nothing is not waited for either while the endpoint sends interim answers.
func TestInterimAnswersToWhoDoesNotRead(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		defer close(gone)
		readHead(r)
		for range 30 {
			if _, err := io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: "+strings.Repeat("a", 60_000)+"\r\n\r\n"); err != nil {
				return
			}
		}
		r.ReadByte()
	})
	s := start(t, pool(at), impatient)
	// Small segments: with those of loopback, 64 KiB each, the kernel would hold all of it.
	d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096)
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, 536)
		})
	}}
	c, err := d.Dial("tcp", s.address.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	select {
	case <-gone:
	case <-time.After(patience):
		t.Fatal("the endpoint is held")
	}
	eventually(t, "the request ends", func() bool { return s.server.Stats("test").Active.Load() == 0 })
}

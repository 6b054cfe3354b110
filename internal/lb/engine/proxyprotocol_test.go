package engine

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/config"
)

var (
	v4a, v4b = netip.MustParseAddrPort("192.0.2.1:1234"), netip.MustParseAddrPort("198.51.100.2:443")
	v6a, v6b = netip.MustParseAddrPort("[2001:db8::1]:1234"), netip.MustParseAddrPort("[2001:db8::2]:443")
)

func TestProxyHeaderText(t *testing.T) {
	for _, c := range []struct {
		version int
		a, b    netip.AddrPort
		want    string
	}{
		{1, v4a, v4b, "PROXY TCP4 192.0.2.1 198.51.100.2 1234 443\r\n"},
		{1, v6a, v6b, "PROXY TCP6 2001:db8::1 2001:db8::2 1234 443\r\n"},
		{1, v4a, v6b, "PROXY TCP6 ::ffff:192.0.2.1 2001:db8::2 1234 443\r\n"},
		{2, v4a, v4b, "\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\xc0\x00\x02\x01\xc6\x33\x64\x02\x04\xd2\x01\xbb"},
	} {
		if got := string(AppendProxyHeader(nil, c.version, c.a, c.b)); got != c.want {
			t.Errorf("version %d: %q, want %q", c.version, got, c.want)
		}
	}
	for _, version := range []int{1, 2} {
		for _, ends := range [][2]netip.AddrPort{{v4a, v4b}, {v6a, v6b}} {
			text := AppendProxyHeader(nil, version, ends[0], ends[1])
			h, n, err := parseProxyHeader(append(bytes.Clone(text), "rest"...))
			if err != nil || n != len(text) || h == nil || h.source != ends[0] || h.destination != ends[1] {
				t.Errorf("version %d: %+v, %d bytes of %d, %v", version, h, n, len(text), err)
			}
		}
	}
}

func TestParseProxyHeader(t *testing.T) {
	two := func(rest string) string { return string(signature2) + rest }
	none, partial, bad := 0, -1, -2
	for text, want := range map[string]int{
		"GET / HTTP/1.1\r\n":                                 none,
		"P":                                                  partial,
		"PROXY":                                              partial,
		"PROX/":                                              none,
		"PROXYX":                                             none,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r":                   partial,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n":                 32,
		"PROXY UNKNOWN\r\n":                                  15,
		"PROXY UNKNOWN ffff:: ffff:: 1 2\r\nx":               33,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1\r\n":                   bad,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 2 3\r\n":               bad,
		"PROXY TCP4  1.2.3.4 5.6.7.8 1 2\r\n":                bad,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 65536\r\n":             bad,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 -2\r\n":                bad,
		"PROXY TCP4 1.2.3.4 5.6.7.8 01 2\r\n":                bad,
		"PROXY TCP4 1.2.3.04 5.6.7.8 1 2\r\n":                bad,
		"PROXY TCP4 ::1 ::1 1 2\r\n":                         bad,
		"PROXY TCP6 1.2.3.4 5.6.7.8 1 2\r\n":                 bad,
		"PROXY TCP6 fe80::1%eth0 fe80::1 1 2\r\n":            bad,
		"PROXY UDP4 1.2.3.4 5.6.7.8 1 2\r\n":                 bad,
		"PROXY tcp4 1.2.3.4 5.6.7.8 1 2\r\n":                 bad,
		"PROXY \r\n":                                         bad,
		"PROXY " + strings.Repeat("x", 101):                  bad,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\nx":                  partial,
		two(""):                                              partial,
		two("\x20\x00\x00\x00"):                              16,
		two("\x20\x00\x00\x03ab"):                            partial,
		two("\x20\x00\x00\x03abc"):                           19,
		two("\x21\x11\x00\x0b12345678901"):                   bad,
		two("\x21\x11\x00\x0c123456789012"):                  28,
		two("\x21\x11\x00\x0f123456789012\x04\x00\x00"):      31,
		two("\x21\x21\x00\x0c123456789012"):                  bad,
		two("\x21\x00\x00\x00"):                              16,
		two("\x21\x31\x00\x02ab"):                            18,
		two("\x21\x55\x00\x00"):                              bad,
		two("\x11\x11\x00\x0c123456789012"):                  bad,
		two("\x22\x11\x00\x0c123456789012"):                  bad,
		two("\x21\x11\xff\xff" + strings.Repeat("x", 70000)): bad,
	} {
		_, n, err := parseProxyHeader([]byte(text))
		switch {
		case errors.Is(err, errPartial):
			n = partial
		case err != nil:
			n = bad
		}
		if n != want {
			t.Errorf("%.60q: %d (%v), want %d", text, n, err, want)
		}
	}
}

func FuzzParseProxyHeader(f *testing.F) {
	f.Add(AppendProxyHeader(nil, 1, v4a, v4b))
	f.Add(AppendProxyHeader(nil, 2, v6a, v6b))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, n, err := parseProxyHeader(b)
		if n < 0 || n > len(b) || err != nil && (h != nil || n != 0) {
			t.Fatalf("%q: %+v, %d, %v", b, h, n, err)
		}
		if h != nil && (!h.source.IsValid() || !h.destination.IsValid()) {
			t.Fatalf("%q: %+v", b, h)
		}
	})
}

// TestProxyOut: endpoints get the client's address, in either version, before anything else.
func TestProxyOut(t *testing.T) {
	for _, version := range []int{1, 2} {
		at, s := unused(t), serve(t, echo)
		e := newEngine(t, Options{})
		cfg := tcpConfig(at, s.address)
		cfg.Pools["web"].ProxyProtocol = version
		apply(t, e, cfg)
		c := dialTo(t, at)
		want(t, c, string(AppendProxyHeader(nil, version, localOf(c), at)))
		ask(t, c, "hello")
	}
}

// TestProxyIn: a PROXY header from a trusted source sets the client's address; from any other source it is payload.
func TestProxyIn(t *testing.T) {
	trusted := []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
	at, s := unused(t), serve(t, echo)
	records := make(chan *Record, 1)
	e := newEngine(t, Options{Record: func(r *Record) { records <- r }})
	cfg := tcpConfig(at, s.address)
	cfg.Listeners[0].TrustedProxies = trusted
	apply(t, e, cfg)
	for _, header := range []string{"PROXY TCP4 192.0.2.1 198.51.100.2 1234 443\r\n", string(AppendProxyHeader(nil, 2, v4a, v4b))} {
		c := dialTo(t, at)
		// In pieces: a header need not come at once.
		for i := range len(header) {
			_, _ = io.WriteString(c, header[i:i+1])
			if i%7 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		ask(t, c, "hello")
		_ = c.Close()
		if r := <-records; r.Client != v4a || r.Local != v4b {
			t.Errorf("client %v, local %v", r.Client, r.Local)
		}
	}
	// Without one, the connection's own ends count; also if the client waits for the server to speak.
	c := dialTo(t, at)
	ask(t, c, "PROXIMITY")
	_ = c.Close()
	if r := <-records; r.Client != localOf(c) {
		t.Errorf("client %v, want %v", r.Client, localOf(c))
	}
	greeting := serve(t, named("server first"))
	cfg2 := tcpConfig(at, greeting.address)
	cfg2.Listeners[0].TrustedProxies = trusted
	apply(t, e, cfg2)
	c = dialTo(t, at)
	want(t, c, "server first")
	_ = c.Close()
	<-records
	c = dialTo(t, at)
	_, _ = io.WriteString(c, "PROXY TCP9 nonsense\r\n")
	wantEnd(t, c)
	if r := <-records; r.End != endHeader {
		t.Errorf("record %+v", r)
	}
	// From others it is data.
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}
	other, err := d.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	_ = other.SetDeadline(time.Now().Add(patience))
	want(t, other, "server first")
	ask(t, other, "PROXY TCP4 192.0.2.1 198.51.100.2 1234 443\r\n")
	_ = other.Close()
	if r := <-records; r.Client.Addr() != netip.MustParseAddr("127.0.0.9") {
		t.Errorf("client %v: a header was believed", r.Client)
	}
	if config.DefaultHeaderTimeout < quietProxy {
		t.Error("a quiet proxy is waited for longer than for headers")
	}
}

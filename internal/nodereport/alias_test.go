package nodereport

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"testing"
)

// TestAsk: what a server says to an alias and to its own name, without and with TLS.
func TestAsk(t *testing.T) {
	strict := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "db.example.com" {
			w.WriteHeader(http.StatusMisdirectedRequest)
		}
	})
	a := &Alias{Name: "db.example.com", As: "db.shop"}
	at := func(s *httptest.Server) netip.AddrPort {
		t.Cleanup(s.Close)
		return netip.MustParseAddrPort(s.Listener.Addr().String())
	}
	plain := at(httptest.NewServer(strict))
	if got := ask(t.Context(), plain, a); got.Status != 421 || got.TargetStatus != 200 || got.Certified != nil || got.Error != "" {
		t.Errorf("plain: %+v", got)
	}
	encrypted := at(httptest.NewTLSServer(strict)) // its certificate is for example.com
	if got := ask(t.Context(), encrypted, a); got.Certified == nil || got.Status != 421 || got.TargetStatus != 200 {
		t.Errorf("TLS: %+v", got)
	}
	closed := httptest.NewServer(strict)
	to := netip.MustParseAddrPort(closed.Listener.Addr().String())
	closed.Close()
	if got := ask(t.Context(), to, a); got.Error != Refused {
		t.Errorf("closed: %+v", got)
	}
}

// TestAttempts: what is asked for arrives, and what can not be tried is refused by name.
func TestAttempts(t *testing.T) {
	want := Attempts{Dial: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:80"), netip.MustParseAddrPort("[2001:db8::1]:443")}, Alias: "db.example.com", As: "db.shop", Ports: []uint16{80, 443}}
	q := url.Values{}
	want.Encode(q.Add)
	if got, err := readAttempts(q); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for text, field := range map[string]string{"dial=host:80": "dial", "dial=127.0.0.1:10249": "loopback", "dial=[::ffff:169.254.169.254]:80": "link-local", "port=0": "port", "alias=a": "as", "dial=" + strings.Repeat("192.0.2.1:80&dial=", 11): "dial"} {
		q, err := url.ParseQuery(text)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := readAttempts(q); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

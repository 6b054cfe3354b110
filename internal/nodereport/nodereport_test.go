package nodereport

import (
	"context"
	"encoding/json"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"portal/internal/proxy"
)

func TestParse(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:24A0 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0B00010A:0050 0C00010A:D431 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: short
   3: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0 0 0
`
	want := []Socket{{"TCP", netip.MustParseAddr("127.0.0.1"), 9376}, {"TCP", netip.MustParseAddr("::1"), 8080}}
	if got := parse(table, "TCP", "0A"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestReport: the report of a node has the sockets of its Pods; this process stands for one.
func TestReport(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	dir := t.TempDir()
	for uid, pid := range map[string]string{"here": strconv.Itoa(os.Getpid()) + "\n", "gone": "0", "wrong": "x"} {
		if err := os.MkdirAll(filepath.Join(dir, uid), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, uid, "pid"), []byte(pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	source := Source{Node: "n", PodsDir: dir, PIDFile: "pid", Proxy: func() *proxy.Proxy { return nil }, NoProxy: "none was asked for"}
	answer := httptest.NewRecorder()
	source.ServeHTTP(answer, httptest.NewRequest("GET", "/state", nil))
	var got Report
	if err := json.Unmarshal(answer.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Node != "n" || got.Time.IsZero() || got.Proxy != nil || got.ProxyNote == "" || len(got.Listening) != 1 {
		t.Errorf("%+v", got)
	}
	for _, at := range []struct{ protocol, address string }{{"TCP", tcp.Addr().String()}, {"UDP", udp.LocalAddr().String()}} {
		a := netip.MustParseAddrPort(at.address)
		if !slices.Contains(got.Listening["here"], Socket{at.protocol, a.Addr(), a.Port()}) {
			t.Errorf("%s %s is not among %v", at.protocol, at.address, got.Listening["here"])
		}
	}
	for _, wrong := range []string{"service=web", "services=shop/web&services=web", "services=/web"} {
		answer = httptest.NewRecorder()
		source.ServeHTTP(answer, httptest.NewRequest("GET", "/state?"+wrong, nil))
		if answer.Code != 400 {
			t.Errorf("%s: status %d", wrong, answer.Code)
		}
	}
}

// TestSomeServices: load balancers' findings are limited to the Services that a question names.
func TestSomeServices(t *testing.T) {
	source := Source{Node: "n", Proxy: func() *proxy.Proxy { return nil }, Unhealthy: func(context.Context) []Unhealthy {
		return []Unhealthy{{Namespace: "shop", Service: "a"}, {Namespace: "shop", Service: "b"}, {Namespace: "shop", Service: "c"}}
	}}
	for query, want := range map[string]string{"": "abc", "service=shop/b": "b", "services=shop/a&services=shop/c": "ac", "services=other/a": ""} {
		answer := httptest.NewRecorder()
		source.ServeHTTP(answer, httptest.NewRequest("GET", "/state?"+query, nil))
		var report Report
		if err := json.Unmarshal(answer.Body.Bytes(), &report); err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, u := range report.Unhealthy {
			got += u.Service
		}
		if got != want {
			t.Errorf("%q: %q, want %q", query, got, want)
		}
	}
}

package main

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// TestKubeconfigMistakes: the error names the flag or variable, and what is wrong with the file.
func TestKubeconfigMistakes(t *testing.T) {
	garbage, absent := write(t, "garbage", "nonsense"), filepath.Join(t.TempDir(), "absent")
	for _, c := range []struct{ flag, variable, want string }{
		{flag: garbage, want: "--kubeconfig " + garbage + ": it is not a kubeconfig"},
		{flag: absent, want: "--kubeconfig: stat " + absent},
		{variable: absent, want: "KUBECONFIG: stat " + absent},
		{variable: absent + string(filepath.ListSeparator) + absent + "2", want: "KUBECONFIG: stat " + absent},
	} {
		t.Setenv("KUBECONFIG", c.variable)
		t.Setenv("HOME", t.TempDir())
		if _, err := apiConfig(c.flag); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("--kubeconfig %q, KUBECONFIG=%q: %v; want %q", c.flag, c.variable, err, c.want)
		}
	}
}

// TestReachable: a server that answers is reachable, even if it forbids the question; others are named with what is wrong.
func TestReachable(t *testing.T) {
	closed := httptest.NewServer(nil)
	closed.Close()
	for status, want := range map[int]string{
		http.StatusOK: "", http.StatusForbidden: "", http.StatusUnauthorized: "the credentials in the kubeconfig are not accepted", 0: "connection refused: is the server running",
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			if status == http.StatusOK {
				_, _ = io.WriteString(w, `{"kind":"ServiceList","apiVersion":"v1","items":[]}`)
			}
		}))
		defer server.Close()
		if status == 0 {
			server = closed
		}
		err := reachable(t.Context(), &rest.Config{Host: server.URL}, time.Minute)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), server.URL)) {
			t.Errorf("status %d: %v, want %q", status, err, want)
		}
	}
}

// TestHere: a server of this machine is recognized by its address, and nobody is asked about names.
func TestHere(t *testing.T) {
	for host, want := range map[string]bool{"127.0.0.1": true, "::1": true, "127.8.9.10": true, "localhost": true, "192.0.2.1": false, "2001:db8::1": false, "api.example.com": false, "": false} {
		if here(host) != want {
			t.Errorf("here(%q) is %v, want %v", host, !want, want)
		}
		config := &rest.Config{Host: "https://" + net.JoinHostPort(host, "6443")}
		compressUnlessHere(config)
		if config.DisableCompression != want {
			t.Errorf("answers of %s: compression is off: %v, want %v", config.Host, !want, want)
		}
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if prefix := netip.MustParsePrefix(a.String()); !here(prefix.Addr().String()) {
			t.Errorf("%s is an address of this machine", prefix.Addr())
		}
	}
}

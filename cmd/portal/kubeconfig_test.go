package main

import (
	"io"
	"net/http"
	"net/http/httptest"
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

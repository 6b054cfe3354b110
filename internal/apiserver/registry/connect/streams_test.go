package connect

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
)

// TestLogEndsAlone: no bytes come together with the end of a log.
func TestLogEndsAlone(t *testing.T) {
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "6")
		_, _ = io.WriteString(w, "alive\n")
	}))
	defer node.Close()
	location, err := url.Parse(node.URL)
	if err != nil {
		t.Fatal(err)
	}
	stream, _, _, err := (&logStreamer{genericrest.LocationStreamer{Location: location}}).InputStream(t.Context(), "v1", "")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	got := ""
	for {
		buffer := make([]byte, 2048)
		n, err := stream.Read(buffer)
		if err != nil {
			if err != io.EOF || n != 0 || got != "alive\n" {
				t.Errorf("%q, then %d bytes and %v", got, n, err)
			}
			return
		}
		got += string(buffer[:n])
	}
}

package web

import (
	"bytes"
	"io"
	"net/http"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// converse is a handler that answers with as many bytes as the body has: at once, or when all of it has come.
func converse(early bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		control.EnableFullDuplex()
		var whole bytes.Buffer
		if early {
			control.Flush()
		}
		piece := make([]byte, 100)
		for {
			n, err := r.Body.Read(piece)
			whole.Write(piece[:n])
			if early {
				w.Write(piece[:n])
				control.Flush()
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				return
			}
		}
		if !early {
			w.Write(whole.Bytes())
		}
	}
}

// A body must come at a certain rate only until its answer begins, and messages of gRPC at none.
func TestSlowStreams(t *testing.T) {
	const words = 15
	for _, tc := range []struct {
		name, content string
		endpoint      config.Protocol
		early         bool
		status        int
	}{
		{"gRPC both ways", "application/grpc", config.H2C, true, 200},
		{"gRPC from the client", "application/grpc+proto", config.H2C, false, 200},
		{"answer while the body comes", "text/plain", config.HTTP, true, 200},
		{"answer while the body comes, HTTP/2", "text/plain", config.H2C, true, 200},
		{"answer after the body", "text/plain", config.HTTP, false, 408},
		{"answer after the body, HTTP/2", "text/plain", config.H2C, false, 408},
		{"no gRPC", "application/grpc-web", config.H2C, false, 408},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, endpoint(t, tc.endpoint, converse(tc.early)), withTLS, func(_ *site, l *config.Listener) { l.Limits.HeaderTimeout = time.Second })
			body, sent := io.Pipe()
			go func() {
				for range words {
					time.Sleep(200 * time.Millisecond)
					if _, err := io.WriteString(sent, "hello"); err != nil {
						return
					}
				}
				sent.Close()
			}()
			req, _ := http.NewRequest("POST", s.url("/"), body)
			req.Header.Set("Content-Type", tc.content)
			res, err := client(t, true).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			if res.StatusCode != tc.status || err != nil || tc.status == 200 && len(got) != words*len("hello") {
				t.Errorf("%s, %d bytes, %v", res.Status, len(got), err)
			}
		})
	}
}

// Of a call of gRPC that says nothing for the idle time, nothing more is expected.
func TestIdleGRPCStreamEnds(t *testing.T) {
	s := start(t, endpoint(t, config.H2C, converse(false)), withTLS, func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
	body, words := io.Pipe()
	defer words.Close()
	go io.WriteString(words, "hello")
	req, _ := http.NewRequest("POST", s.url("/"), body)
	req.Header.Set("Content-Type", "application/grpc")
	res, err := client(t, true).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if got := res.Header.Get("Grpc-Status"); got != grpcDeadlineExceeded {
		t.Errorf("%s, grpc-status %q", res.Status, got)
	}
}

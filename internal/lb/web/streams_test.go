package web

import (
	"bytes"
	"context"
	"fmt"
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

// blameless sees that nothing was counted against the endpoint when all requests have ended.
func blameless(t *testing.T, s *site) {
	t.Helper()
	eventually(t, "the request ends", func() bool { return s.server.Stats("test").Active.Load() == 0 })
	if n := s.pool("a").Endpoints()[0].Counters.Failures.Load(); n != 0 {
		t.Errorf("%d failures of the endpoint", n)
	}
}

// A body must come at a certain rate only until its answer begins, and messages of gRPC at none. No endpoint is to blame for a slow client.
func TestSlowStreams(t *testing.T) {
	t.Parallel()
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
			blameless(t, s)
		})
	}
}

// An endpoint that does not take the body it is sent is to blame itself.
func TestUnreadBodies(t *testing.T) {
	t.Parallel()
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		t.Run(string(protocol), func(t *testing.T) {
			t.Parallel()
			over := make(chan struct{})
			defer close(over)
			s := start(t, endpoint(t, protocol, func(http.ResponseWriter, *http.Request) { <-over }), withTLS,
				func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
			res, err := client(t, true).Post(s.url("/"), "text/plain", io.LimitReader(zeros{}, 64<<20))
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			eventually(t, "the request ends", func() bool { return s.server.Stats("test").Active.Load() == 0 })
			if n := s.pool("a").Endpoints()[0].Counters.Failures.Load(); res.StatusCode != 504 || n != 1 {
				t.Errorf("%s, %d failures of the endpoint, want 504 and 1", res.Status, n)
			}
		})
	}
}

// zeros reads as zeros without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Of a call of gRPC that says nothing for the idle time, nothing more is expected.
func TestIdleGRPCStreamEnds(t *testing.T) {
	t.Parallel()
	for _, early := range []bool{true, false} {
		s := start(t, endpoint(t, config.H2C, converse(early)), withTLS, func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
		body, sent := io.Pipe()
		defer sent.Close()
		go io.WriteString(sent, "hello")
		req, _ := http.NewRequest("POST", s.url("/"), body)
		req.Header.Set("Content-Type", "application/grpc")
		res, err := client(t, true).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.ReadAll(res.Body)
		if early && err == nil || !early && res.Header.Get("Grpc-Status") != grpcDeadlineExceeded {
			t.Error(early, err, res.Header)
		}
	}
}

// A client may leave in the middle of an answer, for example of events that are rare. Endpoints would be ejected if that counted against them.
func TestClientLeavesDuringResponse(t *testing.T) {
	t.Parallel()
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		for _, two := range []bool{false, true} {
			for _, uploads := range []bool{false, true} {
				t.Run(fmt.Sprintf("endpoint %s, HTTP/2 client %v, body %v", protocol, two, uploads), func(t *testing.T) {
					t.Parallel()
					s := start(t, endpoint(t, protocol, func(w http.ResponseWriter, r *http.Request) {
						control := http.NewResponseController(w)
						control.EnableFullDuplex()
						control.Flush()
						io.Copy(io.Discard, r.Body)
						<-r.Context().Done()
					}), withTLS)
					ctx, leave := context.WithCancel(context.Background())
					defer leave()
					var body io.Reader
					if uploads {
						r, w := io.Pipe()
						defer w.Close()
						go io.WriteString(w, "hello")
						body = r
					}
					req, _ := http.NewRequestWithContext(ctx, "POST", s.url("/"), body)
					res, err := client(t, two).Do(req)
					if err != nil || res.StatusCode != 200 {
						t.Fatal(res, err)
					}
					leave()
					res.Body.Close() // without that, a client of HTTP/2 would go on with its body
					blameless(t, s)
				})
			}
		}
	}
}

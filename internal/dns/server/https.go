package server

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"portal/internal/dns/wire"
)

// httpsListener serves DNS over HTTPS (RFC 8484).
type httpsListener struct {
	s *Server
	l net.Listener
}

func (s *Server) newHTTPS(l net.Listener) *httpsListener { return &httpsListener{s, l} }

func (h *httpsListener) serve(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("/dns-query", h)
	server := &http.Server{Handler: mux, TLSConfig: h.s.opts.TLS.Clone(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	ended := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(ended)
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if server.Shutdown(last) != nil {
			server.Close()
		}
	})
	err := server.ServeTLS(h.l, "", "")
	if errors.Is(err, http.ErrServerClosed) || ctx.Err() != nil {
		<-ended
		return nil
	}
	return err
}

func (h *httpsListener) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	msg, status := readQuery(r)
	if status != http.StatusOK {
		http.Error(w, http.StatusText(status), status)
		return
	}
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		http.Error(w, "", http.StatusInternalServerError)
		return
	}
	wk := h.s.newWorker(protoHTTPS)
	defer h.s.metrics.merge(protoHTTPS, wk.count)
	wk.now = time.Now()
	wk.count.mu.Lock()
	out, v := wk.handle(make([]byte, 0, bigSize), msg, from.Addr().Unmap())
	wk.count.spent(1, time.Since(wk.now))
	wk.count.mu.Unlock()
	if v == later {
		answer := make(chan []byte, 1)
		h.s.resolve(msg, from.Addr().Unmap(), protoHTTPS, func(b []byte) { answer <- b })
		out = <-answer
	}
	if len(out) == 0 {
		http.Error(w, http.StatusText(http.StatusBadRequest), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/dns-message")
	w.Write(out)
}

// readQuery returns the query of a GET or POST request.
func readQuery(r *http.Request) ([]byte, int) {
	switch r.Method {
	case http.MethodGet:
		b, err := base64.RawURLEncoding.DecodeString(r.URL.Query().Get("dns"))
		if err != nil || len(b) < wire.HeaderLen || len(b) > inSize {
			return nil, http.StatusBadRequest
		}
		return b, http.StatusOK
	case http.MethodPost:
		if r.Header.Get("Content-Type") != "application/dns-message" {
			return nil, http.StatusUnsupportedMediaType
		}
		b, err := io.ReadAll(io.LimitReader(r.Body, inSize+1))
		if err != nil || len(b) < wire.HeaderLen || len(b) > inSize {
			return nil, http.StatusBadRequest
		}
		return b, http.StatusOK
	}
	return nil, http.StatusMethodNotAllowed
}

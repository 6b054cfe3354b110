package controllerstest

import (
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// Faults are how often a Proxy misbehaves: each a share of the requests, of 1.
type Faults struct {
	Cut      float64       // the connection is cut before the request arrives
	Lost     float64       // the request is carried out, and the connection is cut before the answer
	Status   float64       // answered with 409, 429, 500 or 503 instead of being carried out
	Slow     float64       // carried out after up to MaxDelay
	MaxDelay time.Duration // how slow is slow
	WatchCut time.Duration // watches are cut after about this time
}

// Proxy stands between clients and an API server, and misbehaves while told to.
type Proxy struct {
	server *httptest.Server
	real   *httputil.ReverseProxy
	faults atomic.Pointer[Faults]
	mu     sync.Mutex
	rand   *rand.Rand

	// Broken counts the requests that were not answered as they should have been.
	Broken atomic.Int64
}

// NewProxy starts a proxy in front of the API server of config. It behaves until told otherwise.
func NewProxy(t testing.TB, config *rest.Config, seed uint64) *Proxy {
	t.Helper()
	target, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{rand: rand.New(rand.NewPCG(seed, seed))}
	p.real = &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     transport,
		FlushInterval: -1,
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) },
	}
	p.faults.Store(&Faults{})
	p.server = httptest.NewUnstartedServer(p)
	p.server.EnableHTTP2 = true
	p.server.Config.ErrorLog = log.New(io.Discard, "", 0) // cut connections are what it is for
	p.server.StartTLS()
	t.Cleanup(func() {
		p.server.CloseClientConnections()
		p.server.Close()
	})
	return p
}

// Config is the way to the API server through the proxy.
func (p *Proxy) Config() *rest.Config {
	return &rest.Config{
		Host: p.server.URL, QPS: -1, WarningHandler: rest.NoWarnings{},
		TLSClientConfig: rest.TLSClientConfig{Insecure: true},
	}
}

// Set makes the proxy misbehave from now on.
func (p *Proxy) Set(f Faults) { p.faults.Store(&f) }

// CutAll cuts every connection there is.
func (p *Proxy) CutAll() { p.server.CloseClientConnections() }

func (p *Proxy) chance() float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rand.Float64()
}

var statuses = []int{http.StatusConflict, http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable}

func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f := p.faults.Load()
	if r.URL.Query().Get("watch") != "" {
		p.serveWatch(w, r, f)
		return
	}
	if p.chance() < f.Slow {
		time.Sleep(time.Duration(p.chance() * float64(f.MaxDelay)))
	}
	dice := p.chance()
	switch {
	case dice < f.Cut:
		p.Broken.Add(1)
		panic(http.ErrAbortHandler)
	case dice < f.Cut+f.Status:
		p.Broken.Add(1)
		answer(w, statuses[int(p.chance()*float64(len(statuses)))])
	case dice < f.Cut+f.Status+f.Lost:
		p.Broken.Add(1)
		p.real.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	default:
		p.real.ServeHTTP(w, r)
	}
}

func (p *Proxy) serveWatch(w http.ResponseWriter, r *http.Request, f *Faults) {
	if f.WatchCut == 0 {
		p.real.ServeHTTP(w, r)
		return
	}
	done := make(chan struct{})
	timer := time.AfterFunc(time.Duration((0.5+p.chance())*float64(f.WatchCut)), func() {
		p.Broken.Add(1)
		close(done)
	})
	defer timer.Stop()
	p.real.ServeHTTP(&cutWriter{w, done}, r)
}

// cutWriter fails once it is cut.
type cutWriter struct {
	http.ResponseWriter
	cut chan struct{}
}

func (w *cutWriter) Write(b []byte) (int, error) {
	select {
	case <-w.cut:
		return 0, io.ErrClosedPipe
	default:
		return w.ResponseWriter.Write(b)
	}
}

func (w *cutWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func answer(w http.ResponseWriter, status int) {
	reason := map[int]string{
		http.StatusConflict: "Conflict", http.StatusTooManyRequests: "TooManyRequests",
		http.StatusInternalServerError: "InternalError", http.StatusServiceUnavailable: "ServiceUnavailable",
	}[status]
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"injected","reason":%q,"code":%d}`, reason, status)
}

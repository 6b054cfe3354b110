package watch

import (
	"context"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"portal/internal/intent"
	"portal/internal/intent/watch/watchtest"
)

// TestOneConnection: all sources begin at the same time, and one handshake does for them all.
func TestOneConnection(t *testing.T) {
	for range 5 {
		api := watchtest.New(1, "one")
		api.Put(service("a", "10.96.0.1"))
		var made atomic.Int32
		server := httptest.NewUnstartedServer(api)
		server.EnableHTTP2 = true
		server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				made.Add(1)
			}
		}
		server.StartTLS()
		sources := []intent.Source{intent.Services, intent.EndpointSlices, intent.Nodes, intent.ServiceCIDRs, intent.Namespaces}
		cluster := intent.NewCluster(sources...)
		w, err := New(cluster, Options{Sources: sources, Config: &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{
			CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		}}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { w.Run(ctx); close(done) }()
		eventually(t, 10*time.Second, "everything is listed", cluster.Complete)
		if n := made.Load(); n != 1 {
			t.Errorf("%d connections were made", n)
		}
		cancel()
		<-done
		server.CloseClientConnections()
		server.Close()
	}
}

// TestDialGate: others wait for the first to have a connection, to give up, or to take too long.
func TestDialGate(t *testing.T) {
	waited := func(d *dialGate, ctx context.Context) <-chan time.Duration {
		out, began := make(chan time.Duration, 1), time.Now()
		go func() {
			d.wait(ctx)
			out <- time.Since(began)
		}()
		return out
	}
	after := func(d time.Duration, f func()) { time.Sleep(d * time.Millisecond); f() }
	for name, c := range map[string]struct {
		meanwhile func(connect, fail, cancel func())
		want      time.Duration
		next      time.Duration // how long whoever comes then waits for another
	}{
		"the first is through":     {func(connect, _, _ func()) { after(5, connect) }, 5 * time.Millisecond, 0},
		"the first has failed":     {func(_, fail, _ func()) { after(6, fail) }, 6 * time.Millisecond, dialWait},
		"the first takes too long": {func(_, _, _ func()) {}, dialWait, dialWait},
		"nobody wants it any more": {func(_, _, cancel func()) { after(7, cancel) }, 7 * time.Millisecond, dialWait},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				d := newDialGate()
				if took := <-waited(d, ctx); took != 0 {
					t.Errorf("where nobody is on the way, somebody waited %v", took)
				}
				fail := d.take()
				connect := httptrace.ContextClientTrace(d.traced(ctx)).GotConn
				d.take()() // who isn't the first opens nothing
				second := waited(d, ctx)
				synctest.Wait()
				c.meanwhile(func() { connect(httptrace.GotConnInfo{}); fail() }, fail, cancel)
				if took := <-second; took != c.want {
					t.Errorf("the second waited %v, expected %v", took, c.want)
				}
				d.take()
				if took := <-waited(d, context.Background()); took != c.next {
					t.Errorf("the next waited %v, expected %v", took, c.next)
				}
			})
		})
	}
}

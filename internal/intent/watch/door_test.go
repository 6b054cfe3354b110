package watch

import (
	"context"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
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

// TestDoor: whoever comes second waits for the first to get through, to give up, or to take too long.
func TestDoor(t *testing.T) {
	passes := func(d *door, ctx context.Context) <-chan time.Duration {
		out, began := make(chan time.Duration, 1), time.Now()
		go func() {
			_, done := d.enter(ctx)
			done()
			out <- time.Since(began)
		}()
		return out
	}
	for name, c := range map[string]struct {
		meanwhile func(done, cancel func())
		want      time.Duration
	}{
		"the first is through":     {func(done, _ func()) { time.Sleep(5 * time.Millisecond); done() }, 5 * time.Millisecond},
		"the first takes too long": {func(func(), func()) {}, doorWait},
		"nobody wants it any more": {func(_, cancel func()) { time.Sleep(7 * time.Millisecond); cancel() }, 7 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				d := newDoor()
				_, done := d.enter(ctx)
				second := passes(d, ctx)
				synctest.Wait()
				c.meanwhile(done, cancel)
				if took := <-second; took != c.want {
					t.Errorf("the second waited %v, expected %v", took, c.want)
				}
				done()
				done()
				if took := <-passes(d, context.Background()); took != 0 {
					t.Errorf("a third waited %v", took)
				}
			})
		})
	}
}

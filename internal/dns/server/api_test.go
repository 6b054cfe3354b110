package server

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/intent/watch/watchtest"
)

func apiService(name, ip string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80}}},
	}
}

// following runs a server that watches an API.
func following(t *testing.T, api *watchtest.Server) string {
	t.Helper()
	config, err := api.Start("")
	if err != nil {
		t.Fatal(err)
	}
	sources := []intent.Source{intent.Services, intent.EndpointSlices, intent.Namespaces}
	cluster := intent.NewCluster(sources...)
	w, err := watch.New(cluster, watch.Options{Config: config, Sources: sources})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { w.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	s, addr := started(t, cluster, Options{})
	for end := time.Now().Add(30 * time.Second); !s.Ready(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not ready after 30 s")
		}
	}
	return addr
}

// until asks for a name until the answer is as wanted, and returns how long it took.
func until(t *testing.T, addr, name, want string, within time.Duration) time.Duration {
	t.Helper()
	began := time.Now()
	for {
		m := ask(t, addr, "udp", name, dns.TypeA)
		got := ""
		if len(m.Answer) > 0 {
			got = m.Answer[0].(*dns.A).A.String()
		}
		if got == want {
			return time.Since(began)
		}
		if time.Since(began) > within {
			t.Fatalf("%s is %q after %v, want %q", name, got, within, want)
		}
		time.Sleep(200 * time.Microsecond)
	}
}

// The API server is killed and comes back with other objects: what is in both never goes, the rest is right within 5 s.
func TestAPIReplaced(t *testing.T) {
	api := watchtest.New(100, "one")
	api.Put(apiService("both", "10.96.0.1"), apiService("old", "10.96.0.2"))
	addr := following(t, api)
	until(t, addr, "old.default.svc.cluster.local.", "10.96.0.2", 5*time.Second)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if m := ask(t, addr, "udp", "both.default.svc.cluster.local.", dns.TypeA); len(m.Answer) != 1 {
				t.Errorf("after %d answers: %v", n, m)
				return
			}
		}
	})
	api.Kill()
	time.Sleep(300 * time.Millisecond)
	other := watchtest.New(500, "two")
	other.Put(apiService("both", "10.96.0.1"), apiService("new", "10.96.0.3"))
	if _, err := other.Start(api.Addr()); err != nil {
		t.Fatal(err)
	}
	defer other.Kill()
	until(t, addr, "new.default.svc.cluster.local.", "10.96.0.3", 5*time.Second)
	until(t, addr, "old.default.svc.cluster.local.", "", 5*time.Second)
	// A watch that is lost and resumed.
	other.Kill()
	other.Put(apiService("new", "10.96.0.4"))
	other.Forget()
	if _, err := other.Start(api.Addr()); err != nil {
		t.Fatal(err)
	}
	until(t, addr, "new.default.svc.cluster.local.", "10.96.0.4", 5*time.Second)
	close(stop)
	wg.Wait()
}

// TestChangesAmongMany: each of many changes to 10,000 Services, 20 a second, is in the answers soon. How soon is measured by
// the benchmark, beside CoreDNS.
func TestChangesAmongMany(t *testing.T) {
	api := watchtest.New(1, "one")
	for i := range 10000 {
		api.Put(apiService(fmt.Sprintf("s%05d", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255)))
	}
	addr := following(t, api)
	defer api.Kill()
	for i := range 50 {
		name, ip := fmt.Sprintf("s%05d", (i*199)%10000), fmt.Sprintf("10.97.0.%d", i+1)
		tick := time.After(50 * time.Millisecond)
		api.Put(apiService(name, ip))
		until(t, addr, name+".default.svc.cluster.local.", ip, 5*time.Second)
		<-tick
	}
}

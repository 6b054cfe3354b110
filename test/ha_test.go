package test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// resumeWithin is how long writes may stand still when a part is lost.
const resumeWithin = 10 * time.Second

// advertised is an address that nobody has: the servers are told apart by their ports.
const advertised = "192.0.2.1"

// TestHighAvailability loses an etcd leader, gets it back, and loses a server, while clients write and watch.
func TestHighAvailability(t *testing.T) {
	need(t, harness.Portal(), "build")
	cluster := startEtcd(t, 3)
	pair := startPair(t, cluster)
	servers := []kubernetes.Interface{plain(t, pair[0].api.Kubeconfig), plain(t, pair[1].api.Kubeconfig)}
	makeNamespace(t, servers[0])
	expectEndpoints(t, servers[0], 10*time.Second, pair[0].port, pair[1].port)

	ctx, stop := context.WithCancel(context.Background())
	var group sync.WaitGroup
	defer func() { stop(); group.Wait() }()
	watchers := []*watcher{newWatcher("first watcher", watching(t, pair[0], pair[1])...), newWatcher("second watcher", watching(t, pair[1], pair[0])...)}
	for _, w := range watchers {
		w.begin(t)
		group.Go(func() { w.run(ctx) })
	}
	book := newLedger()
	loading, stopLoad := context.WithCancel(ctx)
	var loaded sync.WaitGroup
	loaded.Go(func() { load(loading, clients(book, servers)) })

	time.Sleep(2 * time.Second)
	leader := leaderOf(t, cluster)
	t.Logf("killing %s, the leader of etcd", leader.Name)
	during(t, book, 5*time.Second, leader.Kill)
	t.Log("starting it again")
	during(t, book, 2*time.Second, func() {
		if err := leader.Start(); err != nil {
			t.Fatal(err)
		}
		if err := leader.WaitHealthy(20 * time.Second); err != nil {
			t.Fatal(err)
		}
	})
	t.Log("killing the first server")
	during(t, book, 4*time.Second, pair[0].api.Kill)
	stopLoad()
	loaded.Wait()

	stored, err := servers[1].CoreV1().Services(loadNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range watchers {
		w.check(t, book.history)
	}
	if watchers[0].sessions < 2 {
		t.Error("the first watcher never changed servers: it proves nothing")
	}
	book.check(t, stored.Items)
	checkClaims(t, servers[1], dialEtcd(t, cluster[0].ClientURL, cluster[1].ClientURL, cluster[2].ClientURL))
	book.demand(t, "create acknowledged", "update acknowledged", "delete acknowledged")

	// What others know of the servers follows them: a dead one is dropped, one that is back is there again, and one
	// that ends in order is gone before it stops answering.
	expectEndpoints(t, servers[1], 15*time.Second, pair[1].port)
	pair[0].start(t, cluster)
	expectEndpoints(t, servers[1], 5*time.Second, pair[0].port, pair[1].port)
	if err := pair[1].api.Stop(10 * time.Second); err != nil {
		t.Errorf("a server that is asked to end: %v", err)
	}
	expectEndpoints(t, plain(t, pair[0].api.Kubeconfig), 2*time.Second, pair[0].port)
}

// during does something to the system and waits, under load; writes must have gone on.
func during(t *testing.T, book *ledger, wait time.Duration, do func()) {
	t.Helper()
	since := time.Now()
	do()
	time.Sleep(wait)
	silence := book.longestSilence(since)
	t.Logf("writes stood still for %s at most", silence.Round(time.Millisecond))
	if silence > resumeWithin {
		t.Errorf("writes stood still for %s", silence)
	}
	if silence >= wait {
		t.Errorf("no write was acknowledged in the %s after it", wait)
	}
}

// member is one of several servers.
type member struct {
	dir  string
	port int
	api  *harness.API
}

// startPair starts two servers on one etcd cluster, which trust each other's clients.
func startPair(t *testing.T, cluster []*harness.Etcd) []*member {
	t.Helper()
	pair := []*member{{dir: t.TempDir(), port: harness.FreePort()}, {dir: t.TempDir(), port: harness.FreePort()}}
	pair[0].start(t, cluster)
	copyAuthority(t, filepath.Join(pair[0].dir, "data"), filepath.Join(pair[1].dir, "data"))
	pair[1].start(t, cluster)
	for _, m := range pair {
		t.Cleanup(func() { m.api.Kill() })
	}
	return pair
}

func (m *member) start(t *testing.T, cluster []*harness.Etcd) {
	t.Helper()
	args := []string{"--controllers", "none", "--service-node-port-range", nodePortRange, "--advertise-address", advertised}
	for _, e := range cluster {
		args = append(args, "--etcd-servers", e.ClientURL)
	}
	var err error
	if m.api, err = harness.StartPortalAt(m.dir, m.port, args...); err != nil {
		t.Fatal(err)
	}
}

// watching are clients without a time limit, which would end watches too.
func watching(t *testing.T, members ...*member) (out []kubernetes.Interface) {
	for _, m := range members {
		out = append(out, connect(t, m.api.Kubeconfig))
	}
	return out
}

// clients make the load; each turns to the other server when it gets no answer.
func clients(book *ledger, servers []kubernetes.Interface) (out []*worker) {
	seed := rand.Uint64()
	for i := range 6 {
		var at atomic.Int32
		at.Store(int32(i))
		out = append(out, &worker{
			id: i, random: rand.New(rand.NewPCG(seed, uint64(i))), ledger: book,
			server: func() kubernetes.Interface { return servers[int(at.Load())%len(servers)] },
			trouble: func(_ string, err error) {
				at.Add(1)
				// Both may be at a loss while etcd elects; names need not be used up in the meantime.
				if refusal := (*net.OpError)(nil); !errors.As(err, &refusal) {
					time.Sleep(100 * time.Millisecond)
				}
			},
		})
	}
	return out
}

func leaderOf(t *testing.T, cluster []*harness.Etcd) *harness.Etcd {
	t.Helper()
	for _, e := range cluster {
		status, err := dialEtcd(t, e.ClientURL).Status(context.Background(), e.ClientURL)
		if err != nil {
			t.Fatal(err)
		}
		if status.Leader == status.Header.MemberId {
			return e
		}
	}
	t.Fatal("the etcd cluster has no leader")
	return nil
}

// expectEndpoints waits until the kubernetes Service's Endpoints and EndpointSlices are the servers with these ports.
func expectEndpoints(t *testing.T, client kubernetes.Interface, limit time.Duration, ports ...int) {
	t.Helper()
	slices.Sort(ports)
	want := fmt.Sprint(ports)
	var endpoints, inSlices string
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		endpoints, inSlices = endpointPorts(client), slicePorts(client)
		if endpoints == want && inSlices == want {
			return
		}
	}
	t.Errorf("default/kubernetes after %s: want ports %s, Endpoints have %s, EndpointSlices have %s", limit, want, endpoints, inSlices)
}

func endpointPorts(client kubernetes.Interface) string {
	object, err := client.CoreV1().Endpoints(metav1.NamespaceDefault).Get(context.Background(), "kubernetes", metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	var out []int
	for _, subset := range object.Subsets {
		for range subset.Addresses {
			out = append(out, int(subset.Ports[0].Port))
		}
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}

func slicePorts(client kubernetes.Interface) string {
	list, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(context.Background(),
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kubernetes"})
	if err != nil {
		return err.Error()
	}
	var out []int
	for _, slice := range list.Items {
		for range slice.Endpoints {
			out = append(out, int(*slice.Ports[0].Port))
		}
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}

package test

import (
	"context"
	"flag"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

var (
	crashRounds = flag.Int("crash.rounds", 6, "how often the server is killed: half of it with an etcd in the process, half with one outside")
	crashSeed   = flag.Uint64("crash.seed", 0, "makes the load of an earlier run again (0: a new one)")
)

// TestCrash kills the server in the middle of writes, again and again, and looks each time it is back: nothing that was
// acknowledged is lost, and the claims are those of the Services.
func TestCrash(t *testing.T) {
	seed := *crashSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-crash.seed %d", seed)
	half := *crashRounds / 2
	t.Run("embedded", func(t *testing.T) {
		crash(t, &victim{dir: t.TempDir(), port: harness.FreePort()}, seed, *crashRounds-half)
	})
	t.Run("external", func(t *testing.T) {
		etcd := startEtcd(t, 1)[0]
		crash(t, &victim{dir: t.TempDir(), port: harness.FreePort(), etcd: etcd}, seed+1, half)
	})
}

// victim is a server that comes back on the same data and port.
type victim struct {
	dir  string
	port int
	etcd *harness.Etcd
	api  *harness.API
}

func (v *victim) args() []string {
	args := []string{"--controllers", "none", "--service-node-port-range", nodePortRange}
	if v.etcd != nil {
		args = append(args, "--etcd-servers", v.etcd.ClientURL)
	}
	return args
}

func (v *victim) start(t *testing.T) {
	t.Helper()
	var err error
	if v.api, err = harness.StartPortalAt(v.dir, v.port, v.args()...); err != nil {
		t.Fatal(err)
	}
}

// stumble is a start that does not get far.
func (v *victim) stumble(t *testing.T, after time.Duration) {
	t.Helper()
	listen := []string{"server", "--data-dir", filepath.Join(v.dir, "data"), "--listen", v.api.URL[len("https://"):]}
	p, err := harness.Start(v.dir, "portal", harness.Portal(), append(listen, v.args()...)...)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(after)
	p.Kill()
}

// kill ends the server, and its etcd with it if asked, without warning.
func (v *victim) kill(t *testing.T, etcdToo bool) {
	t.Helper()
	var group sync.WaitGroup
	if etcdToo {
		group.Go(v.etcd.Kill)
	}
	group.Go(v.api.Kill)
	group.Wait()
	if etcdToo {
		if err := v.etcd.Start(); err != nil {
			t.Fatal(err)
		}
		if err := v.etcd.WaitHealthy(10 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
}

func crash(t *testing.T, v *victim, seed uint64, rounds int) {
	if rounds == 0 {
		t.Skip("-crash.rounds leaves none for this")
	}
	need(t, harness.Portal(), "build")
	random := rand.New(rand.NewPCG(seed, 0))
	book := newLedger()
	v.start(t)
	defer func() { v.api.Kill() }()
	var etcd *clientv3.Client
	if v.etcd != nil {
		etcd = dialEtcd(t, v.etcd.ClientURL)
	}
	makeNamespace(t, plain(t, v.api.Kubeconfig))

	var workers []*worker
	var client atomic.Pointer[kubernetes.Clientset]
	var dying atomic.Bool
	var stopLoad atomic.Pointer[context.CancelFunc]
	for i := range 8 {
		workers = append(workers, &worker{
			id: i, random: rand.New(rand.NewPCG(seed, uint64(i+1))), ledger: book,
			server: func() kubernetes.Interface { return client.Load() },
			trouble: func(what string, err error) {
				if !dying.Load() {
					t.Errorf("%s: no answer from a server that nobody had killed: %v", what, err)
				}
				(*stopLoad.Load())()
			},
		})
	}
	for round := range rounds {
		client.Store(plain(t, v.api.Kubeconfig))
		dying.Store(false)
		ctx, stop := context.WithCancel(context.Background())
		stopLoad.Store(&stop)
		ended := make(chan struct{})
		go func() { defer close(ended); load(ctx, workers) }()
		time.Sleep(time.Duration(200+random.IntN(700)) * time.Millisecond)
		dying.Store(true)
		v.kill(t, v.etcd != nil && random.IntN(2) == 0)
		stop()
		<-ended
		if random.IntN(4) == 0 {
			v.stumble(t, time.Duration(random.IntN(800))*time.Millisecond)
		}
		v.start(t)
		back := plain(t, v.api.Kubeconfig)
		stored, err := back.CoreV1().Services(loadNamespace).List(context.Background(), metav1.ListOptions{})
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		book.check(t, stored.Items)
		checkClaims(t, back, etcd)
		if out, err := harness.Run(context.Background(), nil, harness.Portal(), "audit", "--kubeconfig", v.api.Kubeconfig); err != nil {
			t.Errorf("portal audit: %v\n%s", err, out)
		}
		if t.Failed() {
			t.Fatalf("round %d of seed %d", round, seed)
		}
	}
	book.demand(t, "create acknowledged", "create by apply acknowledged", "update acknowledged", "patch acknowledged", "delete acknowledged")
}

func dialEtcd(t testing.TB, urls ...string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: urls, DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func makeNamespace(t testing.TB, client kubernetes.Interface) {
	t.Helper()
	_, err := client.CoreV1().Namespaces().Create(context.Background(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: loadNamespace}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
}

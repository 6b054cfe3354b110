package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"portal/internal/lb/pool"
	"portal/internal/lb/spec"
)

// cluster is an API whose Services controllers see when the test says so.
type cluster struct {
	t        *testing.T
	client   *fake.Clientset
	services cache.Indexer
	pools    pool.Set
	poolsErr error
	log      bytes.Buffer
	made     int
}

func newCluster(t *testing.T, flags ...string) *cluster {
	t.Helper()
	c := &cluster{t: t, client: fake.NewClientset(), services: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)}
	for _, f := range flags {
		p, err := pool.ParseFlag(f)
		if err != nil {
			t.Fatal(err)
		}
		c.pools = append(c.pools, p)
	}
	// The fake has no revisions of its own.
	revision := 0
	c.client.PrependReactor("*", "configmaps", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a, ok := a.(clienttesting.CreateAction); ok { // an update is one too
			revision++
			a.GetObject().(*corev1.ConfigMap).ResourceVersion = strconv.Itoa(revision)
		}
		return false, nil, nil
	})
	return c
}

// controller is one that leads, for a class.
func (c *cluster) controller(class string, unclassed bool) *Controller {
	out := New(Options{
		Client: c.client, Namespace: "kube-system", Class: class, Unclassed: unclassed,
		Services:   corelisters.NewServiceLister(c.services),
		Namespaces: corelisters.NewNamespaceLister(cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)),
		Pools:      func() (pool.Set, error) { return c.pools, c.poolsErr },
		Events:     &record.FakeRecorder{}, Log: slog.New(slog.NewTextHandler(&c.log, nil)),
	})
	out.recorded = map[string]map[string]bool{}
	return out
}

// add makes a Service, each a second after the one before.
func (c *cluster) add(key string, change ...func(*corev1.Service)) {
	c.t.Helper()
	namespace, name, _ := strings.Cut(key, "/")
	c.made++
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(key), CreationTimestamp: metav1.Unix(int64(c.made), 0)},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
	for _, f := range change {
		f(svc)
	}
	if _, err := c.client.CoreV1().Services(namespace).Create(c.t.Context(), svc, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) get(key string) *corev1.Service {
	c.t.Helper()
	namespace, name, _ := strings.Cut(key, "/")
	svc, err := c.client.CoreV1().Services(namespace).Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return svc
}

func (c *cluster) change(key string, change func(*corev1.Service)) {
	c.t.Helper()
	svc := c.get(key)
	change(svc)
	if _, err := c.client.CoreV1().Services(svc.Namespace).Update(c.t.Context(), svc, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// sync shows controllers the Services as they are.
func (c *cluster) sync() {
	c.t.Helper()
	list, err := c.client.CoreV1().Services("").List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	var all []any
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}
	if err := c.services.Replace(all, ""); err != nil {
		c.t.Fatal(err)
	}
}

// pass has each controller make one pass, seeing what those before it wrote.
func (c *cluster) pass(all ...*Controller) {
	c.t.Helper()
	for _, x := range all {
		c.sync()
		if err := x.pass(c.t.Context()); err != nil {
			c.t.Fatal(err)
		}
	}
	c.sync()
}

// want compares the addresses of a Service's status.
func (c *cluster) want(key, addresses string) {
	c.t.Helper()
	if got := fmt.Sprint(published(c.get(key))); got != addresses {
		c.t.Errorf("Service %s has %s, want %s", key, got, addresses)
	}
}

// claims are written like 192.0.2.1=a/b,a/c.
func (c *cluster) claims() string {
	c.t.Helper()
	object, err := c.client.CoreV1().ConfigMaps("kube-system").Get(c.t.Context(), ClaimsName, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	table, err := pool.Read([]byte(object.Data[ClaimsKey]))
	if err != nil {
		c.t.Fatal(err)
	}
	var out []string
	for _, claim := range table.Claims() {
		var owners []string
		for _, o := range claim.Owners {
			owners = append(owners, o.String())
		}
		out = append(out, claim.Address.String()+"="+strings.Join(owners, ","))
	}
	return strings.Join(out, " ")
}

func share(key string, port int32) func(*corev1.Service) {
	return func(svc *corev1.Service) {
		svc.Annotations = map[string]string{spec.ShareAnnotation: key}
		svc.Spec.Ports[0].Port = port
	}
}

// TestUnknownPools: a leader that does not know the pools takes no address from anybody, says so once, and goes on when it knows them.
func TestUnknownPools(t *testing.T) {
	c := newCluster(t, "192.0.2.1-192.0.2.9")
	c.add("a/web")
	c.pass(c.controller(DefaultClass, true))
	c.want("a/web", "[192.0.2.1]")
	claims := c.claims()

	c.add("a/new")
	c.sync()
	known := c.pools
	c.pools, c.poolsErr = nil, errors.New("a slip of the pen")
	next := c.controller(DefaultClass, true)
	for range 2 {
		if err := next.pass(t.Context()); !errors.Is(err, errNoPools) || !strings.Contains(err.Error(), "slip of the pen") {
			t.Errorf("a pass without pools: %v", err)
		}
	}
	c.want("a/web", "[192.0.2.1]")
	if svc := c.get("a/web"); len(svc.Finalizers) != 1 {
		t.Errorf("finalizers %v", svc.Finalizers)
	}
	if got := c.claims(); got != claims {
		t.Errorf("claims were %s, are %s", claims, got)
	}
	c.pools, c.poolsErr = known, nil
	c.pass(next)
	c.want("a/web", "[192.0.2.1]")
	c.want("a/new", "[192.0.2.2]")
}

// TestUnknownPoolsLog: however often it is asked to, a controller without pools says once that it waits for them.
func TestUnknownPoolsLog(t *testing.T) {
	c := newCluster(t)
	asked := make(chan struct{})
	x := c.controller(DefaultClass, true)
	x.Pools = func() (pool.Set, error) {
		asked <- struct{}{}
		return nil, errors.New("a slip of the pen")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		x.Run(ctx)
	}()
	for range 3 {
		select {
		case <-asked:
		case <-time.After(time.Minute):
			t.Error("no pass")
		}
		x.Changed()
	}
	cancel()
	for running := true; running; {
		select {
		case <-asked:
		case <-ended:
			running = false
		}
	}
	if n := strings.Count(c.log.String(), "slip of the pen"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, c.log.String())
	}
	if s := x.Stats(); s.Failures != 1 {
		t.Errorf("%d failures", s.Failures)
	}
}

// TestClaimsDeleted: claims that were deleted are made again as they were, though nothing else has changed.
func TestClaimsDeleted(t *testing.T) {
	c := newCluster(t, "192.0.2.1-192.0.2.9")
	x := c.controller(DefaultClass, true)
	c.add("a/gone")
	c.add("a/one", share("key", 80))
	c.add("a/two", share("key", 81))
	c.pass(x)
	if err := c.client.CoreV1().Services("a").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.pass(x)
	const want = "192.0.2.2=a/one,a/two"
	if got := c.claims(); got != want {
		t.Fatalf("claims %s, want %s", got, want)
	}
	if err := c.client.CoreV1().ConfigMaps("kube-system").Delete(t.Context(), ClaimsName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	x.ClaimsSeen("")
	select {
	case <-x.dirty:
	default:
		t.Error("no pass is due")
	}
	c.pass(x)
	if got := c.claims(); got != want {
		t.Errorf("claims %s, want %s", got, want)
	}
	c.want("a/one", "[192.0.2.2]")
	// What it wrote itself is no news.
	x.ClaimsSeen(x.revision)
	select {
	case <-x.dirty:
		t.Error("a pass is due after its own write")
	default:
	}
}

// TestClasses: controllers of two classes serve their own Services, and leave those of the other alone.
func TestClasses(t *testing.T) {
	c := newCluster(t, "192.0.2.1-192.0.2.9")
	class := func(name string) func(*corev1.Service) {
		return func(svc *corev1.Service) { svc.Spec.LoadBalancerClass = &name }
	}
	x, y := c.controller(DefaultClass, true), c.controller("example.com/y", true)
	passes := func() {
		t.Helper()
		for range 2 {
			c.pass(x)
			y.ClaimsSeen(x.revision)
			c.pass(y)
			x.ClaimsSeen(y.revision)
		}
	}
	c.add("a/none") // both serve it: who comes first
	c.add("a/x", class(DefaultClass))
	c.add("a/y", class("example.com/y"))
	passes()
	check := func() {
		t.Helper()
		c.want("a/none", "[192.0.2.1]")
		c.want("a/x", "[192.0.2.2]")
		c.want("a/y", "[192.0.2.3]")
		if got := c.claims(); got != "192.0.2.1=a/none 192.0.2.2=a/x 192.0.2.3=a/y" {
			t.Errorf("claims %s", got)
		}
	}
	check()
	written := x.revision
	passes()
	check()
	if x.revision != written || y.revision != written {
		t.Errorf("claims of revision %s were written again: %s, %s", written, x.revision, y.revision)
	}
	// A Service that is no balancer's any more loses its address by the class that gave it.
	cluster := func(svc *corev1.Service) {
		svc.Spec.Type, svc.Spec.LoadBalancerClass = corev1.ServiceTypeClusterIP, nil
	}
	c.change("a/y", cluster)
	c.pass(x, x)
	c.want("a/y", "[192.0.2.3]")
	passes()
	c.want("a/y", "[]")
	// And one that changes its class keeps the address until that is withdrawn.
	c.change("a/x", class("example.com/y"))
	c.pass(y)
	c.want("a/x", "[192.0.2.2]")
	passes()
	c.want("a/x", "[192.0.2.2]")
	if got := c.claims(); got != "192.0.2.1=a/none 192.0.2.2=a/x" {
		t.Errorf("claims %s", got)
	}
	if owner := y.claims.Owners()["a/x"]; owner.Class != "example.com/y" {
		t.Errorf("%+v", owner)
	}
	// Whoever sees that a Service is gone frees its address.
	if err := c.client.CoreV1().Services("a").Delete(t.Context(), "x", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	x.ClaimsSeen(y.revision)
	c.pass(x)
	if got := c.claims(); got != "192.0.2.1=a/none" {
		t.Errorf("claims %s", got)
	}
}

// TestSharing: Services of one namespace share an address. One that comes into conflict with another leaves, and the other stays, whichever is
// older, and while the status of the one that leaves is still to be seen.
func TestSharing(t *testing.T) {
	for name, change := range map[string]func(*corev1.Service){
		"port": share("key", 81), "key": share("new", 80), "no key": func(svc *corev1.Service) { svc.Annotations = nil },
	} {
		for _, who := range []string{"a/one", "a/two"} {
			c := newCluster(t, "192.0.2.1-192.0.2.9")
			x := c.controller(DefaultClass, true)
			c.add("a/one", share("key", 80))
			c.add("a/two", share("key", 81))
			c.add("b/thief", share("key", 82))
			c.pass(x)
			c.want("a/one", "[192.0.2.1]")
			c.want("a/two", "[192.0.2.1]")
			c.want("b/thief", "[192.0.2.2]")

			other := "a/two"
			if who == other {
				other = "a/one"
				if name == "port" {
					change = share("key", 80)
				}
			}
			c.change(who, change)
			c.sync()
			stale := c.services.List()
			for range 2 {
				// The second time, the controller does not see yet what it has written.
				if err := c.services.Replace(stale, ""); err != nil {
					t.Fatal(err)
				}
				if err := x.pass(t.Context()); err != nil {
					t.Fatal(err)
				}
				c.want(other, "[192.0.2.1]")
				if got := c.claims(); got != "192.0.2.1=a/one,a/two 192.0.2.2=b/thief 192.0.2.3="+who {
					t.Errorf("%s of %s: claims %s", name, who, got)
				}
			}
			c.pass(x)
			c.want(who, "[192.0.2.3]")
			c.want(other, "[192.0.2.1]")
			if got := c.claims(); got != "192.0.2.1="+other+" 192.0.2.2=b/thief 192.0.2.3="+who {
				t.Errorf("%s of %s: claims %s", name, who, got)
			}
		}
	}
}

// TestConflicts: a conflict is no failure, and hides none.
func TestConflicts(t *testing.T) {
	for _, denied := range []bool{false, true} {
		c := newCluster(t, "192.0.2.1-192.0.2.9")
		c.add("a/conflict")
		c.add("a/denied")
		c.sync()
		resource := corev1.Resource("services")
		c.client.PrependReactor("patch", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
			switch name := a.(clienttesting.PatchAction).GetName(); {
			case name == "conflict":
				return true, nil, apierrors.NewConflict(resource, name, errors.New("changed"))
			case denied:
				return true, nil, apierrors.NewForbidden(resource, name, errors.New("not yours"))
			}
			return false, nil, nil
		})
		x := c.controller(DefaultClass, true)
		passes := make(chan struct{}, 1)
		x.Pools = func() (pool.Set, error) {
			passes <- struct{}{}
			return c.pools, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { x.Run(ctx) })
		for range 2 { // the first has ended when the second begins
			select {
			case <-passes:
			case <-time.After(time.Minute):
				t.Error("no pass")
			}
		}
		if failed := x.Stats().Failures > 0; failed != denied {
			t.Errorf("denied %v: failure counted: %v", denied, failed)
		}
		cancel()
		go func() {
			for range passes { // none waits
			}
		}()
		wg.Wait()
		close(passes)
		if logged := strings.Contains(c.log.String(), "not yours"); logged != denied {
			t.Errorf("denied %v, log:\n%s", denied, c.log.String())
		}
	}
}

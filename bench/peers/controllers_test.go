package peers

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

var (
	controllersServices = flag.Int("controllers.services", 500, "Services of TestControllersSideBySide")
	controllersPods     = flag.Int("controllers.pods", 5000, "its Pods")
	controllersSeed     = flag.Uint64("controllers.seed", 0, "its seed; 0 takes one from the clock")
)

// TestControllersSideBySide has kube-controller-manager and Portal's controllers work on the same Services and Pods,
// each from nothing, and compares what they wrote. Then each is started on what the other wrote: neither may find
// anything to change.
func TestControllersSideBySide(t *testing.T) {
	seed := *controllersSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-controllers.seed=%d", seed)
	c := startControlPlane(t)
	begin := time.Now()
	c.populate(rand.New(rand.NewPCG(seed, 1)), *controllersServices, *controllersPods)
	t.Logf("%d Services and %d Pods made in %s", *controllersServices, *controllersPods, time.Since(begin).Round(time.Second))

	reference := c.referenceControllers()
	c.settle()
	theirs, theirVersions := c.snapshot()
	reference()
	t.Logf("kube-controller-manager: %d Endpoints, %d EndpointSlices", len(theirs.endpoints), len(theirs.slices))

	portal := c.portalControllers()
	c.stays(theirVersions, "Portal changed what kube-controller-manager had written")
	portal()

	c.wipe()
	portal = c.portalControllers()
	c.settle()
	ours, ourVersions := c.snapshot()
	portal()
	compare(t, "Endpoints", theirs.endpoints, ours.endpoints)
	compare(t, "EndpointSlices", theirs.slices, ours.slices)

	reference = c.referenceControllers()
	c.stays(ourVersions, "kube-controller-manager changed what Portal had written")
	reference()
}

func compare(t *testing.T, kind string, theirs, ours map[string]string) {
	t.Helper()
	shown := 0
	for _, key := range slices.Sorted(maps.Keys(theirs)) {
		if theirs[key] != ours[key] && shown < 5 {
			t.Errorf("%s of %s differ:\nkube-controller-manager %s\nPortal                  %s", kind, key, theirs[key], ours[key])
			shown++
		}
	}
	for key := range ours {
		if _, ok := theirs[key]; !ok {
			t.Errorf("%s of %s: only Portal has written any: %s", kind, key, ours[key])
		}
	}
}

// controlPlane is etcd and kube-apiserver on loopback.
type controlPlane struct {
	*testing.T
	dir, root string
	config    *rest.Config
	client    kubernetes.Interface
}

func startControlPlane(t *testing.T) *controlPlane {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	c := &controlPlane{T: t, dir: t.TempDir(), root: root}
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager"} {
		if _, err := os.Stat(c.peer(name)); err != nil {
			t.Skipf("%s is not built: make peers", name)
		}
	}
	ports := freePorts(t, 3)
	at := func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", ports[i]) }
	c.write("tokens.csv", "secret,admin,1,system:masters\n")
	key := filepath.Join(c.dir, "sa.key")
	if out, err := exec.Command("openssl", "genrsa", "-out", key, "2048").CombinedOutput(); err != nil {
		t.Fatalf("openssl: %v\n%s", err, out)
	}
	c.start(c.peer("etcd"), "--data-dir", filepath.Join(c.dir, "etcd"), "--unsafe-no-fsync", "--listen-client-urls", at(0), "--advertise-client-urls", at(0),
		"--listen-peer-urls", at(1), "--initial-advertise-peer-urls", at(1), "--initial-cluster", "default="+at(1))
	c.start(c.peer("kube-apiserver"), "--etcd-servers", at(0), "--secure-port", fmt.Sprint(ports[2]), "--bind-address", "127.0.0.1",
		"--cert-dir", filepath.Join(c.dir, "certs"), "--service-cluster-ip-range", "10.96.0.0/16,fd00:96::/112",
		"--service-account-key-file", key, "--service-account-signing-key-file", key, "--service-account-issuer", "https://kubernetes.default.svc",
		"--token-auth-file", filepath.Join(c.dir, "tokens.csv"), "--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount")
	host := fmt.Sprintf("https://127.0.0.1:%d", ports[2])
	c.config = &rest.Config{Host: host, BearerToken: "secret", QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, WarningHandler: rest.NoWarnings{}}
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		t.Fatal(err)
	}
	c.write("kubeconfig", fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"x",
"clusters":[{"name":"x","cluster":{"server":%q,"insecure-skip-tls-verify":true}}],
"users":[{"name":"x","user":{"token":"secret"}}],"contexts":[{"name":"x","context":{"cluster":"x","user":"x"}}]}`, host))
	for range 300 {
		if _, err = c.client.CoreV1().Namespaces().Get(t.Context(), "default", metav1.GetOptions{}); err == nil {
			return c
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("the API server did not come up: %v", err)
	return nil
}

func (c *controlPlane) peer(name string) string {
	return filepath.Join(c.root, ".cache", "peers", name)
}

func (c *controlPlane) write(name, text string) {
	c.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
		c.Fatal(err)
	}
}

func freePorts(t *testing.T, n int) []int {
	t.Helper()
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports
}

// start runs a program until its stop is called or the test ends.
func (c *controlPlane) start(path string, args ...string) (stop func()) {
	c.Helper()
	log, err := os.Create(filepath.Join(c.dir, fmt.Sprintf("%s-%d.log", filepath.Base(path), time.Now().UnixNano())))
	if err != nil {
		c.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
	})
	c.Cleanup(stop)
	return stop
}

func (c *controlPlane) referenceControllers() (stop func()) {
	return c.start(c.peer("kube-controller-manager"), "--kubeconfig", filepath.Join(c.dir, "kubeconfig"), "--leader-elect=false",
		"--controllers", "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller",
		"--kube-api-qps", "1000", "--kube-api-burst", "2000", "--secure-port", fmt.Sprint(freePorts(c.T, 1)[0]), "--bind-address", "127.0.0.1",
		"--cert-dir", filepath.Join(c.dir, "kcm"))
}

// portalControllers runs the binary that PORTAL names, or else the one that make builds.
func (c *controlPlane) portalControllers() (stop func()) {
	path := os.Getenv("PORTAL")
	if path == "" {
		path = filepath.Join(c.root, ".cache", "bin", "portal")
	}
	if _, err := os.Stat(path); err != nil {
		c.Skipf("%s is not built: make build", path)
	}
	return c.start(path, "controllers", "--kubeconfig", filepath.Join(c.dir, "kubeconfig"), "--leader-elect=false", "--controllers", "endpoints,endpointslice,mirror")
}

const namespaces = 5

// populate makes Services and Pods of every kind the controllers treat in their own way.
func (c *controlPlane) populate(r *rand.Rand, services, pods int) {
	c.Helper()
	g := generator{r}
	var work []func(context.Context) error
	for i := range 8 {
		work = append(work, c.create(g.node(i)))
	}
	for i := range namespaces {
		work = append(work, c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("ns%d", i)}}))
	}
	c.all(work)
	work = nil
	for i := range services {
		svc, endpoints := g.service(i)
		work = append(work, c.create(svc))
		if endpoints != nil {
			work = append(work, c.create(endpoints))
		}
	}
	for i := range pods {
		work = append(work, c.createPod(g.pod(i)))
	}
	c.all(work)
}

// all does work, several things at a time.
func (c *controlPlane) all(work []func(context.Context) error) {
	c.Helper()
	next := make(chan func(context.Context) error)
	errs := make(chan error, 16)
	var done sync.WaitGroup
	for range cap(errs) {
		done.Go(func() {
			for do := range next {
				if err := do(c.Context()); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	for _, do := range work {
		select {
		case next <- do:
		case err := <-errs:
			c.Fatal(err)
		}
	}
	close(next)
	done.Wait()
	if len(errs) > 0 {
		c.Fatal(<-errs)
	}
}

func (c *controlPlane) create(obj any) func(context.Context) error {
	return func(ctx context.Context) (err error) {
		opts := metav1.CreateOptions{}
		switch o := obj.(type) {
		case *corev1.Node:
			_, err = c.client.CoreV1().Nodes().Create(ctx, o, opts)
		case *corev1.Namespace:
			_, err = c.client.CoreV1().Namespaces().Create(ctx, o, opts)
		case *corev1.Service:
			_, err = c.client.CoreV1().Services(o.Namespace).Create(ctx, o, opts)
		case *corev1.Endpoints:
			_, err = c.client.CoreV1().Endpoints(o.Namespace).Create(ctx, o, opts)
		default:
			err = fmt.Errorf("no way to create a %T", obj)
		}
		return err
	}
}

func (c *controlPlane) createPod(pod *corev1.Pod, terminating bool) func(context.Context) error {
	return func(ctx context.Context) error {
		client := c.client.CoreV1().Pods(pod.Namespace)
		status := pod.Status
		made, err := client.Create(ctx, pod, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		made.Status = status
		if _, err := client.UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
			return err
		}
		if terminating {
			return client.Delete(ctx, pod.Name, metav1.DeleteOptions{})
		}
		return nil
	}
}

// generator makes objects at random.
type generator struct{ *rand.Rand }

func (g generator) chance(of int) bool { return g.IntN(of) == 0 }

func oneOf[T any](g generator, list ...T) T { return list[g.IntN(len(list))] }

func (g generator) node(i int) *corev1.Node {
	labels := map[string]string{"kubernetes.io/hostname": nodeName(i)}
	if i < 6 {
		labels[corev1.LabelTopologyZone] = fmt.Sprintf("z%d", i%3)
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i), Labels: labels}}
}

func nodeName(i int) string { return fmt.Sprintf("node%d", i) }

func (g generator) labels() map[string]string {
	return map[string]string{"app": fmt.Sprintf("a%d", g.IntN(60)), "tier": oneOf(g, "x", "y", "z"), "env": oneOf(g, "prod", "prod", "test")}
}

func (g generator) service(i int) (*corev1.Service, *corev1.Endpoints) {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns%d", i%namespaces), Name: fmt.Sprintf("s%d", i)}}
	if g.chance(3) {
		svc.Labels = map[string]string{"team": oneOf(g, "red", "blue"), "x": "y"}
	}
	ports := []corev1.ServicePort{
		{Name: "http", Port: 80, TargetPort: oneOf(g, intstr.FromInt32(8080), intstr.FromString("web"))},
		{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: oneOf(g, intstr.FromInt32(53), intstr.FromString("dns"))},
		{Name: "admin", Port: 81, TargetPort: intstr.FromString("admin")},
	}
	svc.Spec.Ports = ports[:1+g.IntN(3)]
	if h2c := "kubernetes.io/h2c"; g.chance(4) {
		svc.Spec.Ports[0].AppProtocol = &h2c
	}
	svc.Spec.PublishNotReadyAddresses = g.chance(6)
	if g.chance(5) {
		svc.Spec.ClusterIP = corev1.ClusterIPNone
		if g.chance(3) {
			svc.Spec.Ports = nil
		}
	}
	if policy := oneOf(g, corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack, ""); policy != "" {
		svc.Spec.IPFamilyPolicy = &policy
		if g.chance(3) {
			svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
		}
	}
	if how := oneOf(g, corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameNode, "", "", ""); how != "" {
		svc.Spec.TrafficDistribution = &how
	}
	switch g.IntN(10) {
	case 0:
		return svc, g.handMade(svc)
	case 1:
		svc.Spec.Selector = g.labels()
	case 2, 3:
		svc.Spec.Selector = map[string]string{"env": "test", "tier": oneOf(g, "x", "y", "z")}
	default:
		svc.Spec.Selector = map[string]string{"app": g.labels()["app"]}
	}
	return svc, nil
}

func (g generator) handMade(svc *corev1.Service) *corev1.Endpoints {
	e := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name, Labels: map[string]string{"hand": "made"}, Annotations: map[string]string{"a": "b"}}}
	for i := range g.IntN(4) {
		s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "http", Port: int32(9000 + g.IntN(2))}}}
		for j := range 1 + g.IntN(6) {
			a := corev1.EndpointAddress{IP: oneOf(g, fmt.Sprintf("192.0.2.%d", 10*i+j+1), fmt.Sprintf("2001:db8::%d", 10*i+j+1))}
			if g.chance(3) {
				s.NotReadyAddresses = append(s.NotReadyAddresses, a)
			} else {
				s.Addresses = append(s.Addresses, a)
			}
		}
		e.Subsets = append(e.Subsets, s)
	}
	return e
}

func (g generator) pod(i int) (_ *corev1.Pod, terminating bool) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns%d", i%namespaces), Name: fmt.Sprintf("p%d", i), Labels: g.labels()},
		Spec:       corev1.PodSpec{NodeName: nodeName(g.IntN(8)), Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if !g.chance(4) {
		pod.Spec.Containers[0].Ports = []corev1.ContainerPort{
			{Name: "web", ContainerPort: int32(8000 + g.IntN(2))}, {Name: "dns", ContainerPort: 5353, Protocol: oneOf(g, corev1.ProtocolUDP, corev1.ProtocolTCP)},
		}
	}
	if always := corev1.ContainerRestartPolicyAlways; g.chance(10) {
		pod.Spec.InitContainers = []corev1.Container{{Name: "side", Image: "i", RestartPolicy: &always, Ports: []corev1.ContainerPort{{Name: "admin", ContainerPort: 9}}}}
	}
	if g.chance(5) {
		pod.Spec.Hostname, pod.Spec.Subdomain = fmt.Sprintf("h%d", i), fmt.Sprintf("s%d", g.IntN(500))
	}
	pod.Status.Phase = oneOf(g, corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodPending, corev1.PodSucceeded, corev1.PodFailed)
	if !g.chance(8) {
		four, six := fmt.Sprintf("10.%d.%d.%d", 64+i/62500, i/250%250, i%250+1), fmt.Sprintf("fd00:64::%x", i+1)
		ips := oneOf(g, []string{four}, []string{four, six}, []string{six, four}, []string{six})
		pod.Status.PodIP = ips[0]
		for _, ip := range ips {
			pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: ip})
		}
	}
	if status := oneOf(g, corev1.ConditionTrue, corev1.ConditionTrue, corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionUnknown, ""); status != "" {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
	}
	return pod, g.chance(12)
}

// written is what controllers have written, by Service, without what is random or a time.
type written struct{ endpoints, slices map[string]string }

type versions map[string]string

func (c *controlPlane) snapshot() (written, versions) {
	c.Helper()
	out, v := written{map[string]string{}, map[string]string{}}, versions{}
	endpoints, err := c.client.CoreV1().Endpoints("").List(c.Context(), metav1.ListOptions{})
	if err != nil {
		c.Fatal(err)
	}
	for _, e := range endpoints.Items {
		if e.Namespace == "default" {
			continue
		}
		key := e.Namespace + "/" + e.Name
		v["Endpoints "+key] = e.ResourceVersion
		delete(e.Annotations, corev1.EndpointsLastChangeTriggerTime)
		var subsets []string
		for _, s := range e.Subsets {
			subsets = append(subsets, text(sortedText(s.Ports), sortedText(s.Addresses), sortedText(s.NotReadyAddresses)))
		}
		out.endpoints[key] = text(e.Labels, e.Annotations, sortedText(subsets))
	}
	list, err := c.client.DiscoveryV1().EndpointSlices("").List(c.Context(), metav1.ListOptions{})
	if err != nil {
		c.Fatal(err)
	}
	groups := map[string][]discoveryv1.Endpoint{}
	sizes := map[string][]string{}
	for _, s := range list.Items {
		if s.Namespace == "default" {
			continue
		}
		v["EndpointSlice "+s.Namespace+"/"+s.Name] = s.ResourceVersion
		delete(s.Annotations, corev1.EndpointsLastChangeTriggerTime)
		for i := range s.OwnerReferences {
			s.OwnerReferences[i].UID = ""
		}
		group := text(s.Namespace+"/"+s.Labels[discoveryv1.LabelServiceName], s.AddressType, sortedText(s.Ports), s.Labels, s.Annotations, s.OwnerReferences)
		groups[group] = append(groups[group], s.Endpoints...)
		sizes[group] = append(sizes[group], fmt.Sprintf("%04d", len(s.Endpoints)))
	}
	for group, ends := range groups {
		out.slices[group] = text(sortedText(sizes[group]), sortedText(ends))
	}
	return out, v
}

func text(parts ...any) string {
	var words []string
	for _, p := range parts {
		b, _ := json.Marshal(p)
		words = append(words, string(b))
	}
	return strings.Join(words, " ")
}

// sortedText makes lists comparable whose order means nothing.
func sortedText[T any](list []T) []string {
	var words []string
	for _, item := range list {
		words = append(words, text(item))
	}
	slices.Sort(words)
	return words
}

// settle waits until nothing has been written for a while.
func (c *controlPlane) settle() {
	c.Helper()
	last, since := versions{}, time.Now()
	for deadline := time.Now().Add(3 * time.Minute); time.Now().Before(deadline); time.Sleep(500 * time.Millisecond) {
		_, now := c.snapshot()
		if !maps.Equal(last, now) {
			last, since = now, time.Now()
		} else if time.Since(since) > 4*time.Second && len(now) > *controllersServices {
			return
		}
	}
	c.Fatal("the controllers are still writing after three minutes")
}

// stays gives controllers time to do something, and complains if they have.
func (c *controlPlane) stays(before versions, complaint string) {
	c.Helper()
	time.Sleep(8 * time.Second)
	_, after := c.snapshot()
	shown := 0
	for _, key := range slices.Sorted(maps.Keys(before)) {
		if before[key] != after[key] && shown < 5 {
			c.Errorf("%s: %s", complaint, key)
			shown++
		}
	}
	for key := range after {
		if _, ok := before[key]; !ok {
			c.Errorf("%s: %s is new", complaint, key)
		}
	}
}

// wipe deletes what controllers have written, and leaves what was made by hand.
func (c *controlPlane) wipe() {
	c.Helper()
	for i := range namespaces {
		ns := fmt.Sprintf("ns%d", i)
		if err := c.client.DiscoveryV1().EndpointSlices(ns).DeleteCollection(c.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			c.Fatal(err)
		}
		if err := c.client.CoreV1().Endpoints(ns).DeleteCollection(c.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "endpoints.kubernetes.io/managed-by"}); err != nil {
			c.Fatal(err)
		}
	}
}

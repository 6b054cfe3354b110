package test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
)

const (
	loadNamespace = "load"
	// opAnnotation names the request that wrote an object last.
	opAnnotation = "test.portal/op"
	finalizer    = "test.portal/hold"
	// nodePortRange is small, so that every port can be asked about and some are fought for.
	nodePortRange = "30000-30199"
	firstNodePort = 30000
	lastNodePort  = 30199
)

// worker writes to Services of its own in every way there is, as fast as it is answered, and keeps the ledger.
type worker struct {
	id     int
	random *rand.Rand
	ledger *ledger
	// server is where the next request goes; trouble is told of requests that got no answer.
	server  func() kubernetes.Interface
	trouble func(what string, err error)

	names   int // so many have been used up
	seq     int
	current []string
}

// load runs workers until ctx ends.
func load(ctx context.Context, workers []*worker) {
	var group sync.WaitGroup
	for _, w := range workers {
		group.Go(func() {
			for ctx.Err() == nil {
				w.step()
			}
		})
	}
	group.Wait()
}

// plain makes a client that reports every answer as it came: it neither retries nor waits to be polite.
func plain(t testing.TB, kubeconfig string) *kubernetes.Clientset {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1
	config.Timeout = 5 * time.Second
	config.WarningHandler = restclient.NoWarnings{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return noRetry{next} })
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// noRetry hides Retry-After, which makes client-go repeat a request whose first try may have been carried out.
type noRetry struct{ http.RoundTripper }

func (n noRetry) WrappedRoundTripper() http.RoundTripper { return n.RoundTripper }

func (n noRetry) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := n.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Header.Del("Retry-After")
	}
	return resp, err
}

// namesEach is how many Services a worker juggles.
const namesEach = 6

// pick chooses a name whose state is known, and a new one for each whose state is not.
func (w *worker) pick() (string, *corev1.Service) {
	for len(w.current) < namesEach {
		w.current = append(w.current, w.newName())
	}
	i := w.random.IntN(namesEach)
	svc, known := w.ledger.see(w.current[i])
	if !known {
		w.current[i], svc = w.newName(), nil
	}
	return w.current[i], svc
}

func (w *worker) newName() string {
	w.names++
	return fmt.Sprintf("w%d-%d", w.id, w.names)
}

func (w *worker) step() {
	name, svc := w.pick()
	w.seq++
	op := fmt.Sprintf("w%d-op%d", w.id, w.seq)
	switch dice := w.random.IntN(100); {
	case svc == nil:
		w.create(name, op)
	case svc.DeletionTimestamp != nil:
		w.release(svc)
	case dice < 30:
		w.update(svc, op)
	case dice < 50:
		w.patch(svc, op)
	case dice < 60:
		w.status(svc, op)
	case dice < 97:
		w.delete(svc)
	default:
		w.deleteAll()
	}
}

// note writes the outcome down, and tells of trouble.
func (w *worker) note(name, what string, now *corev1.Service, err error, fits func(*corev1.Service) bool) {
	if w.ledger.write(name, what, now, err, fits) == unanswered {
		w.trouble(what+" "+name, err)
	}
}

// by says whether an object is the work of a request.
func by(op string) func(*corev1.Service) bool {
	return func(svc *corev1.Service) bool { return svc != nil && svc.Annotations[opAnnotation] == op }
}

func gone(svc *corev1.Service) bool { return svc == nil }

func (w *worker) services() typedcorev1.ServiceInterface {
	return w.server().CoreV1().Services(loadNamespace)
}

func (w *worker) create(name, op string) {
	svc := w.newService(name, op)
	if w.random.IntN(4) == 0 {
		// Server-side apply creates through the update path.
		body, _ := json.Marshal(svc)
		now, err := w.services().Patch(context.Background(), name, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: "load", Force: ptr.To(true)})
		w.note(name, "create by apply", now, err, by(op))
		return
	}
	now, err := w.services().Create(context.Background(), svc, metav1.CreateOptions{})
	w.note(name, "create", now, err, by(op))
}

func (w *worker) update(svc *corev1.Service, op string) {
	svc = svc.DeepCopy()
	svc.Annotations[opAnnotation] = op
	w.shape(svc)
	now, err := w.services().Update(context.Background(), svc, metav1.UpdateOptions{})
	w.note(svc.Name, "update", now, err, by(op))
}

// patch changes the type or the families and leaves the rest to the server.
func (w *worker) patch(svc *corev1.Service, op string) {
	spec := map[string]any{}
	switch w.random.IntN(4) {
	case 0:
		spec["type"] = []string{"ClusterIP", "NodePort", "LoadBalancer"}[w.random.IntN(3)]
	case 1:
		spec["type"], spec["externalName"] = "ExternalName", "example.com"
		spec["clusterIP"], spec["clusterIPs"] = nil, nil
	case 2:
		spec["ipFamilyPolicy"] = []string{"SingleStack", "PreferDualStack", "RequireDualStack"}[w.random.IntN(3)]
	case 3:
		spec["externalTrafficPolicy"] = []string{"Local", "Cluster"}[w.random.IntN(2)]
	}
	body, _ := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{opAnnotation: op}}, "spec": spec})
	kind := []types.PatchType{types.MergePatchType, types.StrategicMergePatchType}[w.random.IntN(2)]
	now, err := w.services().Patch(context.Background(), svc.Name, kind, body, metav1.PatchOptions{})
	w.note(svc.Name, "patch", now, err, by(op))
}

func (w *worker) status(svc *corev1.Service, op string) {
	svc = svc.DeepCopy()
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: op + ".example.com"}}
	now, err := w.services().UpdateStatus(context.Background(), svc, metav1.UpdateOptions{})
	w.note(svc.Name, "status", now, err, func(found *corev1.Service) bool {
		in := found != nil && len(found.Status.LoadBalancer.Ingress) == 1
		return in && found.Status.LoadBalancer.Ingress[0].Hostname == op+".example.com"
	})
}

// delete removes an object. One with a finalizer is only marked, and must be read again to know its version.
func (w *worker) delete(svc *corev1.Service) {
	options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &svc.UID}}
	err := w.services().Delete(context.Background(), svc.Name, options)
	if len(svc.Finalizers) == 0 {
		w.note(svc.Name, "delete", nil, err, gone)
		return
	}
	marked := func(found *corev1.Service) bool { return found != nil && found.DeletionTimestamp != nil }
	if err != nil {
		w.note(svc.Name, "delete with finalizer", nil, err, marked)
		return
	}
	now, err := w.services().Get(context.Background(), svc.Name, metav1.GetOptions{})
	if err == nil && !marked(now) {
		err = fmt.Errorf("its deletion was acknowledged, and it has no deletion timestamp")
	}
	w.note(svc.Name, "delete with finalizer", now, err, marked)
}

// release takes the finalizer off an object that is only waiting for that.
func (w *worker) release(svc *corev1.Service) {
	_, err := w.services().Patch(context.Background(), svc.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	w.note(svc.Name, "release", nil, err, gone)
}

// deleteAll removes what this worker has and nobody holds.
func (w *worker) deleteAll() {
	var mine []*corev1.Service
	for _, name := range w.current {
		if svc, known := w.ledger.see(name); known && svc != nil && len(svc.Finalizers) == 0 {
			mine = append(mine, svc)
		}
	}
	err := w.server().CoreV1().RESTClient().Delete().Namespace(loadNamespace).Resource("services").
		Param("labelSelector", fmt.Sprintf("worker=w%d,held=no", w.id)).Do(context.Background()).Error()
	w.ledger.mayBeGone(fmt.Sprintf("w%d-", w.id))
	for _, svc := range mine {
		w.note(svc.Name, "deletecollection", nil, err, gone)
	}
}

func (w *worker) newService(name, op string) *corev1.Service {
	svc := &corev1.Service{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: loadNamespace, Annotations: map[string]string{opAnnotation: op},
			Labels: map[string]string{"worker": fmt.Sprintf("w%d", w.id), "held": "no"},
		},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": name}},
	}
	if w.random.IntN(8) == 0 {
		svc.Finalizers, svc.Labels["held"] = []string{finalizer}, "yes"
	}
	w.shape(svc)
	spec := &svc.Spec
	switch w.random.IntN(6) {
	case 0:
		spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	case 1:
		spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyPreferDualStack)
		spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
	case 2:
		spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
	case 3:
		spec.ClusterIP = fmt.Sprintf("10.96.0.%d", 16+w.random.IntN(12)) // fought for
	case 4:
		spec.ClusterIP = corev1.ClusterIPNone
	}
	if spec.Type == corev1.ServiceTypeExternalName {
		spec.ClusterIP, spec.IPFamilies, spec.IPFamilyPolicy = "", nil, nil
	}
	return svc
}

// shape gives a Service a type and ports. What does not fit the rest is refused, which is an answer too.
func (w *worker) shape(svc *corev1.Service) {
	spec := &svc.Spec
	spec.ExternalName, spec.ExternalTrafficPolicy, spec.HealthCheckNodePort = "", "", 0
	spec.AllocateLoadBalancerNodePorts, spec.Ports = nil, nil
	spec.Type = []corev1.ServiceType{
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer,
		corev1.ServiceTypeExternalName,
	}[w.random.IntN(5)]
	for i := range 1 + w.random.IntN(3) {
		port := corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Port: int32(80 + i), TargetPort: intstr.FromInt32(8080)}
		opens := spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer
		if opens && w.random.IntN(3) == 0 {
			port.NodePort = firstNodePort + w.random.Int32N(12) // fought for
		}
		spec.Ports = append(spec.Ports, port)
	}
	switch spec.Type {
	case corev1.ServiceTypeExternalName:
		spec.ExternalName, spec.ClusterIP, spec.ClusterIPs = "example.com", "", nil
		spec.IPFamilies, spec.IPFamilyPolicy, spec.InternalTrafficPolicy = nil, nil, nil
	case corev1.ServiceTypeLoadBalancer:
		if w.random.IntN(2) == 0 {
			spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}
		if w.random.IntN(3) == 0 {
			spec.AllocateLoadBalancerNodePorts = ptr.To(false)
		}
	}
}

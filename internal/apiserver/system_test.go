package apiserver

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/internal/store"
)

// eventually polls until check has nothing to complain about.
func eventually(t testing.TB, check func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func create(ctx context.Context, client kubernetes.Interface, name string, ips ...string) error {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{ClusterIPs: ips, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if len(ips) > 0 {
		svc.Spec.ClusterIP = ips[0]
	}
	_, err := client.CoreV1().Services("default").Create(ctx, svc, metav1.CreateOptions{})
	return err
}

// TestSystemObjectsComeBack: whatever an ordinary call does to the objects of the system is repaired while the server runs.
func TestSystemObjectsComeBack(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.AdvertiseAddress = "192.0.2.1"
	s := start(t, opts)
	ctx := t.Context()
	client := s.Client()
	core := client.CoreV1()
	services := core.Services("default")
	apiService := func() error {
		svc, err := services.Get(ctx, "kubernetes", metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case svc.Spec.ClusterIP != "10.96.0.1" || svc.Spec.Type != corev1.ServiceTypeClusterIP || len(svc.Spec.Selector) > 0 || svc.Spec.Ports[0].Port != 443:
			return fmt.Errorf("the kubernetes Service is %+v", svc.Spec)
		}
		return nil
	}
	apiSlice := func() error {
		slice, err := client.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case !maps.Equal(slice.Labels, map[string]string{discoveryv1.LabelServiceName: "kubernetes"}):
			return fmt.Errorf("it has the labels %v", slice.Labels)
		case slice.AddressType != discoveryv1.AddressTypeIPv4 || len(slice.Endpoints) != 1 || slice.Endpoints[0].Addresses[0] != "192.0.2.1":
			return fmt.Errorf("it has the endpoints %v", slice.Endpoints)
		}
		return nil
	}
	for _, c := range []struct {
		name   string
		hurt   func() error
		healed func() error
	}{
		{"service deleted", func() error { return services.Delete(ctx, "kubernetes", metav1.DeleteOptions{}) }, apiService},
		{"service turned into a name", func() error {
			_, err := services.Patch(ctx, "kubernetes", types.MergePatchType,
				[]byte(`{"spec":{"type":"ExternalName","externalName":"example.com","clusterIP":null,"clusterIPs":null}}`), metav1.PatchOptions{})
			return err
		}, apiService},
		{"service with a selector", func() error {
			_, err := services.Patch(ctx, "kubernetes", types.MergePatchType, []byte(`{"spec":{"selector":{"a":"b"}}}`), metav1.PatchOptions{})
			return err
		}, apiService},
		{"service held by a finalizer", func() error {
			_, err := services.Patch(ctx, "kubernetes", types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/x"]}}`), metav1.PatchOptions{})
			if err != nil {
				return err
			}
			return services.Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		}, func() error {
			svc, err := services.Get(ctx, "kubernetes", metav1.GetOptions{})
			if err == nil && svc.DeletionTimestamp != nil {
				return fmt.Errorf("it is still being deleted")
			}
			return err
		}},
		{"endpoints deleted", func() error {
			return core.Endpoints("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		}, func() error {
			_, err := core.Endpoints("default").Get(ctx, "kubernetes", metav1.GetOptions{})
			return err
		}},
		{"slice deleted", func() error {
			return client.DiscoveryV1().EndpointSlices("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		}, func() error {
			_, err := client.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
			return err
		}},
		{"slice without its label", func() error {
			_, err := client.DiscoveryV1().EndpointSlices("default").Patch(ctx, "kubernetes", types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"kubernetes.io/service-name":null}}}`), metav1.PatchOptions{})
			return err
		}, apiSlice},
		{"slice of another Service", func() error {
			_, err := client.DiscoveryV1().EndpointSlices("default").Patch(ctx, "kubernetes", types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"kubernetes.io/service-name":"other"}}}`), metav1.PatchOptions{})
			return err
		}, apiSlice},
		{"slice hidden from proxies", func() error {
			_, err := client.DiscoveryV1().EndpointSlices("default").Patch(ctx, "kubernetes", types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"service.kubernetes.io/service-proxy-name":"other"}}}`), metav1.PatchOptions{})
			return err
		}, apiSlice},
		{"slice of another family", func() error {
			slices := client.DiscoveryV1().EndpointSlices("default")
			if err := slices.Delete(ctx, "kubernetes", metav1.DeleteOptions{}); err != nil {
				return err
			}
			_, err := slices.Create(ctx, &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, AddressType: discoveryv1.AddressTypeIPv6}, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) { // the server was quicker
				return nil
			}
			return err
		}, apiSlice},
		{"range deleted", func() error {
			_, err := client.NetworkingV1().ServiceCIDRs().Patch(ctx, "kubernetes", types.MergePatchType,
				[]byte(`{"metadata":{"finalizers":["networking.k8s.io/service-cidr-finalizer"]}}`), metav1.PatchOptions{})
			if err != nil {
				return err
			}
			return client.NetworkingV1().ServiceCIDRs().Delete(ctx, "kubernetes", metav1.DeleteOptions{})
		}, func() error {
			cidr, err := client.NetworkingV1().ServiceCIDRs().Get(ctx, "kubernetes", metav1.GetOptions{})
			if err == nil && cidr.DeletionTimestamp != nil {
				return fmt.Errorf("it is still being deleted")
			}
			return err
		}},
		{"configuration made immutable and wrong", func() error {
			maps := core.ConfigMaps("kube-system")
			if err := maps.Delete(ctx, authenticationConfig, metav1.DeleteOptions{}); err != nil {
				return err
			}
			_, err := maps.Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: authenticationConfig}, Immutable: ptr.To(true), Data: map[string]string{"a": "b"},
			}, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) { // the server was quicker
				return nil
			}
			return err
		}, func() error {
			m, err := core.ConfigMaps("kube-system").Get(ctx, authenticationConfig, metav1.GetOptions{})
			if err == nil && m.Data["client-ca-file"] == "" {
				return fmt.Errorf("it holds %v", m.Data)
			}
			return err
		}},
		{"cluster-info made immutable", func() error {
			_, err := core.ConfigMaps("kube-public").Patch(ctx, "cluster-info", types.MergePatchType, []byte(`{"immutable":true}`), metav1.PatchOptions{})
			return err
		}, func() error {
			m, err := core.ConfigMaps("kube-public").Get(ctx, "cluster-info", metav1.GetOptions{})
			if err == nil && (m.Immutable != nil || m.Data["kubeconfig"] == "") {
				return fmt.Errorf("it is %+v", m)
			}
			return err
		}},
		{"namespace deleted", func() error {
			namespaces := core.Namespaces()
			if err := namespaces.Delete(ctx, corev1.NamespaceNodeLease, metav1.DeleteOptions{}); err != nil {
				return err
			}
			ns, err := namespaces.Get(ctx, corev1.NamespaceNodeLease, metav1.GetOptions{})
			if err != nil {
				return err
			}
			ns.Spec.Finalizers = nil // what the namespace controller does when it is empty
			_, err = namespaces.Finalize(ctx, ns, metav1.UpdateOptions{})
			return err
		}, func() error {
			ns, err := core.Namespaces().Get(ctx, corev1.NamespaceNodeLease, metav1.GetOptions{})
			if err == nil && ns.DeletionTimestamp != nil {
				return fmt.Errorf("it is still being deleted")
			}
			return err
		}},
	} {
		if err := c.hurt(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		// Services are created all the while.
		if err := create(ctx, client, fmt.Sprintf("s%d", time.Now().UnixNano())); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		t.Run(c.name, func(t *testing.T) { eventually(t, c.healed) })
	}
}

// TestFirstAddressesAreReserved: nobody but the kubernetes Service gets the first address of a range, by asking for it, by
// chance, or as an IPAddress.
func TestFirstAddressesAreReserved(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.ServiceCIDRs = []string{"10.96.0.0/29", "fd00:96::/125"}
	s := start(t, opts)
	client := s.Client()
	for _, ip := range []string{"10.96.0.1", "fd00:96::1"} {
		err := create(t.Context(), client, "thief", ip)
		if !apierrors.IsInvalid(err) || !apierrors.HasStatusCause(err, metav1.CauseTypeFieldValueInvalid) {
			t.Errorf("a Service with %s: %v", ip, err)
		}
		_, err = client.NetworkingV1().IPAddresses().Create(t.Context(), &networkingv1.IPAddress{
			ObjectMeta: metav1.ObjectMeta{Name: ip},
			Spec:       networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "kubernetes"}},
		}, metav1.CreateOptions{})
		if !apierrors.IsInvalid(err) {
			t.Errorf("an IPAddress %s: %v", ip, err)
		}
	}
	// Of the six addresses of the IPv6 range, five can be had.
	for i := range 6 {
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s%d", i)},
			Spec:       corev1.ServiceSpec{IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol}, Ports: []corev1.ServicePort{{Port: 80}}},
		}
		got, err := client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got.Spec.ClusterIP == "fd00:96::1" {
			t.Error("a Service got the reserved address by chance")
		}
	}
}

// TestAskedPortIsNotChosenToo: a port that the user asks for is never chosen for another purpose of the same Service.
func TestAskedPortIsNotChosenToo(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.NodePorts = "30000-30001"
	s := start(t, opts)
	services := s.Client().CoreV1().Services("default")
	for range 12 { // a coin that falls on the same side twelve times
		svc, err := services.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "lb"},
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
				HealthCheckNodePort: 30000, Ports: []corev1.ServicePort{{Port: 80}},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if svc.Spec.Ports[0].NodePort != 30001 {
			t.Fatalf("the node port is %d and the port for health checks %d", svc.Spec.Ports[0].NodePort, svc.Spec.HealthCheckNodePort)
		}
		if err := services.Delete(t.Context(), "lb", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBadStateIsServedAndHealed: a store in which a Service holds the API's address, from before that was reserved, does not
// keep the server from starting, and is put right when the Service goes.
func TestBadStateIsServedAndHealed(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.ServiceCIDRs = []string{"10.96.0.0/16"}
	s, stop := startStoppable(t, opts)
	// The state that used to come about by deleting the Service: written as another cluster's default range would do.
	ctx := context.Background()
	if err := create(ctx, s.Client(), "thief", "10.96.0.77"); err != nil {
		t.Fatal(err)
	}
	stop()
	opts.ServiceCIDRs = []string{"10.96.0.76/30"}
	s, err := New(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := s.store.Client().Get(ctx, store.Prefix+"/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range keys.Kvs {
		if key := string(kv.Key); strings.HasSuffix(key, "servicecidrs/kubernetes") || strings.HasSuffix(key, "services/specs/default/kubernetes") {
			if _, err := s.store.Client().Delete(ctx, key); err != nil {
				t.Fatal(err)
			}
		}
	}
	s.Close()

	s = start(t, opts) // it starts, which it did not
	s.systemMu.Lock()
	complaint := s.systemErrs["service default/kubernetes"]
	s.systemMu.Unlock()
	if want := "10.96.0.77 is held by Service default/thief"; !strings.Contains(complaint, want) {
		t.Errorf("it says %q, want %q in it", complaint, want)
	}
	if err := s.Client().CoreV1().Services("default").Delete(ctx, "thief", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		svc, err := s.Client().CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err == nil && svc.Spec.ClusterIP != "10.96.0.77" {
			return fmt.Errorf("the Service has %s", svc.Spec.ClusterIP)
		}
		return err
	})
}

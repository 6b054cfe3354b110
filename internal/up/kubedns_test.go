package up

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver"
	"portal/internal/clusterdns"
	"portal/internal/clusterdns/publish"
	"portal/internal/identity"
)

// startAPI runs an API server until the test ends.
func startAPI(t *testing.T) *apiserver.Server {
	t.Helper()
	opts := apiserver.DefaultOptions()
	opts.DataDir, opts.Listen = t.TempDir(), "127.0.0.1:0"
	s, err := apiserver.New(context.Background(), opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- s.Run(ctx, apiserver.Hooks{
			Ready: func(context.Context) error { close(ready); return nil },
			Work:  func(ctx context.Context) error { <-ctx.Done(); return nil },
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-ready:
	case <-time.After(time.Minute):
		t.Fatal("the server does not start")
	}
	return s
}

const asName = `{"spec":{"type":"ExternalName","externalName":"a.example"}}`

// TestKubeDNSGetsItsAddressesBack: whatever an administrator made of kube-dns, portal up finds addresses to listen at or says why not.
// While it runs, and in clusters of several machines, kube-dns has its addresses back at once.
func TestKubeDNSGetsItsAddressesBack(t *testing.T) {
	s := startAPI(t)
	ctx := t.Context()
	as := func(user string, groups ...string) kubernetes.Interface {
		t.Helper()
		client, err := kubernetes.NewForConfig(s.ConfigAs(user, groups...))
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	up := as(identity.Up)
	services := s.Client().CoreV1().Services(metav1.NamespaceSystem)
	get := func() *corev1.Service {
		t.Helper()
		svc, err := services.Get(ctx, clusterdns.ServiceName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return svc
	}
	toName := func() {
		t.Helper()
		if _, err := services.Patch(ctx, clusterdns.ServiceName, types.MergePatchType, []byte(asName), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	replace := func(change func(*corev1.Service)) {
		t.Helper()
		if err := services.Delete(ctx, clusterdns.ServiceName, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		svc := clusterdns.Service(nil)
		change(svc)
		if _, err := services.Create(ctx, svc, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	headless := func(svc *corev1.Service) { svc.Spec.ClusterIP = corev1.ClusterIPNone }
	virtual, err := KubeDNS(ctx, up, s.ServiceRanges())
	if err != nil || len(virtual) == 0 {
		t.Fatal(virtual, err)
	}
	ways := map[string]func(){
		"an ExternalName": toName,
		"headless":        func() { replace(headless) },
		"headless, without ports": func() {
			replace(func(svc *corev1.Service) { headless(svc); svc.Spec.Ports = nil })
		},
	}
	for name, hurt := range ways {
		t.Run(name, func(t *testing.T) {
			hurt()
			if got, err := KubeDNS(ctx, up, s.ServiceRanges()); err != nil || !slices.Equal(got, virtual) {
				t.Fatalf("%v, %v, want %v", got, err, virtual)
			}
			if svc := get(); svc.Spec.Type != corev1.ServiceTypeClusterIP || len(svc.Spec.Ports) != 2 || svc.Spec.ExternalName != "" {
				t.Errorf("it is %+v", svc.Spec)
			}
			hurt()
			controller := as("system:serviceaccount:kube-system:cluster-dns-controller", "system:serviceaccounts")
			svc, err := publish.Service(ctx, controller.CoreV1().Services(metav1.NamespaceSystem), get(), virtual)
			if err != nil || !slices.Equal(clusterdns.Addresses(svc), virtual) {
				t.Errorf("the controller: %v", err)
			}
		})
	}
	t.Run("while it runs", func(t *testing.T) {
		keeping, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() { KeepDNS(keeping, up, virtual, nil); close(ended) }()
		defer func() { stop(); <-ended }()
		toName()
		for end := time.Now().Add(20 * time.Second); !slices.Equal(clusterdns.Addresses(get()), virtual); time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("it is %+v", get().Spec)
			}
		}
	})
	t.Run("another Service took the addresses", func(t *testing.T) {
		toName()
		thief := clusterdns.Service(virtual)
		thief.Name = "thief"
		if _, err := services.Create(ctx, thief, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		got, err := KubeDNS(ctx, up, s.ServiceRanges())
		if err != nil || len(got) != len(virtual) || slices.ContainsFunc(got, func(a netip.Addr) bool { return slices.Contains(virtual, a) }) {
			t.Errorf("%v, %v", got, err)
		}
	})
	t.Run("it is somebody's own", func(t *testing.T) {
		own := func(svc *corev1.Service) {
			svc.Spec.Selector = map[string]string{"k8s-app": "coredns"}
			svc.Spec.Ports = []corev1.ServicePort{{Port: 5353, Protocol: corev1.ProtocolUDP}}
			svc.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicySingleStack)
		}
		replace(own)
		before := get()
		if got, err := KubeDNS(ctx, up, s.ServiceRanges()); err != nil || !slices.Equal(got, clusterdns.Addresses(before)) || get().ResourceVersion != before.ResourceVersion {
			t.Errorf("one with other addresses, ports and a selector: %v, %v", got, err)
		}
		toName()
		if _, err := KubeDNS(ctx, up, s.ServiceRanges()); err != nil || fmt.Sprint(get().Spec.Selector) != "map[k8s-app:coredns]" || get().Spec.Ports[0].Port != 5353 {
			t.Errorf("one that was made an ExternalName lost more than that: %+v, %v", get().Spec, err)
		}
		replace(func(svc *corev1.Service) { own(svc); headless(svc) })
		before = get()
		if got, err := KubeDNS(ctx, up, s.ServiceRanges()); err == nil || !strings.Contains(err.Error(), "--dns none") || get().ResourceVersion != before.ResourceVersion {
			t.Errorf("a headless one that selects Pods: %v, %v", got, err)
		}
	})
}

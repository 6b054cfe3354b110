package test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func lease(name string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// A quota bounds what a namespace has, however many ask at a time, and what goes makes room.
func TestQuota(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	client := connect(t, startPortal(t).Kubeconfig)
	if _, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	quotas, services := client.CoreV1().ResourceQuotas("shop"), client.CoreV1().Services("shop")
	const most = 5
	_, err := quotas.Create(ctx, &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
		"services": *resource.NewQuantity(most, resource.DecimalSI), "services.nodeports": resource.MustParse("1"),
		"count/leases.coordination.k8s.io": resource.MustParse("0"),
	}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	used := func(name corev1.ResourceName, want int64) {
		t.Helper()
		waitFor(t, fmt.Sprintf("%d of %s are used", want, name), func() bool {
			q, err := quotas.Get(ctx, "q", metav1.GetOptions{})
			if err != nil {
				return false
			}
			amount, ok := q.Status.Used[name]
			return ok && amount.Value() == want
		})
	}
	used("services", 0)

	service := func(name string, kind corev1.ServiceType) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{{Port: 80}}}}
	}
	var created, refused atomic.Int32
	var all sync.WaitGroup
	for i := range 4 * most {
		all.Go(func() {
			_, err := services.Create(ctx, service(fmt.Sprintf("s%d", i), corev1.ServiceTypeClusterIP), metav1.CreateOptions{})
			switch {
			case err == nil:
				created.Add(1)
			case apierrors.IsForbidden(err):
				refused.Add(1)
			default:
				t.Errorf("neither created nor refused: %v", err)
			}
		})
	}
	all.Wait()
	if created.Load() != most || refused.Load() != 3*most {
		t.Fatalf("%d were created and %d refused, of %d with room for %d", created.Load(), refused.Load(), 4*most, most)
	}
	used("services", most)

	list, err := services.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != most {
		t.Fatalf("%d Services (%v)", len(list.Items), err)
	}
	for _, gone := range list.Items[:2] {
		if err := services.Delete(ctx, gone.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	used("services", most-2)
	if _, err := services.Create(ctx, service("outside", corev1.ServiceTypeNodePort), metav1.CreateOptions{}); err != nil {
		t.Fatalf("there is room for one: %v", err)
	}
	used("services.nodeports", 1)
	changed := list.Items[2].DeepCopy()
	changed.Spec.Type = corev1.ServiceTypeNodePort
	if _, err := services.Update(ctx, changed, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a second node port is not refused: %v", err)
	}
	if out, err := services.Get(ctx, "outside", metav1.GetOptions{}); err != nil {
		t.Error(err)
	} else {
		out.Spec.Type, out.Spec.Ports[0].NodePort = corev1.ServiceTypeClusterIP, 0
		if _, err := services.Update(ctx, out, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		}
	}
	used("services.nodeports", 0)

	if _, err := client.CoordinationV1().Leases("shop").Create(ctx, lease("l"), metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a Lease is not refused where none may be: %v", err)
	}
	if _, err := client.CoordinationV1().Leases("default").Create(ctx, lease("l"), metav1.CreateOptions{}); err != nil {
		t.Errorf("another namespace has no quota: %v", err)
	}
	if err := quotas.Delete(ctx, "q", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "without the quota, a Lease can be created", func() bool {
		_, err := client.CoordinationV1().Leases("shop").Create(ctx, lease("l"), metav1.CreateOptions{})
		return err == nil
	})
}

package csr

import (
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/controllers/queue"
)

// Requests for Pods' certificates are deleted when they are old, and not before.
func TestOldPodRequestsGo(t *testing.T) {
	begin := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	clock := clocktesting.NewFakeClock(begin)
	request := &certificatesv1.PodCertificateRequest{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "r", UID: "u", CreationTimestamp: metav1.NewTime(begin)}}
	client := fake.NewClientset(request)
	factory := informers.NewSharedInformerFactory(client, 0)
	c, err := NewPodCleaner(client, factory, clock)
	if err != nil {
		t.Fatal(err)
	}
	if err := factory.Certificates().V1().PodCertificateRequests().Informer().GetIndexer().Add(request); err != nil {
		t.Fatal(err)
	}
	key := queue.Key{Namespace: "ns", Name: "r"}
	clock.Step(keepPod - time.Minute)
	if result, err := c.sync(t.Context(), key); err != nil || result.Again != time.Minute {
		t.Errorf("a minute before: %v, %v", result, err)
	}
	left := func() int {
		list, err := client.CertificatesV1().PodCertificateRequests("ns").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.Items)
	}
	if left() != 1 {
		t.Error("deleted too early")
	}
	clock.Step(time.Minute)
	if _, err := c.sync(t.Context(), key); err != nil || left() != 0 {
		t.Errorf("%d left (%v)", left(), err)
	}
	if _, err := c.sync(t.Context(), queue.Key{Namespace: "ns", Name: "gone"}); err != nil {
		t.Error(err)
	}
}

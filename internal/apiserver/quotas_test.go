package apiserver

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/kubernetes/fake"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// TestQuotaThatTheInformerLacks: a quota bounds what is made after it, however late the informer hears of it.
func TestQuotaThatTheInformerLacks(t *testing.T) {
	const namespace = "shop"
	q, err := newQuotas()
	if err != nil {
		t.Fatal(err)
	}
	q.synced = func() bool { return true }
	q.lister = listers.NewResourceQuotaLister(cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}))
	client := fake.NewClientset()
	q.SetExternalKubeClientSet(client)
	create := func(object runtime.Object, kind, resource string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		return q.Validate(ctx, admission.NewAttributesRecord(object, nil, corev1.SchemeGroupVersion.WithKind(kind), namespace, "x",
			corev1.SchemeGroupVersion.WithResource(resource), "", admission.Create, &metav1.CreateOptions{}, false, nil), nil)
	}
	service := func() error { return create(&corev1.Service{}, "Service", "services") }
	if err := service(); err != nil {
		t.Errorf("without a quota: %v", err)
	}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "q"}}
	if err := create(quota, "ResourceQuota", "resourcequotas"); err != nil {
		t.Errorf("the quota: %v", err)
	}
	if err := service(); err != nil {
		t.Errorf("before the quota is stored: %v", err)
	}
	if _, err := client.CoreV1().ResourceQuotas(namespace).Create(t.Context(), quota, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := service(); !apierrors.IsServerTimeout(err) {
		t.Errorf("the quota was passed by: %v", err)
	}
}

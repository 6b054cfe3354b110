package pod

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

// api answers requests to Pods from an etcd of its own.
type api struct {
	*testing.T
	storage map[string]rest.Storage
}

func serve(t *testing.T) api {
	t.Helper()
	return api{t, registrytest.Stored(t, New(nil))}
}

func (a api) create(change func(*corev1.Pod)) (*corev1.Pod, error) {
	p := pod(change)
	setDefaults(p)
	obj, err := a.storage["pods"].(rest.Creater).Create(request.WithNamespace(a.Context(), "default"), p, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Pod), nil
}

func (a api) get() *corev1.Pod {
	a.Helper()
	obj, err := a.storage["pods"].(rest.Getter).Get(request.WithNamespace(a.Context(), "default"), "p", &metav1.GetOptions{})
	if err != nil {
		a.Fatal(err)
	}
	return obj.(*corev1.Pod)
}

func (a api) bind(change func(*corev1.Binding), options metav1.CreateOptions) error {
	binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n"}}
	if change != nil {
		change(binding)
	}
	_, err := a.storage["pods/binding"].(rest.NamedCreater).Create(request.WithNamespace(a.Context(), "default"), "p", binding, rest.ValidateAllObjectFunc, &options)
	return err
}

func TestBinding(t *testing.T) {
	a := serve(t)
	if err := a.bind(nil, metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a Pod that is not there: %v", err)
	}
	created, err := a.create(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*corev1.Binding)
		want   func(error) bool
	}{
		"other name": {func(b *corev1.Binding) { b.Name = "q" }, apierrors.IsBadRequest},
		"other kind": {func(b *corev1.Binding) { b.Target.Kind = "Pod" }, apierrors.IsInvalid},
		"no node":    {func(b *corev1.Binding) { b.Target.Name = "" }, apierrors.IsInvalid},
		"odd node":   {func(b *corev1.Binding) { b.Target.Name = "A b" }, apierrors.IsInvalid},
		"odd label":  {func(b *corev1.Binding) { b.Labels = map[string]string{"a b": "c"} }, apierrors.IsInvalid},
		"other UID":  {func(b *corev1.Binding) { b.UID = "x" }, apierrors.IsConflict},
		"outdated":   {func(b *corev1.Binding) { b.ResourceVersion = created.ResourceVersion + "0" }, apierrors.IsConflict},
	} {
		if err := a.bind(c.change, metav1.CreateOptions{}); !c.want(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := a.bind(nil, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil || a.get().Spec.NodeName != "" {
		t.Errorf("a dry run: %v, %q", err, a.get().Spec.NodeName)
	}
	err = a.bind(func(b *corev1.Binding) {
		b.UID, b.Annotations, b.Labels = created.UID, map[string]string{"by": "me"}, map[string]string{"zone": "z"}
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	bound := a.get()
	if bound.Spec.NodeName != "n" || bound.Annotations["by"] != "me" || bound.Labels["zone"] != "z" ||
		len(bound.Status.Conditions) != 1 || bound.Status.Conditions[0].Type != corev1.PodScheduled || bound.Status.Conditions[0].Status != corev1.ConditionTrue {
		t.Errorf("bound as %+v", bound)
	}
	if err := a.bind(nil, metav1.CreateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("bound twice: %v", err)
	}
}

func TestGatedIsNotBound(t *testing.T) {
	a := serve(t)
	if _, err := a.create(func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a"}} }); err != nil {
		t.Fatal(err)
	}
	if err := a.bind(nil, metav1.CreateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("bound: %v", err)
	}
}

// A Pod that a node runs is marked first, and goes when the node says so, with no time left.
func TestGracefulDeletion(t *testing.T) {
	a := serve(t)
	deletePod := func(seconds *int64) (*corev1.Pod, bool) {
		t.Helper()
		ctx := request.WithNamespace(t.Context(), "default")
		obj, now, err := a.storage["pods"].(rest.GracefulDeleter).Delete(ctx, "p", rest.ValidateAllObjectFunc, &metav1.DeleteOptions{GracePeriodSeconds: seconds})
		if err != nil {
			t.Fatal(err)
		}
		return obj.(*corev1.Pod), now
	}
	if _, err := a.create(nil); err != nil {
		t.Fatal(err)
	}
	if p, now := deletePod(nil); !now || p.Name != "p" {
		t.Errorf("nobody runs it, and it stays: %v", now)
	}
	if _, err := a.create(func(p *corev1.Pod) { p.Spec.NodeName = "n" }); err != nil {
		t.Fatal(err)
	}
	marked, now := deletePod(nil)
	if now || marked.DeletionTimestamp == nil || *marked.DeletionGracePeriodSeconds != 30 {
		t.Errorf("marked as %+v, %v", marked, now)
	}
	if _, now := deletePod(ptr.To[int64](0)); !now {
		t.Error("it stays although no time is left")
	}
}

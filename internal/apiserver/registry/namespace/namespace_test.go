package namespace

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

// api answers requests to namespaces from an etcd of its own.
type api struct {
	*testing.T
	storage map[string]rest.Storage
}

func serve(t *testing.T) api {
	t.Helper()
	return api{t, registrytest.Stored(t, New())}
}

func (a api) create(ns *corev1.Namespace) *corev1.Namespace {
	a.Helper()
	kind := New()
	kind.Default(ns)
	ctx := request.WithNamespace(a.Context(), "")
	obj, err := a.storage["namespaces"].(rest.Creater).Create(ctx, ns, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if err != nil {
		a.Fatal(err)
	}
	return obj.(*corev1.Namespace)
}

// update changes a namespace through "namespaces" or one of its subresources.
func (a api) update(through string, ns *corev1.Namespace) (*corev1.Namespace, error) {
	New().Default(ns)
	ctx := request.WithNamespace(a.Context(), "")
	obj, _, err := a.storage[through].(rest.Updater).Update(ctx, ns.Name, rest.DefaultUpdatedObjectInfo(ns),
		rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Namespace), nil
}

func (a api) delete(name string, options *metav1.DeleteOptions) (*corev1.Namespace, bool, error) {
	ctx := request.WithNamespace(a.Context(), "")
	obj, now, err := a.storage["namespaces"].(rest.GracefulDeleter).Delete(ctx, name, rest.ValidateAllObjectFunc, options)
	if err != nil {
		return nil, now, err
	}
	ns, _ := obj.(*corev1.Namespace)
	return ns, now, nil
}

func (a api) gone(name string) bool {
	_, err := a.storage["namespaces"].(rest.Getter).Get(request.WithNamespace(a.Context(), ""), name, &metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		a.Fatal(err)
	}
	return err != nil
}

func named(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func TestCreate(t *testing.T) {
	a := serve(t)
	ns := a.create(named("a"))
	if ns.Labels[corev1.LabelMetadataName] != "a" || ns.Status.Phase != corev1.NamespaceActive ||
		!slices.Equal(ns.Spec.Finalizers, []corev1.FinalizerName{corev1.FinalizerKubernetes}) {
		t.Errorf("created as %+v", ns)
	}
	generated := a.create(&corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "g-"},
		Spec:       corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{"example.com/mine"}},
	})
	if generated.Name == "" || generated.Labels[corev1.LabelMetadataName] != generated.Name {
		t.Errorf("generated as %+v", generated)
	}
	if want := []corev1.FinalizerName{"example.com/mine", "kubernetes"}; !slices.Equal(generated.Spec.Finalizers, want) {
		t.Errorf("finalizers are %q, want %q", generated.Spec.Finalizers, want)
	}
}

// A namespace lives from Active through Terminating until the last finalizer, of either list, is gone.
func TestLife(t *testing.T) {
	a := serve(t)
	ns := named("a")
	ns.Finalizers = []string{"example.com/mine"}
	a.create(ns)

	dry, now, err := a.delete("a", &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil || now || dry.Status.Phase != corev1.NamespaceTerminating {
		t.Fatalf("a dry run gave %+v, %v, %v", dry, now, err)
	}
	marked, now, err := a.delete("a", &metav1.DeleteOptions{})
	if err != nil || now {
		t.Fatalf("deleted at once: %v, %v", now, err)
	}
	if marked.Status.Phase != corev1.NamespaceTerminating || marked.DeletionTimestamp == nil || marked.DeletionGracePeriodSeconds != nil {
		t.Errorf("marked as %+v", marked)
	}
	again, _, err := a.delete("a", nil)
	if err != nil || again.ResourceVersion != marked.ResourceVersion {
		t.Errorf("a second delete changed it to %+v, %v", again, err)
	}

	// Reporting on the way must not take the namespace away, although its metadata has no more finalizers.
	again.Finalizers = nil
	if again, err = a.update("namespaces", again); err != nil || a.gone("a") {
		t.Fatalf("gone before its content: %v", err)
	}
	again.Status.Conditions = []corev1.NamespaceCondition{{Type: corev1.NamespaceContentRemaining, Status: corev1.ConditionTrue}}
	if again, err = a.update("namespaces/status", again); err != nil || a.gone("a") {
		t.Fatalf("gone by a status: %v", err)
	}

	again.Spec.Finalizers = nil
	if _, err = a.update("namespaces/finalize", again); err != nil {
		t.Fatal(err)
	}
	if !a.gone("a") {
		t.Error("still there without finalizers")
	}
}

func TestDeletePreconditions(t *testing.T) {
	a := serve(t)
	ns := a.create(named("a"))
	for _, p := range []*metav1.Preconditions{{UID: ptr.To(ns.UID + "x")}, {ResourceVersion: ptr.To(ns.ResourceVersion + "0")}} {
		if _, _, err := a.delete("a", &metav1.DeleteOptions{Preconditions: p}); !apierrors.IsConflict(err) {
			t.Errorf("deleted in spite of %v: %v", p, err)
		}
	}
	if _, _, err := a.delete("a", &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &ns.UID}}); err != nil {
		t.Error(err)
	}
	if _, _, err := a.delete("b", nil); !apierrors.IsNotFound(err) {
		t.Errorf("what is not there: %v", err)
	}
}

func TestPropagation(t *testing.T) {
	policy := func(p metav1.DeletionPropagation) *metav1.DeleteOptions {
		return &metav1.DeleteOptions{PropagationPolicy: &p}
	}
	for _, c := range []struct {
		has, want []string
		options   *metav1.DeleteOptions
	}{
		{[]string{"orphan", "x/y"}, []string{"orphan", "x/y"}, &metav1.DeleteOptions{}},
		{[]string{"x/y"}, []string{"x/y", "orphan"}, policy(metav1.DeletePropagationOrphan)},
		{[]string{"orphan"}, []string{"foregroundDeletion"}, policy(metav1.DeletePropagationForeground)},
		{[]string{"orphan", "foregroundDeletion"}, nil, policy(metav1.DeletePropagationBackground)},
		{nil, []string{"orphan"}, &metav1.DeleteOptions{OrphanDependents: ptr.To(true)}},
		{nil, []string{"foregroundDeletion"}, &metav1.DeleteOptions{OrphanDependents: ptr.To(false)}},
	} {
		if got := propagate(slices.Clone(c.has), c.options); !slices.Equal(got, c.want) {
			t.Errorf("%q with %v becomes %q, want %q", c.has, c.options, got, c.want)
		}
	}
}

func TestRefused(t *testing.T) {
	a := serve(t)
	ns := a.create(named("a"))
	for name, c := range map[string]struct {
		through string
		change  func(*corev1.Namespace)
		causes  []string
	}{
		"label":           {"namespaces", func(ns *corev1.Namespace) { ns.Labels["x"] = "a b" }, []string{"metadata.labels"}},
		"phase":           {"namespaces/status", func(ns *corev1.Namespace) { ns.Status.Phase = corev1.NamespaceTerminating }, []string{"status.Phase"}},
		"finalizer":       {"namespaces/finalize", func(ns *corev1.Namespace) { ns.Spec.Finalizers = []corev1.FinalizerName{"mine"} }, []string{"spec.finalizers[0]"}},
		"ill finalizer":   {"namespaces/finalize", func(ns *corev1.Namespace) { ns.Spec.Finalizers = []corev1.FinalizerName{"a b"} }, []string{"spec.finalizers[0]", "spec.finalizers[0]"}},
		"spec by status":  {"namespaces/status", func(ns *corev1.Namespace) { ns.Spec.Finalizers = nil }, nil},
		"phase by update": {"namespaces", func(ns *corev1.Namespace) { ns.Status.Phase = "Odd" }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			next := ns.DeepCopy()
			next.ResourceVersion = ""
			c.change(next)
			got, err := a.update(c.through, next)
			if c.causes == nil {
				if err != nil || got.Status.Phase != corev1.NamespaceActive || len(got.Spec.Finalizers) != 1 {
					t.Errorf("became %+v, %v", got, err)
				}
				return
			}
			var fields []string
			if status, ok := err.(apierrors.APIStatus); ok && status.Status().Details != nil {
				for _, cause := range status.Status().Details.Causes {
					fields = append(fields, cause.Field)
				}
			}
			if !apierrors.IsInvalid(err) || !slices.Equal(fields, c.causes) {
				t.Errorf("refused because of %q (%v), want %q", fields, err, c.causes)
			}
		})
	}
}

// Namespaces are not deleted by the dozen, and finalize is written only.
func TestVerbs(t *testing.T) {
	a := serve(t)
	if _, ok := a.storage["namespaces"].(rest.CollectionDeleter); ok {
		t.Error("a collection of namespaces can be deleted")
	}
	if _, ok := a.storage["namespaces/finalize"].(rest.Getter); ok {
		t.Error("finalize can be read")
	}
	if _, ok := a.storage["namespaces/status"].(rest.Patcher); !ok {
		t.Error("status cannot be patched")
	}
}

package disruption

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"
	budgets "k8s.io/component-helpers/apps/poddisruptionbudget"

	"portal/internal/apiserver/registry"
)

const (
	// maxPending bounds the evictions that the controller of budgets has not seen yet.
	maxPending = 2000
	// conflicts is how often an eviction is tried again because the Pod has changed meanwhile, pause how long after.
	conflicts = 20
	pause     = 500 * time.Millisecond
	// unseen is how many seconds a client should wait for a budget whose controller has not seen it yet.
	unseen = 10
)

// Evictions is the subresource of Pods by which they are evicted: deleted, if their budget allows one more to be missing. It
// reads and writes Pods and budgets where the API itself keeps them.
type Evictions struct {
	pods         rest.StandardStorage
	podStatus    rest.Updater
	budgets      rest.Lister
	budgetStatus rest.Updater

	now func() time.Time
}

var (
	_ registry.Resource             = &Evictions{}
	_ rest.NamedCreater             = &Evictions{}
	_ rest.Scoper                   = &Evictions{}
	_ rest.GroupVersionKindProvider = &Evictions{}
	_ rest.GroupVersionAcceptor     = &Evictions{}
)

// NewEvictions describes the subresource. It works once it is connected.
func NewEvictions() *Evictions { return &Evictions{now: time.Now} }

// Connect gives it the storage of what it reads and writes; others are not its business.
func (e *Evictions) Connect(version schema.GroupVersion, path string, storage rest.Storage) {
	switch version.WithResource(path) {
	case corev1.SchemeGroupVersion.WithResource("pods"):
		e.pods = storage.(rest.StandardStorage)
	case corev1.SchemeGroupVersion.WithResource("pods/status"):
		e.podStatus = storage.(rest.Updater)
	case policyv1.SchemeGroupVersion.WithResource("poddisruptionbudgets"):
		e.budgets = storage.(rest.Lister)
	case policyv1.SchemeGroupVersion.WithResource("poddisruptionbudgets/status"):
		e.budgetStatus = storage.(rest.Updater)
	}
}

// GroupVersion is that of Pods.
func (e *Evictions) GroupVersion() schema.GroupVersion { return corev1.SchemeGroupVersion }

// Name is the path below that version.
func (e *Evictions) Name() string { return "pods/eviction" }

// AddToScheme has nothing to add.
func (e *Evictions) AddToScheme(*runtime.Scheme) error { return nil }

// Storage is the subresource itself: it stores nothing.
func (e *Evictions) Storage(*runtime.Scheme, generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	return map[string]rest.Storage{e.Name(): e}, nil
}

// New returns an empty Eviction.
func (e *Evictions) New() runtime.Object { return &policyv1.Eviction{} }

// Destroy does nothing.
func (e *Evictions) Destroy() {}

// NamespaceScoped says yes, as for Pods.
func (e *Evictions) NamespaceScoped() bool { return true }

// GroupVersionKind is of another group than Pods.
func (e *Evictions) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return policyv1.SchemeGroupVersion.WithKind("Eviction")
}

// AcceptsGroupVersion says which version of an Eviction can be sent.
func (e *Evictions) AcceptsGroupVersion(version schema.GroupVersion) bool {
	return version == policyv1.SchemeGroupVersion
}

// Create evicts the Pod called name.
func (e *Evictions) Create(ctx context.Context, name string, obj runtime.Object, allowed rest.ValidateObjectFunc,
	options *metav1.CreateOptions) (runtime.Object, error) {
	eviction, ok := obj.(*policyv1.Eviction)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("an Eviction is wanted, not %T", obj))
	}
	if eviction.Name != name {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the Eviction's name is %q, the URL's %q", eviction.Name, name))
	}
	how, err := deleteOptions(eviction, options)
	if err != nil {
		return nil, err
	}
	if allowed != nil {
		if err := allowed(ctx, eviction.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	if err := e.evict(ctx, name, how); err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

// deleteOptions are those of the Eviction, which with the request's says whether anything is done at all.
func deleteOptions(eviction *policyv1.Eviction, options *metav1.CreateOptions) (*metav1.DeleteOptions, error) {
	how := eviction.DeleteOptions
	if how == nil {
		return &metav1.DeleteOptions{DryRun: options.DryRun}, nil
	}
	if unsafe := how.IgnoreStoreReadErrorWithClusterBreakingPotential; unsafe != nil && *unsafe {
		return nil, apierrors.NewInvalid(policyv1.SchemeGroupVersion.WithKind("Eviction").GroupKind(), eviction.Name, field.ErrorList{
			field.Invalid(field.NewPath("deleteOptions", "ignoreStoreReadErrorWithClusterBreakingPotential"), true, "cannot be asked for when a Pod is evicted"),
		})
	}
	switch {
	case len(how.DryRun) == 0:
		how.DryRun = options.DryRun
	case len(options.DryRun) > 0 && !slices.Equal(how.DryRun, options.DryRun):
		return nil, apierrors.NewBadRequest(fmt.Sprintf("dryRun is %q in the URL and %q in deleteOptions", options.DryRun, how.DryRun))
	}
	return how, nil
}

func (e *Evictions) evict(ctx context.Context, name string, how *metav1.DeleteOptions) error {
	for tries := 1; ; tries++ {
		again, err := e.try(ctx, name, how)
		if !again || !apierrors.IsConflict(err) || tries == conflicts {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// try evicts a Pod in its present state. A conflict may mean that it has another state now; again says that nothing was used
// up yet, and that whoever asks did not insist on a state.
func (e *Evictions) try(ctx context.Context, name string, how *metav1.DeleteOptions) (again bool, err error) {
	obj, err := e.pods.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	pod := obj.(*corev1.Pod)
	if err := meets(pod, how.Preconditions); err != nil {
		return false, err // before anything is used up
	}
	insists := how.Preconditions != nil && how.Preconditions.ResourceVersion != nil
	switch phase := pod.Status.Phase; {
	case phase == corev1.PodSucceeded || phase == corev1.PodFailed || pod.DeletionTimestamp != nil:
		return !insists, e.delete(ctx, name, how)
	case phase == corev1.PodPending:
		// It is no disruption as long as it stays so.
		return !insists, e.delete(ctx, name, inState(how, pod))
	}
	budget, err := e.budgetOf(ctx, pod)
	if err != nil {
		return false, err
	}
	if budget == nil {
		return false, e.delete(ctx, name, how)
	}
	if !ready(pod) && unhealthyMayGo(budget) {
		// Nobody misses it, as long as it is not ready.
		err := e.delete(ctx, name, inState(how, pod))
		if apierrors.IsConflict(err) && !insists {
			return false, tooMany(unseen, fmt.Sprintf("Pod %s changed while PodDisruptionBudget %s was consulted", name, budget.Name))
		}
		return false, err
	}
	if err := e.useUp(ctx, budget.Name, name, how.DryRun); err != nil {
		return false, err
	}
	return false, e.delete(ctx, name, how)
}

// inState has a deletion happen only if the Pod is still as it was.
func inState(how *metav1.DeleteOptions, pod *corev1.Pod) *metav1.DeleteOptions {
	out := how.DeepCopy()
	if out.Preconditions == nil {
		out.Preconditions = &metav1.Preconditions{}
	}
	if out.Preconditions.ResourceVersion == nil {
		out.Preconditions.ResourceVersion = &pod.ResourceVersion
	}
	return out
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// unhealthyMayGo says whether Pods that are not ready may be evicted without using up the budget.
func unhealthyMayGo(b *budget) bool {
	if policy := b.Spec.UnhealthyPodEvictionPolicy; policy != nil && *policy == policyv1.AlwaysAllow {
		return true
	}
	return b.Status.CurrentHealthy >= b.Status.DesiredHealthy && b.Status.DesiredHealthy > 0
}

// budgetOf is the budget that a Pod is counted in, if there is one.
func (e *Evictions) budgetOf(ctx context.Context, pod *corev1.Pod) (*budget, error) {
	obj, err := e.budgets.List(ctx, &metainternal.ListOptions{})
	if err != nil {
		return nil, err
	}
	list, ok := obj.(*policyv1.PodDisruptionBudgetList)
	if !ok {
		return nil, fmt.Errorf("budgets came as %T", obj)
	}
	var found *budget
	for i := range list.Items {
		selector, err := metav1.LabelSelectorAsSelector(list.Items[i].Spec.Selector)
		if err != nil || !selector.Matches(labels.Set(pod.Labels)) {
			continue // what is no selector selects nothing
		}
		if found != nil {
			return nil, &apierrors.StatusError{ErrStatus: metav1.Status{
				Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError,
				Message: fmt.Sprintf("Pod %s is in several PodDisruptionBudgets (%s, %s): a Pod with more than one cannot be evicted", pod.Name, found.Name, list.Items[i].Name),
			}}
		}
		found = &list.Items[i]
	}
	return found, nil
}

// useUp takes one of the disruptions that a budget allows. The store tries it on the latest state of the budget, so that two
// evictions cannot take the same one.
func (e *Evictions) useUp(ctx context.Context, name, pod string, dryRun []string) error {
	take := rest.DefaultUpdatedObjectInfo(nil, func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		b := old.DeepCopyObject().(*budget)
		if err := refusal(b); err != nil {
			return nil, err
		}
		b.Status.DisruptionsAllowed--
		if b.Status.DisruptionsAllowed == 0 {
			budgets.UpdateDisruptionAllowedCondition(b)
		}
		if b.Status.DisruptedPods == nil {
			b.Status.DisruptedPods = map[string]metav1.Time{}
		}
		// The controller takes the Pod for gone until it is, and gives up waiting after a while.
		b.Status.DisruptedPods[pod] = metav1.NewTime(e.now())
		return b, nil
	})
	_, _, err := e.budgetStatus.Update(ctx, name, take, rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{DryRun: dryRun})
	return err
}

// refusal says why a budget allows no disruption.
func refusal(b *budget) error {
	switch {
	case b.Status.ObservedGeneration < b.Generation:
		return tooMany(unseen, fmt.Sprintf("PodDisruptionBudget %s is new or was changed, and has not been counted yet", b.Name))
	case b.Status.DisruptionsAllowed < 0:
		return forbidden(b, "it allows less than none")
	case len(b.Status.DisruptedPods) > maxPending:
		return forbidden(b, "too many evictions wait to be counted")
	case b.Status.DisruptionsAllowed == 0:
		return tooMany(0, whyNone(b))
	}
	return nil
}

func whyNone(b *budget) string {
	condition := meta.FindStatusCondition(b.Status.Conditions, policyv1.DisruptionAllowedCondition)
	says := condition != nil && condition.Status == metav1.ConditionFalse && condition.Message != ""
	switch {
	case says && condition.Reason == policyv1.SyncFailedReason:
		return fmt.Sprintf("PodDisruptionBudget %s could not be counted: %s", b.Name, condition.Message)
	case b.Status.CurrentHealthy <= b.Status.DesiredHealthy:
		return fmt.Sprintf("PodDisruptionBudget %s needs %d healthy Pods and has %d", b.Name, b.Status.DesiredHealthy, b.Status.CurrentHealthy)
	case says:
		return fmt.Sprintf("PodDisruptionBudget %s allows none now (%s): %s", b.Name, condition.Reason, condition.Message)
	}
	return fmt.Sprintf("PodDisruptionBudget %s allows none now", b.Name)
}

// tooMany asks a client to try again, after so many seconds if they are not 0.
func tooMany(seconds int, why string) error {
	err := apierrors.NewTooManyRequests("the Pod cannot be evicted now: its disruption budget does not allow it", seconds)
	return withCause(err, why)
}

func forbidden(b *budget, why string) error {
	err := apierrors.NewForbidden(policyv1.Resource("poddisruptionbudgets"), b.Name, errors.New(why))
	return withCause(err, fmt.Sprintf("PodDisruptionBudget %s: %s", b.Name, why))
}

func withCause(err *apierrors.StatusError, why string) error {
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: why})
	return err
}

// delete deletes a Pod, after it was marked as one that is disrupted.
func (e *Evictions) delete(ctx context.Context, name string, how *metav1.DeleteOptions) error {
	if !dryrun.IsDryRun(how.DryRun) {
		marked, err := e.mark(ctx, name, how.Preconditions)
		if err != nil {
			return err
		}
		if how.Preconditions != nil && how.Preconditions.ResourceVersion != nil {
			how = how.DeepCopy()
			how.Preconditions.ResourceVersion = &marked.ResourceVersion
		}
	}
	_, _, err := e.pods.Delete(ctx, name, rest.ValidateAllObjectFunc, how)
	return err
}

// meets says whether a Pod is the one that is expected.
func meets(pod *corev1.Pod, must *metav1.Preconditions) error {
	switch {
	case must == nil:
	case must.UID != nil && *must.UID != pod.UID:
		return apierrors.NewConflict(corev1.Resource("pods"), pod.Name, fmt.Errorf("its uid is %s, not %s", pod.UID, *must.UID))
	case must.ResourceVersion != nil && *must.ResourceVersion != pod.ResourceVersion:
		return apierrors.NewConflict(corev1.Resource("pods"), pod.Name, fmt.Errorf("its resourceVersion is %s, not %s", pod.ResourceVersion, *must.ResourceVersion))
	}
	return nil
}

// mark sets the Pod's condition DisruptionTarget, if it is what is expected.
func (e *Evictions) mark(ctx context.Context, name string, must *metav1.Preconditions) (*corev1.Pod, error) {
	set := rest.DefaultUpdatedObjectInfo(nil, func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		pod := old.DeepCopyObject().(*corev1.Pod)
		if err := meets(pod, must); err != nil {
			return nil, err
		}
		setCondition(&pod.Status, corev1.PodCondition{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "EvictionByEvictionAPI", Message: "The Pod is being evicted through the API.",
			LastTransitionTime: metav1.NewTime(e.now()),
		})
		return pod, nil
	})
	obj, _, err := e.podStatus.Update(ctx, name, set, rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Pod), nil
}

// setCondition sets a condition, and its time if its status changes.
func setCondition(status *corev1.PodStatus, condition corev1.PodCondition) {
	for i := range status.Conditions {
		if had := &status.Conditions[i]; had.Type == condition.Type {
			if had.Status == condition.Status {
				condition.LastTransitionTime = had.LastTransitionTime
			}
			*had = condition
			return
		}
	}
	status.Conditions = append(status.Conditions, condition)
}

package aggregation

import (
	"context"
	"errors"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"portal/internal/apiserver/registry/apiservice"
)

// automanaged marks the APIServices that a server keeps for what it serves itself: those of built-in group versions are written when it
// starts, those of custom resources come and go.
const (
	automanaged = "kube-aggregator.kubernetes.io/automanaged"
	onStart     = "onstart"
	whileServed = "true"
)

// priority orders groups and, within a group, versions: clients prefer higher ones.
type priority struct{ group, version int32 }

// known are the priorities that Kubernetes gives to its own group versions.
var known = map[schema.GroupVersion]priority{
	{Version: "v1"}:                                        {18000, 1},
	{Group: "apps", Version: "v1"}:                         {17800, 15},
	{Group: "events.k8s.io", Version: "v1"}:                {17750, 15},
	{Group: "authentication.k8s.io", Version: "v1"}:        {17700, 15},
	{Group: "authorization.k8s.io", Version: "v1"}:         {17600, 15},
	{Group: "autoscaling", Version: "v1"}:                  {17500, 15},
	{Group: "autoscaling", Version: "v2"}:                  {17500, 30},
	{Group: "batch", Version: "v1"}:                        {17400, 15},
	{Group: "certificates.k8s.io", Version: "v1"}:          {17300, 15},
	{Group: "networking.k8s.io", Version: "v1"}:            {17200, 15},
	{Group: "policy", Version: "v1"}:                       {17100, 15},
	{Group: "rbac.authorization.k8s.io", Version: "v1"}:    {17000, 15},
	{Group: "storage.k8s.io", Version: "v1"}:               {16800, 15},
	{Group: "apiextensions.k8s.io", Version: "v1"}:         {16700, 15},
	{Group: "admissionregistration.k8s.io", Version: "v1"}: {16700, 15},
	{Group: "scheduling.k8s.io", Version: "v1"}:            {16600, 15},
	{Group: "coordination.k8s.io", Version: "v1"}:          {16500, 15},
	{Group: "node.k8s.io", Version: "v1"}:                  {16300, 15},
	{Group: "discovery.k8s.io", Version: "v1"}:             {16200, 15},
	{Group: "flowcontrol.apiserver.k8s.io", Version: "v1"}: {16100, 21},
	{Group: "storagemigration.k8s.io", Version: "v1"}:      {15800, 15},
	// Before all others, and without an APIService of its own.
	apiregistrationv1.SchemeGroupVersion: {20001, 15},
}

// Those of a built-in group version that Kubernetes does not have, and of custom resources.
var (
	unknown = priority{15000, 9}
	custom  = priority{1000, 100}
)

// priorities are those of a built-in group version.
func priorities(version schema.GroupVersion) (group, within int32) {
	p, ok := known[version]
	if !ok {
		p = unknown
	}
	return p.group, p.version
}

func nameOf(version schema.GroupVersion) string { return version.Version + "." + version.Group }

// local is the APIService of a group version that the server serves itself.
func local(version schema.GroupVersion, p priority, managed string) *apiService {
	return &apiService{
		ObjectMeta: metav1.ObjectMeta{Name: nameOf(version), Labels: map[string]string{automanaged: managed}},
		Spec: apiregistrationv1.APIServiceSpec{
			Group: version.Group, Version: version.Version, GroupPriorityMinimum: p.group, VersionPriority: p.version,
		},
	}
}

// wanted are the APIServices that the server keeps. It is false if those of custom resources are not known yet.
func (a *Aggregator) wanted() (map[string]*apiService, bool) {
	out := map[string]*apiService{}
	versions, complete := a.own.Custom()
	for _, version := range versions {
		out[nameOf(version)] = local(version, custom, whileServed)
	}
	for _, version := range a.own.BuiltIn {
		if version != apiregistrationv1.SchemeGroupVersion {
			group, within := priorities(version)
			out[nameOf(version)] = local(version, priority{group, within}, onStart)
		}
	}
	return out, complete
}

// writers is how many APIServices are written at a time: at the first start there are some twenty.
const writers = 4

// settled is how old an APIService must be to be deleted: another server of the cluster may have seen its definition earlier.
const settled = 5 * time.Second

// register makes the objects say what the server serves itself.
func (a *Aggregator) register(ctx context.Context) error {
	a.registering.Lock()
	defer a.registering.Unlock()
	if !a.informer.HasSynced() {
		return errors.New("APIServices have not been read yet")
	}
	wanted, complete := a.wanted()
	var work []func() error
	for name, want := range wanted {
		have := a.object(name)
		if write := a.correct(ctx, have, want); write != nil {
			work = append(work, write)
		}
	}
	if complete {
		for _, obj := range a.informer.GetStore().List() {
			have := obj.(*apiService)
			managed := have.Labels[automanaged]
			// Another server of the cluster may serve what this one does not: only at its start is it sure to be older.
			if wanted[have.Name] == nil && have.Spec.Service == nil && (managed == whileServed || managed == onStart && !a.started) {
				if age := time.Since(have.CreationTimestamp.Time); managed == whileServed && age < settled {
					time.AfterFunc(settled-max(age, 0), a.Check)
					continue
				}
				work = append(work, func() error {
					return a.Client.Delete(ctx, have.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &have.UID}})
				})
			}
		}
		a.started = true
	}
	return together(work)
}

// correct is what to write so that an APIService is as it should be, or nil. One that an administrator made stays, unless it is about a
// built-in group version.
func (a *Aggregator) correct(ctx context.Context, have, want *apiService) func() error {
	switch {
	case have == nil:
		return func() error {
			_, err := a.Client.Create(ctx, want, metav1.CreateOptions{})
			return err
		}
	case have.DeletionTimestamp != nil && len(have.Finalizers) == 0:
		return nil
	case have.Labels[automanaged] == "" && !a.builtIn[versionOf(want)]:
		return nil
	case sameSpec(&have.Spec, &want.Spec) && have.Labels[automanaged] == want.Labels[automanaged]:
		return nil
	}
	next := have.DeepCopy()
	next.Spec = want.Spec
	if next.Labels == nil {
		next.Labels = map[string]string{}
	}
	next.Labels[automanaged] = want.Labels[automanaged]
	return func() error {
		updated, err := a.Client.Update(ctx, next, metav1.UpdateOptions{})
		if err != nil || have.Spec.Service == nil {
			return err
		}
		updated.Status.Conditions = []apiregistrationv1.APIServiceCondition{apiservice.Local()}
		_, err = a.Client.UpdateStatus(ctx, updated, metav1.UpdateOptions{})
		return err
	}
}

func sameSpec(a, b *apiregistrationv1.APIServiceSpec) bool {
	return a.Service == nil && b.Service == nil && a.Group == b.Group && a.Version == b.Version &&
		a.GroupPriorityMinimum == b.GroupPriorityMinimum && a.VersionPriority == b.VersionPriority
}

// together does all work, a few at a time. What another server did at the same time is no mistake.
func together(work []func() error) error {
	var group sync.WaitGroup
	todo := make(chan func() error)
	var mu sync.Mutex
	var errs []error
	for range min(writers, len(work)) {
		group.Go(func() {
			for do := range todo {
				if err := do(); err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	for _, do := range work {
		todo <- do
	}
	close(todo)
	group.Wait()
	return errors.Join(errs...)
}

package authz

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"portal/internal/ensure"
	"portal/internal/rbac"
	"portal/internal/rbac/policy"
)

// Defaults are the roles and bindings that every cluster has. Rules and subjects that somebody removed come back, those
// that somebody added stay, and an object annotated with rbac.authorization.kubernetes.io/autoupdate: "false" is left alone.
func Defaults(client kubernetes.Interface, p *policy.Policy) []ensure.Object {
	v1, namespaces := client.RbacV1(), p.Namespaces()
	all := metav1.ListOptions{ResourceVersion: "0"} // from the watch cache
	labelled := metav1.ListOptions{LabelSelector: policy.Selector}
	return []ensure.Object{{
		Name: "default clusterroles",
		Ensure: func(ctx context.Context) error {
			have, err := v1.ClusterRoles().List(ctx, all)
			return ensureEach(ctx, v1.ClusterRoles(), have.Items, err, p.ClusterRoles, repairClusterRole)
		},
		Watch: func(ctx context.Context) (watch.Interface, error) { return v1.ClusterRoles().Watch(ctx, labelled) },
	}, {
		Name: "default clusterrolebindings",
		Ensure: func(ctx context.Context) error {
			have, err := v1.ClusterRoleBindings().List(ctx, all)
			return ensureEach(ctx, v1.ClusterRoleBindings(), have.Items, err, p.ClusterRoleBindings, func(have, want *rbacv1.ClusterRoleBinding) repair {
				return repairBinding(have.RoleRef, &have.Subjects, want.RoleRef, want.Subjects)
			})
		},
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return v1.ClusterRoleBindings().Watch(ctx, labelled)
		},
	}, {
		Name: "default roles",
		Ensure: eachNamespace(namespaces, func(ctx context.Context, namespace string) error {
			have, err := v1.Roles(namespace).List(ctx, all)
			return ensureEach(ctx, v1.Roles(namespace), have.Items, err, in(p.Roles, namespace), func(have, want *rbacv1.Role) repair {
				rules, changed := policy.RepairRules(have.Rules, want.Rules)
				have.Rules = rules
				return repairIf(changed)
			})
		}),
		Watch: func(ctx context.Context) (watch.Interface, error) { return v1.Roles("").Watch(ctx, labelled) },
	}, {
		Name: "default rolebindings",
		Ensure: eachNamespace(namespaces, func(ctx context.Context, namespace string) error {
			have, err := v1.RoleBindings(namespace).List(ctx, all)
			return ensureEach(ctx, v1.RoleBindings(namespace), have.Items, err, in(p.RoleBindings, namespace), func(have, want *rbacv1.RoleBinding) repair {
				return repairBinding(have.RoleRef, &have.Subjects, want.RoleRef, want.Subjects)
			})
		}),
		Watch: func(ctx context.Context) (watch.Interface, error) { return v1.RoleBindings("").Watch(ctx, labelled) },
	}}
}

// Known waits until requests are authorized by the whole policy: what was written a moment ago comes back by a watch. It gives
// up when ctx ends.
func Known(ctx context.Context, index *rbac.Index, p *policy.Policy) {
	known := func() bool {
		for i := range p.ClusterRoles {
			if !index.Has("", p.ClusterRoles[i].Name, "") {
				return false
			}
		}
		for i := range p.ClusterRoleBindings {
			if !index.Has("", "", p.ClusterRoleBindings[i].Name) {
				return false
			}
		}
		for i := range p.Roles {
			if !index.Has(p.Roles[i].Namespace, p.Roles[i].Name, "") {
				return false
			}
		}
		for i := range p.RoleBindings {
			if !index.Has(p.RoleBindings[i].Namespace, "", p.RoleBindings[i].Name) {
				return false
			}
		}
		return true
	}
	for !known() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// eachNamespace does something in every namespace that has default roles, whatever becomes of the others.
func eachNamespace(namespaces []string, do func(ctx context.Context, namespace string) error) func(context.Context) error {
	return func(ctx context.Context) (err error) {
		for _, namespace := range namespaces {
			err = errors.Join(err, do(ctx, namespace))
		}
		return err
	}
}

// repair is what a stored default needs.
type repair int

const (
	nothing repair = iota
	update
	// replace deletes and creates: a binding can't change its role.
	replace
)

func repairIf(changed bool) repair {
	if changed {
		return update
	}
	return nothing
}

func repairClusterRole(have, want *rbacv1.ClusterRole) repair {
	if want.AggregationRule != nil {
		selectors, changed := policy.RepairSelectors(have.AggregationRule, want.AggregationRule)
		have.AggregationRule = selectors
		return repairIf(changed) // its rules are the aggregation's
	}
	rules, changed := policy.RepairRules(have.Rules, want.Rules)
	have.Rules = rules
	return repairIf(changed)
}

func repairBinding(ref rbacv1.RoleRef, have *[]rbacv1.Subject, wantRef rbacv1.RoleRef, want []rbacv1.Subject) repair {
	if ref != wantRef {
		return replace
	}
	subjects, changed := policy.RepairSubjects(*have, want)
	*have = subjects
	return repairIf(changed)
}

// pointer is a pointer to an API type.
type pointer[T any] interface {
	*T
	metav1.Object
}

func in[T any, P pointer[T]](list []T, namespace string) (out []T) {
	for i := range list {
		if P(&list[i]).GetNamespace() == namespace {
			out = append(out, list[i])
		}
	}
	return out
}

// writer is the part of a typed client that writes.
type writer[P any] interface {
	Create(context.Context, P, metav1.CreateOptions) (P, error)
	Update(context.Context, P, metav1.UpdateOptions) (P, error)
	Delete(context.Context, string, metav1.DeleteOptions) error
}

// ensureEach creates what is missing and repairs what is there, whatever becomes of the others. err is that of the list.
func ensureEach[T any, P pointer[T]](ctx context.Context, c writer[P], have []T, err error, want []T, mend func(have, want P) repair) error {
	if err != nil {
		return err
	}
	stored := map[string]P{}
	for i := range have {
		stored[P(&have[i]).GetName()] = &have[i]
	}
	// Several at a time: the first start creates all of them before the server is ready.
	errs := make([]error, len(want))
	var group errgroup.Group
	group.SetLimit(16)
	for i := range want {
		group.Go(func() error {
			w := P(&want[i])
			if err := unlessRaced(ensureOne(ctx, c, stored[w.GetName()], w, mend)); err != nil {
				errs[i] = fmt.Errorf("%s: %w", w.GetName(), err)
			}
			return nil
		})
	}
	_ = group.Wait()
	return errors.Join(errs...)
}

func ensureOne[T any, P pointer[T]](ctx context.Context, c writer[P], have, want P, mend func(have, want P) repair) error {
	if have == nil {
		_, err := c.Create(ctx, want, metav1.CreateOptions{})
		return err
	}
	if policy.Kept(have) {
		return nil
	}
	needed := mend(have, want)
	if policy.RepairMarks(have, want) {
		needed = max(needed, update)
	}
	switch needed {
	case update:
		_, err := c.Update(ctx, have, metav1.UpdateOptions{})
		return err
	case replace:
		uid := have.GetUID()
		if err := c.Delete(ctx, want.GetName(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}); err != nil {
			return err
		}
		_, err := c.Create(ctx, want, metav1.CreateOptions{})
		return err
	}
	return nil
}

// unlessRaced drops errors which say that another server wrote the same first. The next check sees what it wrote.
func unlessRaced(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

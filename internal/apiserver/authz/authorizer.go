// Package authz decides requests to the API by roles: it connects the index of portal/internal/rbac with the API server, and
// keeps the default roles and bindings right. Who a user is, it does not know.
package authz

import (
	"context"
	"errors"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"portal/internal/rbac"
)

// Authorizer decides what a request may do: members of system:masters everything, others what their roles allow.
type Authorizer struct{ Index *rbac.Index }

var (
	_ authorizer.Authorizer   = Authorizer{}
	_ authorizer.RuleResolver = Authorizer{}
)

// Authorize has no opinion on what no role allows, so that another authorizer could allow it.
func (z Authorizer) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	who := a.GetUser()
	if who == nil {
		return authorizer.DecisionDeny, "the request has no user", nil
	}
	if slices.Contains(who.GetGroups(), user.SystemPrivilegedGroup) {
		return authorizer.DecisionAllow, "", nil
	}
	reason, allowed, missing := z.Index.Authorize(rbac.User{Name: who.GetName(), Groups: who.GetGroups()}, &rbac.Request{
		Verb: a.GetVerb(), NonResource: !a.IsResourceRequest(), Path: a.GetPath(), Namespace: a.GetNamespace(),
		APIGroup: a.GetAPIGroup(), Resource: a.GetResource(), Subresource: a.GetSubresource(), Name: a.GetName(),
	})
	if allowed {
		return authorizer.DecisionAllow, reason, nil
	}
	if missing != nil {
		reason = "RBAC: " + missing.Error()
	}
	return authorizer.DecisionNoOpinion, reason, nil
}

// ConditionsAwareAuthorize is Authorize: roles have no conditions.
func (z Authorizer) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(z.Authorize(ctx, a))
}

// EvaluateConditions denies: roles have no conditions.
func (Authorizer) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData,
) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists what a user may do in a namespace, for `kubectl auth can-i --list`.
func (z Authorizer) RulesFor(_ context.Context, who user.Info, namespace string,
) (resources []authorizer.ResourceRuleInfo, paths []authorizer.NonResourceRuleInfo, incomplete bool, err error) {
	rules, err := z.Index.Rules(rbac.User{Name: who.GetName(), Groups: who.GetGroups()}, namespace)
	for _, r := range rules {
		if len(r.Resources) > 0 {
			resources = append(resources, &authorizer.DefaultResourceRuleInfo{
				Verbs: r.Verbs, APIGroups: r.APIGroups, Resources: r.Resources, ResourceNames: r.ResourceNames,
			})
		}
		if len(r.NonResourceURLs) > 0 {
			paths = append(paths, &authorizer.DefaultNonResourceRuleInfo{Verbs: r.Verbs, NonResourceURLs: r.NonResourceURLs})
		}
	}
	// A role that is missing grants nothing: the list is complete without it.
	return resources, paths, false, err
}

// Follow keeps the index what the API has. The informers run when their factory does.
func Follow(factory informers.SharedInformerFactory, index *rbac.Index) error {
	v1 := factory.Rbac().V1()
	_, roles := v1.Roles().Informer().AddEventHandler(follow(
		func(r *rbacv1.Role) { index.SetRole(r.Namespace, r.Name, r.Rules) },
		func(r *rbacv1.Role) { index.DeleteRole(r.Namespace, r.Name) }))
	_, clusterRoles := v1.ClusterRoles().Informer().AddEventHandler(follow(
		func(r *rbacv1.ClusterRole) { index.SetRole("", r.Name, r.Rules) },
		func(r *rbacv1.ClusterRole) { index.DeleteRole("", r.Name) }))
	_, bindings := v1.RoleBindings().Informer().AddEventHandler(follow(
		func(b *rbacv1.RoleBinding) { index.SetBinding(b.Namespace, b.Name, b.RoleRef, b.Subjects) },
		func(b *rbacv1.RoleBinding) { index.DeleteBinding(b.Namespace, b.Name) }))
	_, clusterBindings := v1.ClusterRoleBindings().Informer().AddEventHandler(follow(
		func(b *rbacv1.ClusterRoleBinding) { index.SetBinding("", b.Name, b.RoleRef, b.Subjects) },
		func(b *rbacv1.ClusterRoleBinding) { index.DeleteBinding("", b.Name) }))
	return errors.Join(roles, clusterRoles, bindings, clusterBindings)
}

// follow calls set for every object that is there and remove for every one that has gone.
func follow[T any](set, remove func(*T)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { set(obj.(*T)) },
		UpdateFunc: func(_, obj any) { set(obj.(*T)) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if o, ok := obj.(*T); ok {
				remove(o)
			}
		},
	}
}

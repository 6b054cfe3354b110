package rbac

import (
	"context"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/rbac"
)

// Guard keeps users from granting what they don't have themselves.
type Guard struct {
	Index      *rbac.Index
	Authorizer authorizer.UnconditionalAuthorizer
}

// check says why a user may not write an object; old is nil on create.
type check func(ctx context.Context, obj, old runtime.Object) error

// protect puts a check before every write of a resource.
func (g *Guard) protect(storage map[string]rest.Storage, plural string, c check) error {
	served, ok := storage[plural].(*registry.REST)
	if !ok {
		return fmt.Errorf("%s has no storage to protect", plural)
	}
	storage[plural] = &guarded{served, c}
	return nil
}

// guarded is a resource whose writes are checked.
type guarded struct {
	*registry.REST
	check check
}

// Unguarded is the resource below the check.
func (s *guarded) Unguarded() *registry.REST { return s.REST }

func (s *guarded) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions,
) (runtime.Object, error) {
	if err := s.check(ctx, obj, nil); err != nil {
		return nil, err
	}
	return s.REST.Create(ctx, obj, validate, options)
}

// Update checks the object as it would be stored. That covers patches, server-side apply and creation by PUT.
func (s *guarded) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, force bool, options *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	checked := rest.WrapUpdatedObjectInfo(info, func(ctx context.Context, obj, old runtime.Object) (runtime.Object, error) {
		if onlyReleases(obj, old) {
			return obj, nil
		}
		return obj, s.check(ctx, obj, old)
	})
	return s.REST.Update(ctx, name, checked, create, update, force, options)
}

// onlyReleases says whether an update changes nothing but what keeps an object from being deleted, which the garbage
// collector must be able to do to every role.
func onlyReleases(obj, old runtime.Object) bool {
	before, err := meta.Accessor(old)
	if err != nil || before.GetUID() == "" {
		return false
	}
	same := obj.DeepCopyObject()
	now, err := meta.Accessor(same)
	if err != nil {
		return false
	}
	now.SetFinalizers(before.GetFinalizers())
	now.SetOwnerReferences(before.GetOwnerReferences())
	now.SetManagedFields(before.GetManagedFields())
	return equality.Semantic.DeepEqual(same, old)
}

// mayGrant says why a user may not write a role with these rules: they must have all of them, or be allowed to escalate. A
// right to escalate roles of some names is none to create them: a POST has no name in its path.
func (g *Guard) mayGrant(ctx context.Context, resource, namespace, name string, rules []rbacv1.PolicyRule) error {
	who, err := userOf(ctx)
	if err != nil || g.privileged(who) {
		return err
	}
	asked, ok := request.RequestInfoFrom(ctx)
	if ok && g.allowed(ctx, who, "escalate", resource, namespace, asked.Name) {
		return nil
	}
	return g.covered(who, resource, namespace, name, rules)
}

// mayBind says why a user may not bind a role: they must have all that it allows, or be allowed to bind it.
func (g *Guard) mayBind(ctx context.Context, resource, namespace, name string, ref rbacv1.RoleRef) error {
	who, err := userOf(ctx)
	if err != nil || g.privileged(who) || g.allowed(ctx, who, "bind", pluralOf(ref), namespace, ref.Name) {
		return err
	}
	rules, ok := g.Index.RoleRules(namespace, ref)
	if !ok {
		return apierrors.NewNotFound(group(pluralOf(ref)), ref.Name)
	}
	return g.covered(who, resource, namespace, name, rules)
}

func (g *Guard) covered(who user.Info, resource, namespace, name string, rules []rbacv1.PolicyRule) error {
	owned, _ := g.Index.Rules(rbac.User{Name: who.GetName(), Groups: who.GetGroups()}, namespace)
	missing := rbac.Missing(owned, rules)
	if len(missing) == 0 {
		return nil
	}
	var list []string
	for i, m := range missing {
		if i == 10 {
			list = append(list, fmt.Sprintf("and %d more", len(missing)-i))
			break
		}
		list = append(list, describe(m))
	}
	return apierrors.NewForbidden(group(resource), name,
		fmt.Errorf("user %q can grant only permissions they have themselves, and lacks: %s", who.GetName(), strings.Join(list, "; ")))
}

func describe(r rbacv1.PolicyRule) string {
	if len(r.NonResourceURLs) > 0 {
		return r.Verbs[0] + " " + r.NonResourceURLs[0]
	}
	out := r.Verbs[0] + " " + r.Resources[0]
	if r.APIGroups[0] != "" {
		out += "." + r.APIGroups[0]
	}
	if len(r.ResourceNames) > 0 {
		out += fmt.Sprintf(" %q", r.ResourceNames[0])
	}
	return out
}

func (g *Guard) privileged(who user.Info) bool {
	return slices.Contains(who.GetGroups(), user.SystemPrivilegedGroup)
}

func (g *Guard) allowed(ctx context.Context, who user.Info, verb, resource, namespace, name string) bool {
	decision, _, _ := g.Authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: who, Verb: verb, APIGroup: rbacv1.GroupName, APIVersion: "*", Resource: resource, Namespace: namespace, Name: name,
		ResourceRequest: true,
	})
	return decision == authorizer.DecisionAllow
}

func userOf(ctx context.Context) (user.Info, error) {
	who, ok := request.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewForbidden(group(""), "", fmt.Errorf("the request has no user"))
	}
	return who, nil
}

func pluralOf(ref rbacv1.RoleRef) string {
	if ref.Kind == "ClusterRole" {
		return "clusterroles"
	}
	return "roles"
}

func group(resource string) schema.GroupResource {
	return schema.GroupResource{Group: rbacv1.GroupName, Resource: resource}
}

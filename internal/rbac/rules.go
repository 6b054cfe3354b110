package rbac

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// Request is what somebody wants to do: something with a resource, or with a path.
type Request struct {
	Verb string
	// NonResource requests have a Path and nothing of what follows.
	NonResource bool
	Path        string

	Namespace, APIGroup, Resource, Subresource, Name string
}

// Allows says whether one rule allows a request.
func Allows(rule *rbacv1.PolicyRule, r *Request) bool {
	if !has(rule.Verbs, r.Verb) {
		return false
	}
	if r.NonResource {
		return slices.ContainsFunc(rule.NonResourceURLs, func(pattern string) bool { return pathCovers(pattern, r.Path) })
	}
	return has(rule.APIGroups, r.APIGroup) &&
		resourcesCover(rule.Resources, r.Resource, r.Subresource) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, r.Name))
}

const all = rbacv1.ResourceAll

// has says whether a list has a value or the star that stands for all.
func has(list []string, value string) bool {
	return slices.Contains(list, all) || slices.Contains(list, value)
}

// resourcesCover knows three forms: "*", "pods" or "pods/log" as it is, and "*/scale" for that subresource of everything.
func resourcesCover(list []string, resource, subresource string) bool {
	full := resource
	if subresource != "" {
		full += "/" + subresource
	}
	return slices.ContainsFunc(list, func(pattern string) bool {
		return pattern == all || pattern == full || subresource != "" && pattern == "*/"+subresource
	})
}

// pathCovers says whether a pattern, a path or a prefix with a star behind it, covers a path or a narrower pattern.
func pathCovers(pattern, path string) bool {
	if pattern == rbacv1.NonResourceAll || pattern == path {
		return true
	}
	prefix, wild := strings.CutSuffix(pattern, "*")
	return wild && strings.HasPrefix(path, strings.TrimRight(prefix, "*"))
}

// Missing are the parts of the wanted rules that the owned rules don't cover, split so that each has one verb, one
// resource or path, and one name at most. Somebody may grant only what they have: nothing may be missing.
func Missing(owned, wanted []rbacv1.PolicyRule) (out []rbacv1.PolicyRule) {
	for _, w := range wanted {
		for _, part := range split(w) {
			if !slices.ContainsFunc(owned, func(o rbacv1.PolicyRule) bool { return covers(&o, &part) }) {
				out = append(out, part)
			}
		}
	}
	return out
}

// split breaks a rule into rules that have one of everything. A rule that grants nothing has no parts.
func split(rule rbacv1.PolicyRule) (out []rbacv1.PolicyRule) {
	for _, verb := range rule.Verbs {
		for _, path := range rule.NonResourceURLs {
			out = append(out, rbacv1.PolicyRule{Verbs: []string{verb}, NonResourceURLs: []string{path}})
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				part := rbacv1.PolicyRule{Verbs: []string{verb}, APIGroups: []string{group}, Resources: []string{resource}}
				if len(rule.ResourceNames) == 0 {
					out = append(out, part)
				}
				for _, name := range rule.ResourceNames {
					named := part
					named.ResourceNames = []string{name}
					out = append(out, named)
				}
			}
		}
	}
	return out
}

// covers says whether an owned rule allows all that one part of a split rule does.
func covers(owned, part *rbacv1.PolicyRule) bool {
	if !has(owned.Verbs, part.Verbs[0]) {
		return false
	}
	if len(part.NonResourceURLs) > 0 {
		return slices.ContainsFunc(owned.NonResourceURLs, func(p string) bool { return pathCovers(p, part.NonResourceURLs[0]) })
	}
	resource, subresource, _ := strings.Cut(part.Resources[0], "/")
	if !has(owned.APIGroups, part.APIGroups[0]) || !resourcesCover(owned.Resources, resource, subresource) {
		return false
	}
	if len(owned.ResourceNames) == 0 {
		return true
	}
	return len(part.ResourceNames) > 0 && slices.Contains(owned.ResourceNames, part.ResourceNames[0])
}

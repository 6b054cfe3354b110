package rbac

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Aggregate returns the rules that a ClusterRole with an aggregation rule should have: those of the roles that its
// selectors match, by name, each rule once. A role never aggregates itself.
func Aggregate(role *rbacv1.ClusterRole, others []*rbacv1.ClusterRole) ([]rbacv1.PolicyRule, error) {
	others = slices.Clone(others)
	slices.SortFunc(others, func(a, b *rbacv1.ClusterRole) int { return strings.Compare(a.Name, b.Name) })
	var rules []rbacv1.PolicyRule
	for i := range role.AggregationRule.ClusterRoleSelectors {
		selector, err := metav1.LabelSelectorAsSelector(&role.AggregationRule.ClusterRoleSelectors[i])
		if err != nil {
			return nil, err
		}
		for _, o := range others {
			if o.Name == role.Name || !selector.Matches(labels.Set(o.Labels)) {
				continue
			}
			for _, r := range o.Rules {
				if !slices.ContainsFunc(rules, func(have rbacv1.PolicyRule) bool { return equality.Semantic.DeepEqual(have, r) }) {
					rules = append(rules, r)
				}
			}
		}
	}
	return rules, nil
}

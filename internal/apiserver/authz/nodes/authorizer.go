// Package nodes decides what a node may do with its own credentials: run the Pods that were given to it. What it may write is
// narrowed further by portal/internal/apiserver/noderestriction, which sees the objects.
package nodes

import (
	"context"
	"errors"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"portal/internal/csr"
	"portal/internal/rbac"
	"portal/internal/reports"
)

// Identify says whether a user is a node, and which.
func Identify(who user.Info) (name string, isNode bool) {
	if who == nil {
		return "", false
	}
	name, isNode = strings.CutPrefix(who.GetName(), csr.NodeUserPrefix)
	return name, isNode && slices.Contains(who.GetGroups(), csr.NodeGroup)
}

// Authorizer decides requests of nodes, and has no opinion on others'.
type Authorizer struct {
	Graph *Graph
	// Rules are what every node may do where it doesn't matter which node it is.
	Rules []rbacv1.PolicyRule
}

var (
	_ authorizer.Authorizer   = Authorizer{}
	_ authorizer.RuleResolver = Authorizer{}
)

// Authorize has no opinion on what a node may not do, so that a role could allow it.
func (z Authorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	node, ok := Identify(a.GetUser())
	if !ok {
		return authorizer.DecisionNoOpinion, "", nil
	}
	if node == "" {
		return authorizer.DecisionNoOpinion, "the user name does not say which node this is", nil
	}
	if reason := z.refusal(ctx, node, a); reason != "" {
		return authorizer.DecisionNoOpinion, reason, nil
	}
	return authorizer.DecisionAllow, "", nil
}

// refusal is why a node may not do something; "": it may.
func (z Authorizer) refusal(ctx context.Context, node string, a authorizer.Attributes) string {
	if a.IsResourceRequest() {
		if judge := resources[schema.GroupResource{Group: a.GetAPIGroup(), Resource: a.GetResource()}]; judge != nil {
			return judge(ctx, z.Graph, node, a)
		}
	}
	asked := &rbac.Request{
		Verb: a.GetVerb(), NonResource: !a.IsResourceRequest(), Path: a.GetPath(), Namespace: a.GetNamespace(),
		APIGroup: a.GetAPIGroup(), Resource: a.GetResource(), Subresource: a.GetSubresource(), Name: a.GetName(),
	}
	for i := range z.Rules {
		if rbac.Allows(&z.Rules[i], asked) {
			return ""
		}
	}
	return notForNodes
}

const notForNodes = "nodes don't do this"

// resources are those where it matters which node asks. For objects that don't exist yet, the node restriction decides.
var resources = map[schema.GroupResource]func(context.Context, *Graph, string, authorizer.Attributes) string{
	corev1.Resource("secrets"): func(ctx context.Context, g *Graph, n string, a authorizer.Attributes) string {
		return readNeeded(ctx, g, n, Secret, a)
	},
	corev1.Resource("configmaps"): func(ctx context.Context, g *Graph, n string, a authorizer.Attributes) string {
		return readNeeded(ctx, g, n, ConfigMap, a)
	},
	corev1.Resource("serviceaccounts"):        serviceAccounts,
	corev1.Resource("persistentvolumeclaims"): volumeClaims,
	corev1.Resource("persistentvolumes"):      unrelated,
	corev1.Resource("nodes"):                  ownNode,
	corev1.Resource("pods"):                   pods,

	{Group: "resource.k8s.io", Resource: "resourceclaims"}: func(ctx context.Context, g *Graph, n string, a authorizer.Attributes) string {
		return getNeeded(ctx, g, n, ResourceClaim, a)
	},
	{Group: "resource.k8s.io", Resource: "resourceslices"}:                resourceSlices,
	{Group: "storage.k8s.io", Resource: "csinodes"}:                       ownCSINode,
	{Group: "storage.k8s.io", Resource: "volumeattachments"}:              unrelated,
	{Group: coordinationv1.GroupName, Resource: "leases"}:                 ownLease,
	{Group: certificatesv1.GroupName, Resource: "podcertificaterequests"}: podCertificateRequests,
	{Group: reports.Group, Resource: reports.Resource}:                    ownReports,
}

func needed(ctx context.Context, g *Graph, node string, kind Kind, a authorizer.Attributes) string {
	if a.GetName() == "" {
		return "nodes read single objects of this kind, by name"
	}
	if !g.Needs(ctx, node, kind, a.GetNamespace(), a.GetName()) {
		return "no Pod of this node refers to it"
	}
	return ""
}

// unrelated are kinds that this API does not serve, so that nothing relates them to a node.
func unrelated(context.Context, *Graph, string, authorizer.Attributes) string {
	return "no Pod of this node refers to it"
}

// readNeeded allows to get, list and watch single objects that Pods of the node refer to.
func readNeeded(ctx context.Context, g *Graph, node string, kind Kind, a authorizer.Attributes) string {
	if !oneOf(a.GetVerb(), "get", "list", "watch") || a.GetSubresource() != "" || a.GetNamespace() == "" {
		return "nodes only read objects of this kind, in a namespace"
	}
	return needed(ctx, g, node, kind, a)
}

func getNeeded(ctx context.Context, g *Graph, node string, kind Kind, a authorizer.Attributes) string {
	if a.GetVerb() != "get" || a.GetSubresource() != "" {
		return "nodes only get single objects of this kind"
	}
	return needed(ctx, g, node, kind, a)
}

// serviceAccounts can be read, and tokens made for them, if Pods of the node run as them.
func serviceAccounts(ctx context.Context, g *Graph, node string, a authorizer.Attributes) string {
	switch {
	case a.GetVerb() == "get" && a.GetSubresource() == "":
		return readNeeded(ctx, g, node, ServiceAccount, a)
	case a.GetVerb() == "create" && a.GetSubresource() == "token":
		return needed(ctx, g, node, ServiceAccount, a)
	}
	return "nodes only get ServiceAccounts and create tokens for them"
}

func volumeClaims(ctx context.Context, g *Graph, node string, a authorizer.Attributes) string {
	if a.GetSubresource() == "status" && oneOf(a.GetVerb(), "update", "patch") {
		return needed(ctx, g, node, VolumeClaim, a)
	}
	return getNeeded(ctx, g, node, VolumeClaim, a)
}

// ownNode lets a node look for its Node before that exists.
func ownNode(_ context.Context, _ *Graph, node string, a authorizer.Attributes) string {
	switch verb := a.GetVerb(); a.GetSubresource() {
	case "":
		if oneOf(verb, "create", "update", "patch") {
			return ""
		}
		if oneOf(verb, "get", "list", "watch") {
			if a.GetName() != node {
				return "a node reads its own Node only, by name"
			}
			return ""
		}
	case "status":
		if oneOf(verb, "update", "patch") {
			return ""
		}
	}
	return notForNodes
}

func pods(ctx context.Context, g *Graph, node string, a authorizer.Attributes) string {
	verb := a.GetVerb()
	switch a.GetSubresource() {
	case "":
		switch {
		case oneOf(verb, "create", "delete"):
			return ""
		case verb == "get":
			return needed(ctx, g, node, Pod, a)
		case oneOf(verb, "list", "watch"):
			if selectsNode(a, node) {
				return ""
			}
			if a.GetName() == "" {
				return "a node lists and watches Pods by the field selector spec.nodeName=" + node + " only"
			}
			return needed(ctx, g, node, Pod, a)
		}
	case "status":
		if oneOf(verb, "update", "patch") {
			return ""
		}
	case "eviction":
		if verb == "create" {
			return ""
		}
	}
	return notForNodes
}

func ownLease(_ context.Context, _ *Graph, node string, a authorizer.Attributes) string {
	switch {
	case !oneOf(a.GetVerb(), "get", "create", "update", "patch", "delete"):
		return "a node gets, creates, updates, patches and deletes its own Lease only"
	case a.GetNamespace() != corev1.NamespaceNodeLease:
		return "nodes' Leases are in the namespace " + corev1.NamespaceNodeLease
	case a.GetVerb() != "create" && a.GetName() != node:
		return "a node's Lease has the node's name"
	}
	return ""
}

func ownCSINode(_ context.Context, _ *Graph, node string, a authorizer.Attributes) string {
	if !oneOf(a.GetVerb(), "get", "create", "update", "patch", "delete") || a.GetSubresource() != "" {
		return "a node gets, creates, updates, patches and deletes its own CSINode only"
	}
	if a.GetVerb() != "create" && a.GetName() != node {
		return "a node's CSINode has the node's name"
	}
	return ""
}

// ownReports lets a node write what its parts report.
func ownReports(_ context.Context, _ *Graph, node string, a authorizer.Attributes) string {
	if !oneOf(a.GetVerb(), "get", "create", "update") || a.GetSubresource() != "" {
		return "a node gets, creates and updates its own NodeReports only"
	}
	if of, _, ok := reports.SplitName(a.GetName()); a.GetVerb() != "create" && (!ok || of != node) {
		return "a node's NodeReports are named after it"
	}
	return ""
}

func resourceSlices(_ context.Context, _ *Graph, node string, a authorizer.Attributes) string {
	if a.GetSubresource() != "" {
		return notForNodes
	}
	return createOrSelect(node, a, "list", "watch", "deletecollection")
}

func podCertificateRequests(_ context.Context, _ *Graph, node string, a authorizer.Attributes) string {
	if a.GetSubresource() != "" {
		return notForNodes
	}
	return createOrSelect(node, a, "list", "watch")
}

// createOrSelect checks kinds that this API does not serve: there are no objects that could be a node's own.
func createOrSelect(node string, a authorizer.Attributes, selecting ...string) string {
	if a.GetVerb() == "create" || oneOf(a.GetVerb(), selecting...) && selectsNode(a, node) {
		return ""
	}
	return "a node creates its own, and lists them by the field selector spec.nodeName=" + node + " only"
}

// selectsNode says whether a request is limited to objects of the node.
func selectsNode(a authorizer.Attributes, node string) bool {
	selector, _ := a.GetFieldSelector() // what was not understood would limit it further
	for _, r := range selector {
		if r.Field == "spec.nodeName" && r.Operator == selection.Equals && r.Value == node {
			return true
		}
	}
	return false
}

func oneOf(verb string, verbs ...string) bool { return slices.Contains(verbs, verb) }

// ConditionsAwareAuthorize is Authorize: there are no conditions.
func (z Authorizer) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(z.Authorize(ctx, a))
}

// EvaluateConditions denies: there are no conditions.
func (Authorizer) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData,
) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor says that a node's rights cannot be listed: they change with its Pods.
func (Authorizer) RulesFor(_ context.Context, who user.Info, _ string,
) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	if _, ok := Identify(who); ok {
		return nil, nil, true, errors.New("what a node may do depends on its Pods and cannot be listed")
	}
	return nil, nil, false, nil
}

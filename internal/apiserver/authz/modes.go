package authz

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/authorization/union"

	"portal/internal/apiserver/authz/nodes"
)

// The modes of authorization, as in Kubernetes' --authorization-mode.
const (
	ModeNode        = "Node"
	ModeRBAC        = "RBAC"
	ModeAlwaysAllow = "AlwaysAllow"
)

// ValidateModes says what is wrong with a list of modes.
func ValidateModes(modes []string) error {
	known := []string{ModeNode, ModeRBAC, ModeAlwaysAllow}
	if len(modes) == 0 {
		return fmt.Errorf("must be one or more of %s", strings.Join(known, ", "))
	}
	for i, mode := range modes {
		if !slices.Contains(known, mode) {
			return fmt.Errorf("%q is none of the modes that there are: %s", mode, strings.Join(known, ", "))
		}
		if slices.Contains(modes[:i], mode) {
			return fmt.Errorf("%s is there twice", mode)
		}
	}
	return nil
}

// Access asks one authorizer after the other until one has an opinion. Members of system:masters are never asked.
type Access struct {
	authorizer.Authorizer
	authorizer.RuleResolver
	known <-chan struct{}
}

// Authorize denies nothing before roles and nodes have been read: clients that reconnect to a server that has just started would get
// 403 for what they are allowed to do.
func (a *Access) Authorize(ctx context.Context, attrs authorizer.Attributes) (authorizer.Decision, string, error) {
	early := a.early()
	decision, reason, err := a.Authorizer.Authorize(ctx, attrs)
	if decision != authorizer.DecisionAllow && early && a.wait(ctx) {
		return a.Authorizer.Authorize(ctx, attrs)
	}
	return decision, reason, err
}

// ConditionsAwareAuthorize is Authorize for callers that know of conditions.
func (a *Access) ConditionsAwareAuthorize(ctx context.Context, attrs authorizer.Attributes) authorizer.ConditionsAwareDecision {
	early := a.early()
	decision := a.Authorizer.ConditionsAwareAuthorize(ctx, attrs)
	if !decision.IsAllow() && early && a.wait(ctx) {
		return a.Authorizer.ConditionsAwareAuthorize(ctx, attrs)
	}
	return decision
}

// early says that roles and nodes have not been read yet. It is asked before a decision: they may be read while it is made.
func (a *Access) early() bool {
	select {
	case <-a.known:
		return false
	default:
		return a.known != nil
	}
}

// wait waits until roles and nodes have been read.
func (a *Access) wait(ctx context.Context) bool {
	select {
	case <-a.known:
		return true
	case <-ctx.Done():
		return false
	}
}

// NewAccess puts the authorizers of the modes in order. known is closed when roles and nodes have been
// read; nil: they have been.
func NewAccess(modes []string, roles Authorizer, node nodes.Authorizer, known <-chan struct{}) (*Access, error) {
	if err := ValidateModes(modes); err != nil {
		return nil, err
	}
	list := []union.NamedAuthorizer{{AuthorizerName: "masters", Authorizer: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)}}
	var rules []authorizer.RuleResolver
	for _, mode := range modes {
		switch mode {
		case ModeNode:
			list, rules = append(list, union.NamedAuthorizer{AuthorizerName: mode, Authorizer: node}), append(rules, node)
		case ModeRBAC:
			list, rules = append(list, union.NamedAuthorizer{AuthorizerName: mode, Authorizer: roles}), append(rules, roles)
		case ModeAlwaysAllow:
			all := authorizerfactory.NewAlwaysAllowAuthorizer()
			list, rules = append(list, union.NamedAuthorizer{AuthorizerName: mode, Authorizer: all}), append(rules, all)
		}
	}
	all, err := union.New(list...)
	if err != nil {
		return nil, err
	}
	return &Access{all, union.NewRuleResolvers(rules...), known}, nil
}

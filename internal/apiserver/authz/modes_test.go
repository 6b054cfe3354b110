package authz

import (
	"context"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"portal/internal/apiserver/authz/nodes"
	"portal/internal/rbac"
)

// TestNoDenialBeforeRolesAreRead: before the roles have been read no request is denied; what is allowed anyway does not wait, and a request
// whose context ends meanwhile is not allowed.
func TestNoDenialBeforeRolesAreRead(t *testing.T) {
	index, known := rbac.NewIndex(), make(chan struct{})
	access, err := NewAccess([]string{ModeNode, ModeRBAC}, Authorizer{index}, nodes.Authorizer{Graph: nodes.NewGraph()}, known)
	if err != nil {
		t.Fatal(err)
	}
	request := func(name string, groups ...string) authorizer.AttributesRecord {
		return authorizer.AttributesRecord{User: &user.DefaultInfo{Name: name, Groups: groups}, Verb: "watch", Resource: "services", ResourceRequest: true}
	}
	if decision, _, err := access.Authorize(t.Context(), request("admin", user.SystemPrivilegedGroup)); decision != authorizer.DecisionAllow || err != nil {
		t.Errorf("an administrator: %v %v", decision, err)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if decision, _, _ := access.Authorize(short, request("proxy")); decision == authorizer.DecisionAllow {
		t.Error("somebody was allowed what no role allows")
	}
	answers := make(chan string, 4)
	for _, who := range []string{"proxy", "somebody"} {
		go func() {
			decision, _, _ := access.Authorize(t.Context(), request(who))
			if (decision == authorizer.DecisionAllow) != (who == "proxy") {
				answers <- who + ": wrong"
			}
			answers <- ""
		}()
		go func() {
			if access.ConditionsAwareAuthorize(t.Context(), request(who)).IsAllow() != (who == "proxy") {
				answers <- who + ": wrong if asked for conditions"
			}
			answers <- ""
		}()
	}
	select {
	case <-answers:
		t.Error("it was decided before the roles were known")
	case <-time.After(20 * time.Millisecond):
	}
	index.SetRole("", "watchers", []rbacv1.PolicyRule{{Verbs: []string{"watch"}, APIGroups: []string{""}, Resources: []string{"services"}}})
	index.SetBinding("", "watchers", rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "watchers"}, []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "proxy"}})
	close(known)
	for range 4 {
		if why := <-answers; why != "" {
			t.Error(why)
		}
	}
}

// meanwhile is an authorizer that denies a request, and while it does so the roles are read.
type meanwhile struct {
	authorizer.Authorizer
	known chan struct{}
	asked int
}

func (m *meanwhile) Authorize(context.Context, authorizer.Attributes) (authorizer.Decision, string, error) {
	if m.asked++; m.asked > 1 {
		return authorizer.DecisionAllow, "", nil
	}
	close(m.known)
	return authorizer.DecisionNoOpinion, "", nil
}

func (m *meanwhile) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(m.Authorize(ctx, a))
}

// TestRolesAreReadDuringADecision: the decision is made again.
func TestRolesAreReadDuringADecision(t *testing.T) {
	for _, conditions := range []bool{false, true} {
		m := &meanwhile{known: make(chan struct{})}
		access := &Access{Authorizer: m, known: m.known}
		var allowed bool
		if conditions {
			allowed = access.ConditionsAwareAuthorize(t.Context(), authorizer.AttributesRecord{}).IsAllow()
		} else {
			decision, _, _ := access.Authorize(t.Context(), authorizer.AttributesRecord{})
			allowed = decision == authorizer.DecisionAllow
		}
		if !allowed {
			t.Errorf("denied by what was known before (asked for conditions: %v)", conditions)
		}
	}
}

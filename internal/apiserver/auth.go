package apiserver

import (
	"context"
	"fmt"
	"os"
	"slices"

	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	x509request "k8s.io/apiserver/pkg/authentication/request/x509"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// openPaths are what anybody may read, so that a probe needs no credentials.
var openPaths = []string{"/healthz", "/livez", "/readyz", "/version", "/version/"}

// newAuthenticator knows clients by certificate and by token; those with neither are anonymous, and see only openPaths.
func newAuthenticator(verify x509request.VerifyOptionFunc, tokenFile string) (authenticator.Request, error) {
	known := []authenticator.Request{x509request.NewDynamic(verify, x509request.CommonNameUserConversion)}
	if tokenFile != "" {
		tokens, err := readTokens(tokenFile)
		if err != nil {
			return nil, err
		}
		known = append(known, bearertoken.New(tokens), websocket.NewProtocolAuthenticator(tokens))
	}
	var open []apiserver.AnonymousAuthCondition
	for _, path := range openPaths {
		open = append(open, apiserver.AnonymousAuthCondition{Path: path})
	}
	return union.NewFailOnError(
		group.NewAuthenticatedGroupAdder(union.New(known...)),
		anonymous.NewAuthenticator(open),
	), nil
}

// readTokens reads a file of static tokens.
func readTokens(path string) (authenticator.Token, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("--token-auth-file: %w", err)
	}
	tokens, err := tokenfile.NewCSV(path)
	if err != nil {
		return nil, fmt.Errorf("--token-auth-file %s: each line must be token,user,uid,\"groups\": %w", path, err)
	}
	return tokens, nil
}

// mastersOnly lets members of system:masters do everything and everybody else read openPaths. It stands until roles
// can be granted.
type mastersOnly struct{}

var (
	_ authorizer.Authorizer   = mastersOnly{}
	_ authorizer.RuleResolver = mastersOnly{}
)

func (mastersOnly) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	who := a.GetUser()
	if who == nil {
		return authorizer.DecisionDeny, "the request has no user", nil
	}
	if slices.Contains(who.GetGroups(), user.SystemPrivilegedGroup) {
		return authorizer.DecisionAllow, "", nil
	}
	if !a.IsResourceRequest() && a.IsReadOnly() && slices.Contains(openPaths, a.GetPath()) {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil // which nobody else has either
}

// ConditionsAwareAuthorize is Authorize: this authorizer knows no conditions.
func (m mastersOnly) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(m.Authorize(ctx, a))
}

// EvaluateConditions refuses: this authorizer sets no conditions.
func (mastersOnly) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData,
) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// RulesFor lists what a user may do, for `kubectl auth can-i --list`.
func (mastersOnly) RulesFor(_ context.Context, who user.Info, _ string,
) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	if slices.Contains(who.GetGroups(), user.SystemPrivilegedGroup) {
		return []authorizer.ResourceRuleInfo{&authorizer.DefaultResourceRuleInfo{
				Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"},
			}}, []authorizer.NonResourceRuleInfo{&authorizer.DefaultNonResourceRuleInfo{
				Verbs: []string{"*"}, NonResourceURLs: []string{"*"},
			}}, false, nil
	}
	return nil, []authorizer.NonResourceRuleInfo{&authorizer.DefaultNonResourceRuleInfo{
		Verbs: []string{"get", "head"}, NonResourceURLs: openPaths,
	}}, false, nil
}

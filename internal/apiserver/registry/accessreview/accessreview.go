// Package accessreview describes the questions of authorization.k8s.io/v1: may somebody do something? They are put to
// the server's own authorizer, so the answer is what a real request would meet.
package accessreview

import (
	"context"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/review"
)

// New describes SelfSubjectAccessReviews: may I?
func New(authz authorizer.UnconditionalAuthorizer) registry.Resource {
	return &review.Question[authorizationv1.SelfSubjectAccessReview, *authorizationv1.SelfSubjectAccessReview]{
		Served:   authorizationv1.SchemeGroupVersion,
		Plural:   "selfsubjectaccessreviews",
		Singular: "selfsubjectaccessreview",
		Validate: validateSelf,
		Refuse:   func(ctx context.Context, _ *authorizationv1.SelfSubjectAccessReview) error { return wantUser(ctx) },
		Answer: func(ctx context.Context, r *authorizationv1.SelfSubjectAccessReview) (*authorizationv1.SelfSubjectAccessReview, error) {
			me, _ := request.UserFrom(ctx)
			r.Status = ask(ctx, authz, attributes(me, r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes))
			return r, nil
		},
	}
}

// NewSubject describes SubjectAccessReviews: may they?
func NewSubject(authz authorizer.UnconditionalAuthorizer) registry.Resource {
	return &review.Question[authorizationv1.SubjectAccessReview, *authorizationv1.SubjectAccessReview]{
		Served:   authorizationv1.SchemeGroupVersion,
		Plural:   "subjectaccessreviews",
		Singular: "subjectaccessreview",
		Validate: validateSubject,
		Answer: func(ctx context.Context, r *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error) {
			r.Status = ask(ctx, authz, attributes(subject(&r.Spec), r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes))
			return r, nil
		},
	}
}

// NewLocal describes LocalSubjectAccessReviews: may they, in this namespace?
func NewLocal(authz authorizer.UnconditionalAuthorizer) registry.Resource {
	return &review.Question[authorizationv1.LocalSubjectAccessReview, *authorizationv1.LocalSubjectAccessReview]{
		Served:     authorizationv1.SchemeGroupVersion,
		Plural:     "localsubjectaccessreviews",
		Singular:   "localsubjectaccessreview",
		Namespaced: true,
		Validate:   validateLocal,
		Refuse:     wantSameNamespace,
		Answer: func(ctx context.Context, r *authorizationv1.LocalSubjectAccessReview) (*authorizationv1.LocalSubjectAccessReview, error) {
			r.Status = ask(ctx, authz, attributes(subject(&r.Spec), r.Spec.ResourceAttributes, nil))
			return r, nil
		},
	}
}

// NewRules describes SelfSubjectRulesReviews: what may I do in a namespace?
func NewRules(rules authorizer.RuleResolver) registry.Resource {
	return &review.Question[authorizationv1.SelfSubjectRulesReview, *authorizationv1.SelfSubjectRulesReview]{
		Served:   authorizationv1.SchemeGroupVersion,
		Plural:   "selfsubjectrulesreviews",
		Singular: "selfsubjectrulesreview",
		Refuse: func(ctx context.Context, r *authorizationv1.SelfSubjectRulesReview) error {
			if err := wantUser(ctx); err != nil {
				return err
			}
			if r.Spec.Namespace == "" {
				return apierrors.NewBadRequest("spec.namespace must name the namespace whose rules are asked for")
			}
			return nil
		},
		Answer: func(ctx context.Context, r *authorizationv1.SelfSubjectRulesReview) (*authorizationv1.SelfSubjectRulesReview, error) {
			me, _ := request.UserFrom(ctx)
			return &authorizationv1.SelfSubjectRulesReview{Status: list(ctx, rules, me, r.Spec.Namespace)}, nil
		},
	}
}

func wantUser(ctx context.Context) error {
	if _, ok := request.UserFrom(ctx); !ok {
		return apierrors.NewBadRequest("the request has no user to ask about")
	}
	return nil
}

func wantSameNamespace(ctx context.Context, r *authorizationv1.LocalSubjectAccessReview) error {
	if ns := request.NamespaceValue(ctx); ns == "" || ns != r.Namespace {
		return apierrors.NewBadRequest(fmt.Sprintf("the question is asked in namespace %q but metadata.namespace is %q; they must be the same", ns, r.Namespace))
	}
	return nil
}

func subject(spec *authorizationv1.SubjectAccessReviewSpec) user.Info {
	info := &user.DefaultInfo{Name: spec.User, Groups: spec.Groups, UID: spec.UID}
	if spec.Extra != nil {
		info.Extra = map[string][]string{}
	}
	for key, values := range spec.Extra {
		info.Extra[key] = values
	}
	return info
}

func ask(ctx context.Context, authz authorizer.UnconditionalAuthorizer, what authorizer.AttributesRecord) authorizationv1.SubjectAccessReviewStatus {
	decision, reason, err := authz.Authorize(ctx, what)
	return authorizationv1.SubjectAccessReviewStatus{
		Allowed:         decision == authorizer.DecisionAllow,
		Denied:          decision == authorizer.DecisionDeny,
		Reason:          reason,
		EvaluationError: troubles(err, what),
	}
}

func list(ctx context.Context, rules authorizer.RuleResolver, who user.Info, namespace string) authorizationv1.SubjectRulesReviewStatus {
	resources, others, incomplete, err := rules.RulesFor(ctx, who, namespace)
	status := authorizationv1.SubjectRulesReviewStatus{
		ResourceRules:    make([]authorizationv1.ResourceRule, len(resources)),
		NonResourceRules: make([]authorizationv1.NonResourceRule, len(others)),
		Incomplete:       incomplete,
	}
	for i, r := range resources {
		status.ResourceRules[i] = authorizationv1.ResourceRule{
			Verbs: r.GetVerbs(), APIGroups: r.GetAPIGroups(), Resources: r.GetResources(), ResourceNames: r.GetResourceNames(),
		}
	}
	for i, r := range others {
		status.NonResourceRules[i] = authorizationv1.NonResourceRule{Verbs: r.GetVerbs(), NonResourceURLs: r.GetNonResourceURLs()}
	}
	if err != nil {
		status.EvaluationError = err.Error()
	}
	return status
}

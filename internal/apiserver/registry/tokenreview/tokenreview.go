// Package tokenreview describes the questions of authentication.k8s.io/v1: who am I, and whose token is this? They are
// answered from what the server itself authenticates with.
package tokenreview

import (
	"context"
	"net/http"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/review"
)

// NewSelf describes SelfSubjectReviews: who am I?
func NewSelf() registry.Resource {
	return &review.Question[authenticationv1.SelfSubjectReview, *authenticationv1.SelfSubjectReview]{
		Served:   authenticationv1.SchemeGroupVersion,
		Plural:   "selfsubjectreviews",
		Singular: "selfsubjectreview",
		Answer: func(ctx context.Context, _ *authenticationv1.SelfSubjectReview) (*authenticationv1.SelfSubjectReview, error) {
			me, ok := request.UserFrom(ctx)
			if !ok {
				return nil, apierrors.NewBadRequest("the request has no user to tell about")
			}
			out := &authenticationv1.SelfSubjectReview{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(time.Now())}}
			out.Status.UserInfo = describe(me)
			return out, nil
		},
	}
}

// New describes TokenReviews: whose token is this? own is what the server calls itself: whom a token is meant for that
// says nothing about it. Without own, and with an authenticator that knows no audiences, answers don't speak of them.
func New(auth authenticator.Request, own authenticator.Audiences) registry.Resource {
	return &review.Question[authenticationv1.TokenReview, *authenticationv1.TokenReview]{
		Served:   authenticationv1.SchemeGroupVersion,
		Plural:   "tokenreviews",
		Singular: "tokenreview",
		Refuse: func(_ context.Context, r *authenticationv1.TokenReview) error {
			if r.Spec.Token == "" {
				return apierrors.NewBadRequest("spec.token must be the token that is asked about")
			}
			return nil
		},
		Answer: func(ctx context.Context, r *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
			r.Status = answer(ctx, &r.Spec, auth, own)
			return r, nil
		},
	}
}

func answer(ctx context.Context, asked *authenticationv1.TokenReviewSpec, auth authenticator.Request, own authenticator.Audiences) authenticationv1.TokenReviewStatus {
	wanted := own
	if len(asked.Audiences) > 0 {
		wanted = asked.Audiences
	}
	if len(wanted) > 0 {
		ctx = authenticator.WithAudiences(ctx, wanted)
	}
	// A request that has nothing but the token: the asker's own certificate must not answer for it.
	alone := (&http.Request{Header: http.Header{"Authorization": {"Bearer " + asked.Token}}}).WithContext(ctx)
	found, ok, err := auth.AuthenticateRequest(alone)
	switch {
	case err != nil:
		return authenticationv1.TokenReviewStatus{Error: err.Error()}
	case !ok || found == nil || found.User == nil:
		return authenticationv1.TokenReviewStatus{}
	}
	meant := found.Audiences
	if len(meant) == 0 {
		meant = own
	}
	if len(wanted) > 0 && len(meant) > 0 {
		if meant = wanted.Intersect(meant); len(meant) == 0 {
			return authenticationv1.TokenReviewStatus{Error: "the token is meant for others"}
		}
	}
	return authenticationv1.TokenReviewStatus{Authenticated: true, User: describe(found.User), Audiences: meant}
}

func describe(u user.Info) authenticationv1.UserInfo {
	out := authenticationv1.UserInfo{
		Username: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups(), Extra: map[string]authenticationv1.ExtraValue{},
	}
	for key, values := range u.GetExtra() {
		out.Extra[key] = values
	}
	return out
}

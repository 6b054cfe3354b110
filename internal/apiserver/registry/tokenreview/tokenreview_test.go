package tokenreview

import (
	"errors"
	"net/http"
	"slices"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

func creater(t *testing.T, r registry.Resource) rest.Creater {
	t.Helper()
	storage, err := r.Storage(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return storage[r.Name()].(rest.Creater)
}

func TestSelf(t *testing.T) {
	me := &user.DefaultInfo{Name: "joe", UID: "7", Groups: []string{"devs"}, Extra: map[string][]string{"a": {"b"}}}
	c := creater(t, NewSelf())
	got, err := c.Create(request.WithUser(t.Context(), me), &authenticationv1.SelfSubjectReview{}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	info := got.(*authenticationv1.SelfSubjectReview).Status.UserInfo
	if info.Username != "joe" || info.UID != "7" || !slices.Equal(info.Groups, me.Groups) || !slices.Equal(info.Extra["a"], []string{"b"}) {
		t.Errorf("I am %+v", info)
	}
	if _, err := c.Create(t.Context(), &authenticationv1.SelfSubjectReview{}, nil, nil); !apierrors.IsBadRequest(err) {
		t.Errorf("without a user: %v", err)
	}
}

func TestTokenReview(t *testing.T) {
	auth := authenticator.RequestFunc(func(r *http.Request) (*authenticator.Response, bool, error) {
		if r.TLS != nil {
			t.Error("the asker's connection went along")
		}
		switch r.Header.Get("Authorization") {
		case "Bearer plain":
			return &authenticator.Response{User: &user.DefaultInfo{Name: "joe"}}, true, nil
		case "Bearer aware":
			return &authenticator.Response{User: &user.DefaultInfo{Name: "joe"}, Audiences: authenticator.Audiences{"x", "y"}}, true, nil
		case "Bearer broken":
			return nil, false, errors.New("broken token")
		}
		return nil, false, nil
	})
	for _, c := range []struct {
		name      string
		own       authenticator.Audiences
		spec      authenticationv1.TokenReviewSpec
		ok        bool
		audiences []string
		trouble   string
	}{
		{"known", nil, authenticationv1.TokenReviewSpec{Token: "plain"}, true, nil, ""},
		{"known, for us", authenticator.Audiences{"us"}, authenticationv1.TokenReviewSpec{Token: "plain"}, true, []string{"us"}, ""},
		{
			"known, for others", authenticator.Audiences{"us"}, authenticationv1.TokenReviewSpec{Token: "plain", Audiences: []string{"them"}},
			false, nil, "the token is meant for others",
		},
		{"nobody knows audiences", nil, authenticationv1.TokenReviewSpec{Token: "plain", Audiences: []string{"them"}}, true, nil, ""},
		{"one of its audiences", nil, authenticationv1.TokenReviewSpec{Token: "aware", Audiences: []string{"y", "z"}}, true, []string{"y"}, ""},
		{"none of its audiences", nil, authenticationv1.TokenReviewSpec{Token: "aware", Audiences: []string{"z"}}, false, nil, "the token is meant for others"},
		{"unknown", nil, authenticationv1.TokenReviewSpec{Token: "unknown"}, false, nil, ""},
		{"broken", nil, authenticationv1.TokenReviewSpec{Token: "broken"}, false, nil, "broken token"},
	} {
		t.Run(c.name, func(t *testing.T) {
			obj, err := creater(t, New(auth, c.own)).Create(t.Context(), &authenticationv1.TokenReview{Spec: c.spec}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := obj.(*authenticationv1.TokenReview).Status
			if got.Authenticated != c.ok || (got.User.Username == "joe") != c.ok || !slices.Equal(got.Audiences, c.audiences) || got.Error != c.trouble {
				t.Errorf("answered %+v", got)
			}
		})
	}
	if _, err := creater(t, New(auth, nil)).Create(t.Context(), &authenticationv1.TokenReview{}, nil, nil); !apierrors.IsBadRequest(err) {
		t.Errorf("without a token: %v", err)
	}
}

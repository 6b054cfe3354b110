package apiserver

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"k8s.io/apiserver/pkg/authentication/user"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	genericserver "k8s.io/apiserver/pkg/server"
)

// TestInsideTokens: each part has a token of its own, and no other token is anybody's.
func TestInsideTokens(t *testing.T) {
	var tokens insideTokens
	one := tokens.of(&user.DefaultInfo{Name: "one", Groups: []string{"g"}})
	if other := tokens.of(&user.DefaultInfo{Name: "other"}); other == one || len(one) < 50 {
		t.Errorf("tokens are %d characters long, or the same", len(one))
	}
	if again := tokens.of(&user.DefaultInfo{Name: "one"}); again != one {
		t.Error("a part has two tokens")
	}
	if r, ok, err := tokens.AuthenticateToken(t.Context(), one); err != nil || !ok || r.User.GetName() != "one" || !slices.Equal(r.User.GetGroups(), []string{"g"}) {
		t.Errorf("%+v, %v, %v", r, ok, err)
	}
	for _, wrong := range []string{"", one[1:], one + "A"} {
		if _, ok, _ := tokens.AuthenticateToken(t.Context(), wrong); ok {
			t.Errorf("%q is a token", wrong)
		}
	}
}

// TestInsideIsNotLimited: with all places taken, a part of the process is served, and an administrator has to wait.
func TestInsideIsNotLimited(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	served := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if who, _ := genericrequest.UserFrom(r.Context()); who.GetName() == "first" {
			close(entered)
			<-leave
		}
	})
	handler := withInFlightLimit(served, &genericserver.Config{LongRunningFunc: func(*http.Request, *genericrequest.RequestInfo) bool { return false }}, 1, 1)
	ask := func(who user.Info) int {
		w := httptest.NewRecorder()
		ctx := genericrequest.WithRequestInfo(genericrequest.WithUser(t.Context(), who), &genericrequest.RequestInfo{IsResourceRequest: true, Verb: "get"})
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/v1/pods", nil).WithContext(ctx))
		return w.Code
	}
	done := make(chan int)
	go func() { done <- ask(&user.DefaultInfo{Name: "first"}) }()
	<-entered
	if code := ask(&user.DefaultInfo{Name: "admin", Groups: []string{user.SystemPrivilegedGroup}}); code != http.StatusTooManyRequests {
		t.Errorf("an administrator gets %d", code)
	}
	if code := ask(&user.DefaultInfo{Name: "part", Extra: map[string][]string{insideKey: {"server"}}}); code != http.StatusOK {
		t.Errorf("a part of the process gets %d", code)
	}
	close(leave)
	<-done
}

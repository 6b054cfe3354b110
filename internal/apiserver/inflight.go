package apiserver

import (
	"net/http"
	"slices"

	"k8s.io/apiserver/pkg/authentication/user"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	genericserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
)

// throttled is a user as the library's limit on requests in flight sees them: it exempts members of system:masters, who are
// administrators. Only the parts of the server's own process are exempt here, and probes, which cost nothing.
type throttled struct{ user.Info }

func (t throttled) GetGroups() []string {
	return slices.DeleteFunc(slices.Clone(t.Info.GetGroups()), func(group string) bool { return group == user.SystemPrivilegedGroup })
}

// withInFlightLimit answers 429 when too many requests are being served. It comes after authorization.
func withInFlightLimit(next http.Handler, c *genericserver.Config, reads, writes int) http.Handler {
	limited := genericfilters.WithMaxInFlightLimit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if who, ok := genericrequest.UserFrom(r.Context()); ok {
			r = r.WithContext(genericrequest.WithUser(r.Context(), who.(throttled).Info))
		}
		next.ServeHTTP(w, r)
	}), reads, writes, c.LongRunningFunc)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, ok := genericrequest.UserFrom(r.Context())
		if !ok || who.GetName() == user.APIServerUser || isInside(who) || slices.Contains(openPaths, r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		limited.ServeHTTP(w, r.WithContext(genericrequest.WithUser(r.Context(), throttled{who})))
	})
}

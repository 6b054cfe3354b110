package main

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"portal/internal/intent"
	"portal/internal/intent/watch"
)

func serviceSelector(proxyName string) string {
	const label = "service.kubernetes.io/service-proxy-name"
	if proxyName == "" {
		return "!" + label
	}
	return label + "=" + proxyName
}

// tellAPI logs once when the API goes away, whichever of the sources notices first, and once when all are back. What the API
// forbids is logged for each source: it does answer.
func tellAPI(log *slog.Logger, host string) func(watch.Status) {
	var mu sync.Mutex
	away, forbidden := map[intent.Source]bool{}, map[intent.Source]bool{}
	return func(st watch.Status) {
		mu.Lock()
		defer mu.Unlock()
		before := len(away)
		switch {
		case st.Connected:
			delete(away, st.Source)
			delete(forbidden, st.Source)
		case apierrors.IsForbidden(st.Err):
			if !forbidden[st.Source] {
				log.Error("the API forbids this account to read a resource, retrying", "api", host, "resource", st.Source.String(), "err", st.Err,
					"hint", "grant list and watch on "+st.Source.String())
			}
			forbidden[st.Source] = true
			return
		default:
			away[st.Source] = true
		}
		switch {
		case before == 0 && len(away) > 0:
			why, hint := apiTrouble(st.Err, host)
			log.Warn("the API does not answer, traffic goes on as last known", "api", host, "err", why, "hint", hint)
		case before > 0 && len(away) == 0:
			log.Info("the API answers again", "api", host)
		case st.Connected && before == 0:
			log.Info("watching the API", "resource", st.Source.String())
		}
	}
}

// apiTrouble says in few words why the API does not answer, and what could be done.
func apiTrouble(err error, host string) (why, hint string) {
	var unreached *url.Error
	var stranger x509.UnknownAuthorityError
	var misnamed x509.HostnameError
	switch {
	case apierrors.IsUnauthorized(err):
		return err.Error(), "the credentials in the kubeconfig are not accepted: get new ones"
	case apierrors.IsBadRequest(err) && strings.HasPrefix(host, "http://"):
		return err.Error(), "perhaps the server speaks https: say so in the kubeconfig"
	case errors.As(err, &stranger):
		return stranger.Error(), "the certificate authority in the kubeconfig is not this server's: get the server's own kubeconfig"
	case errors.As(err, &misnamed):
		return misnamed.Error(), "use an address in the kubeconfig that the server's certificate is for"
	case errors.As(err, &unreached):
		return unreached.Err.Error(), "is the server running, and its address in the kubeconfig right?"
	}
	return fmt.Sprint(err), "see the server's log"
}

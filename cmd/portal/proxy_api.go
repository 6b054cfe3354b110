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

// tellAPI logs once when the API goes away, whichever of the sources notices first, and once when all are back.
func tellAPI(log *slog.Logger, host string) func(watch.Status) {
	var mu sync.Mutex
	away := map[intent.Source]bool{}
	return func(st watch.Status) {
		mu.Lock()
		defer mu.Unlock()
		before := len(away)
		if st.Connected {
			delete(away, st.Source)
		} else {
			away[st.Source] = true
		}
		switch {
		case before == 0 && len(away) > 0:
			why, hint := apiTrouble(st.Err, host)
			log.Warn("the API does not answer; traffic goes on as last known, and it is tried again", "api", host, "why", why, "hint", hint)
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
	case apierrors.IsForbidden(err):
		return err.Error(), "let this user list and watch services, endpointslices, nodes and servicecidrs"
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

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"portal/internal/intent"
	"portal/internal/intent/watch"
)

func (o *proxyOptions) api() (*rest.Config, error) {
	if o.master != "" && o.kubeconfig == "" {
		return &rest.Config{Host: o.master}, nil
	}
	config, err := apiConfig(o.kubeconfig)
	if err == nil && o.master != "" {
		config.Host = o.master
	}
	return config, err
}

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
			why, hint := apiTrouble(st.Err)
			log.Warn("the API does not answer; traffic goes on as last known, and it is tried again", "api", host, "why", why, "hint", hint)
		case before > 0 && len(away) == 0:
			log.Info("the API answers again", "api", host)
		case st.Connected && before == 0:
			log.Info("watching the API", "resource", st.Source.String())
		}
	}
}

// apiTrouble says in few words why the API does not answer, and what could be done.
func apiTrouble(err error) (why, hint string) {
	var unreached *url.Error
	switch {
	case apierrors.IsUnauthorized(err):
		return err.Error(), "the credentials in the kubeconfig are not accepted"
	case apierrors.IsForbidden(err):
		return err.Error(), "this user may not list and watch services, endpointslices and nodes"
	case errors.As(err, &unreached):
		return unreached.Err.Error(), "is the server running, and its address in the kubeconfig right?"
	}
	return fmt.Sprint(err), "see the server's log"
}

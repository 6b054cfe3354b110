package aggregation

import (
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilproxy "k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/client-go/transport"
	"k8s.io/streaming/pkg/httpstream"
)

// Handler passes on what others serve, and leaves the rest to next.
func (a *Aggregator) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if handler := a.handlerOf(r); handler != nil {
			handler.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// handlerOf is what answers a request instead of the server's own resources, or nil.
func (a *Aggregator) handlerOf(r *http.Request) http.Handler {
	v := a.view.Load()
	if v == nil {
		return nil
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	if rest, ok := strings.CutPrefix(r.URL.Path, "/apis"); ok {
		if (rest == "" || rest == "/") && reads {
			return a.root
		}
		return v.below(rest, reads)
	}
	if rest, ok := strings.CutPrefix(r.URL.Path, "/openapi/"); ok && reads && len(v.remotes) > 0 {
		return a.openAPI(v, rest)
	}
	return nil
}

// Remote says whether a request is about a group version that others serve.
func (a *Aggregator) Remote(info *request.RequestInfo) bool {
	v := a.view.Load()
	return v != nil && info != nil && info.IsResourceRequest && v.remotes[schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}] != nil
}

// remoteHandler passes requests on as the user who asks, or as another one.
type remoteHandler struct {
	*remote
	as user.Info
}

// ServeHTTP passes a request on.
func (h remoteHandler) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if state := h.state.Load(); !state.available() {
		h.refuse(w, req, apierrors.NewServiceUnavailable(fmt.Sprintf("APIService %s is not available: %s", h.name, state.reason)))
		return
	}
	// What the user may do was decided by the path as it is. The other server must not find another one in it.
	if clean := path.Clean(req.URL.Path); clean != req.URL.Path && clean+"/" != req.URL.Path {
		h.refuse(w, req, apierrors.NewBadRequest("the path must have no empty, . or .. segments"))
		return
	}
	who := h.as
	if who == nil {
		var ok bool
		if who, ok = request.UserFrom(req.Context()); !ok {
			h.refuse(w, req, apierrors.NewInternalError(fmt.Errorf("a request without a user")))
			return
		}
	}
	at, err := h.in.Resolve(h.spec.Service.Namespace, h.spec.Service.Name, h.port)
	if err != nil {
		h.recheck()
		h.refuse(w, req, apierrors.NewServiceUnavailable(fmt.Sprintf("APIService %s: its Service has no endpoint that is ready", h.name)))
		return
	}
	to := &url.URL{Scheme: "https", Host: at.Host, Path: req.URL.Path, RawQuery: req.URL.Query().Encode()}
	passed, done := proxy.NewRequestForProxy(to, req)
	defer done()
	upgrade := httpstream.IsUpgradeRequest(req)
	var through http.RoundTripper = h.transport
	if upgrade {
		// An upgrade connects by itself, with the transport's dialer and TLS.
		transport.SetAuthProxyHeaders(passed, who.GetName(), who.GetUID(), who.GetGroups(), who.GetExtra())
	} else {
		// After the proxy has dropped the headers that the client's Connection header names, or it could name these.
		through = transport.NewAuthProxyRoundTripper(who.GetName(), who.GetUID(), who.GetGroups(), who.GetExtra(), through)
	}
	handler := utilproxy.NewUpgradeAwareHandler(to, through, false, upgrade, responder{h})
	// A client would follow with its credentials, wherever it is sent.
	handler.RejectForwardingRedirects = true
	flowcontrol.RequestDelegated(req.Context())
	handler.ServeHTTP(w, passed)
}

func (h remoteHandler) refuse(w http.ResponseWriter, req *http.Request, err error) {
	responsewriters.ErrorNegotiated(err, h.in.Serializer, schema.GroupVersion{Version: "v1"}, w, req)
}

// responder answers when the other server does not.
type responder struct{ to remoteHandler }

// Error answers, and has the other server checked.
func (r responder) Error(w http.ResponseWriter, req *http.Request, err error) {
	r.to.recheck()
	r.to.refuse(w, req, apierrors.NewServiceUnavailable(fmt.Sprintf("APIService %s: its server did not answer: %v", r.to.name, err)))
}

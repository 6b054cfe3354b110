package stream

import (
	"bytes"
	"crypto/x509"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/streaming/pkg/httpstream"
)

// access decides who may ask what: the API server says whose token it is, and what they may do with nodes. Clients with a certificate of the
// cluster are who it says. Nobody is let in without.
type access struct {
	who authenticator.Request
	may authorizer.UnconditionalAuthorizer
}

const (
	// What the API server has answered is believed for this long.
	tokenTTL = 30 * time.Second
	allowTTL = 30 * time.Second
	denyTTL  = 10 * time.Second
)

func (a *access) build(o Options) error {
	backoff := &wait.Backoff{Duration: 200 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 3}
	who, _, err := authenticatorfactory.DelegatingAuthenticatorConfig{
		TokenAccessReviewClient: o.Client.AuthenticationV1(), TokenAccessReviewTimeout: 10 * time.Second, WebhookRetryBackoff: backoff, CacheTTL: tokenTTL,
		ClientCertificateCAContentProvider: &authorities{read: o.Authorities},
	}.New()
	if err != nil {
		return err
	}
	may, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: o.Client.AuthorizationV1(), AllowCacheTTL: allowTTL, DenyCacheTTL: denyTTL, WebhookRetryBackoff: backoff,
	}.New()
	a.who, a.may = who, may
	return err
}

// filter lets requests pass that are allowed.
func (a *access) filter(node string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, ok, err := a.who.AuthenticateRequest(r)
		if err != nil || !ok {
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		for _, subresource := range subresources(r.URL.Path) {
			decision, _, err := a.may.Authorize(r.Context(), attributes(node, subresource, who.User, r))
			if err != nil {
				http.Error(w, "the API server can't be asked what you may do", http.StatusInternalServerError)
				return
			}
			if decision == authorizer.DecisionAllow {
				next.ServeHTTP(w, r)
				return
			}
		}
		http.Error(w, "Forbidden (user="+who.User.GetName()+", verb="+verb(r)+", resource=nodes, subresource(s)=["+
			strings.Join(subresources(r.URL.Path), " ")+"])", http.StatusForbidden)
	})
}

// subresources are those of nodes of which a request needs one, as with kubelets: the narrower first, and proxy, which opens all that has
// none of its own.
func subresources(path string) []string {
	below := func(root string) bool { return path == root || strings.HasPrefix(path, root+"/") }
	switch {
	case below("/stats"):
		return []string{"stats"}
	case below("/metrics"):
		return []string{"metrics"}
	case below("/logs"):
		return []string{"log"}
	case below("/pods"), below("/runningpods"):
		return []string{"pods", "proxy"}
	case below("/healthz"):
		return []string{"healthz", "proxy"}
	}
	return []string{"proxy"}
}

// commands are the paths at which something is done in a Pod, whatever the method: a WebSocket begins with GET.
var commands = []string{"/exec", "/attach", "/run", "/portForward"}

// verb is what a request does. Kubelets go by the method alone, so that with them who may get nodes/proxy can run commands in every Pod.
func verb(r *http.Request) string {
	if httpstream.IsUpgradeRequest(r) {
		return "create"
	}
	for _, root := range commands {
		if r.URL.Path == root || strings.HasPrefix(r.URL.Path, root+"/") {
			return "create"
		}
	}
	switch r.Method {
	case http.MethodPost:
		return "create"
	case http.MethodGet:
		return "get"
	case http.MethodPut:
		return "update"
	case http.MethodPatch:
		return "patch"
	case http.MethodDelete:
		return "delete"
	}
	return ""
}

func attributes(node, subresource string, who user.Info, r *http.Request) authorizer.Attributes {
	return authorizer.AttributesRecord{
		User: who, Verb: verb(r), APIVersion: "v1", Resource: "nodes", Subresource: subresource, Name: node, ResourceRequest: true, Path: r.URL.Path,
	}
}

// authorities are CAs that may change, as k8s.io/apiserver reads them.
type authorities struct {
	read func() ([]byte, error)

	mu    sync.Mutex
	last  []byte
	roots *x509.CertPool
}

var _ dynamiccertificates.CAContentProvider = &authorities{}

// Name is for messages.
func (*authorities) Name() string { return "client-ca" }

// AddListener is not needed: whoever uses this asks each time.
func (*authorities) AddListener(dynamiccertificates.Listener) {}

// CurrentCABundleContent is the CAs' certificates.
func (a *authorities) CurrentCABundleContent() []byte {
	_, _ = a.VerifyOptions()
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

// VerifyOptions are for clients' certificates. Without a CA nobody has one that counts.
func (a *authorities) VerifyOptions() (x509.VerifyOptions, bool) {
	data, err := a.read()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && !bytes.Equal(data, a.last) {
		if roots := x509.NewCertPool(); roots.AppendCertsFromPEM(data) {
			a.last, a.roots = data, roots
		}
	}
	if a.roots == nil {
		return x509.VerifyOptions{}, false
	}
	return x509.VerifyOptions{Roots: a.roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, true
}

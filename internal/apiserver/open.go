package apiserver

import (
	"net/http"
	"strings"

	restclient "k8s.io/client-go/rest"
)

// Handle serves a path beside the API, to those who may do everything. It must be called before Run.
func (s *Server) Handle(path string, handler http.Handler) {
	s.generic.Handler.NonGoRestfulMux.Handle(path, handler)
}

// HandleOpen serves all paths that begin with a prefix, without asking who comes and what they may do: the handler does, and
// limits what they can cost. It must be called before Run.
func (s *Server) HandleOpen(prefix string, handler http.Handler) {
	if s.open == nil {
		s.open = map[string]http.Handler{}
	}
	s.open[prefix] = handler
}

// KnownClient notes that a handler of HandleOpen knows who sends a request: at the limit, their connection is not closed for another's, as
// those of the API's own clients are not.
func (s *Server) KnownClient(r *http.Request) { s.listener.keep(r) }

func (s *Server) openFirst(api http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for prefix, handler := range s.open {
			switch {
			case strings.HasPrefix(r.URL.Path, prefix):
				handler.ServeHTTP(w, r)
				return
			case r.URL.Path+"/" == prefix:
				http.Redirect(w, r, prefix, http.StatusFound)
				return
			}
		}
		api.ServeHTTP(w, r)
	})
}

// AnonymousConfig is how a part of this process reaches the API with others' credentials, which the caller adds.
func (s *Server) AnonymousConfig() *restclient.Config {
	return restclient.AnonymousClientConfig(s.loopback)
}

// NodePorts is the range of node ports, such as 30000-32767.
func (s *Server) NodePorts() string { return s.opts.ports.String() }

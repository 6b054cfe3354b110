package apiserver

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"sync"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
)

// insideTokens are those of the parts that run in this process, each with an identity of its own. They exist in memory only, are
// as long as a key, and end with the process.
type insideTokens struct {
	mu     sync.RWMutex
	users  map[[sha256.Size]byte]user.Info // by a token's hash
	tokens map[string]string               // by a user's name
}

// of is the token of a user, made when it is first asked for.
func (i *insideTokens) of(who user.Info) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.users == nil {
		i.users, i.tokens = map[[sha256.Size]byte]user.Info{}, map[string]string{}
	}
	if i.tokens[who.GetName()] == "" {
		token := rand.Text() + rand.Text()
		i.users[sha256.Sum256([]byte(token))], i.tokens[who.GetName()] = who, token
	}
	return i.tokens[who.GetName()]
}

// AuthenticateToken knows the tokens by their hashes, so that how long it takes says nothing about them.
func (i *insideTokens) AuthenticateToken(_ context.Context, token string) (*authenticator.Response, bool, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	who, ok := i.users[sha256.Sum256([]byte(token))]
	return &authenticator.Response{User: who}, ok, nil
}

// insideKey marks in a user's extra that they are part of this process. Nobody else can have it but by impersonation.
const insideKey = "portal.dev/inside"

// isInside says whether a user is part of this process.
func isInside(who user.Info) bool { return len(who.GetExtra()[insideKey]) > 0 }

// ConfigAs is how a part of this process reaches the API as a user with the rights of that user's roles.
func (s *Server) ConfigAs(name string, groups ...string) *restclient.Config {
	config := restclient.CopyConfig(s.loopback)
	config.BearerToken = s.inside.of(&user.DefaultInfo{
		Name: name, Groups: groups, Extra: map[string][]string{insideKey: {"server"}},
	})
	return config
}

// clientAs is a client with ConfigAs.
func (s *Server) clientAs(name string) (kubernetes.Interface, error) {
	return kubernetes.NewForConfig(s.ConfigAs(name))
}

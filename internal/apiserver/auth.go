package apiserver

import (
	"fmt"
	"os"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/websocket"
	x509request "k8s.io/apiserver/pkg/authentication/request/x509"
	"k8s.io/apiserver/pkg/authentication/token/tokenfile"
	tokenunion "k8s.io/apiserver/pkg/authentication/token/union"
)

// openPaths are what probes read; they cost nothing.
var openPaths = []string{"/healthz", "/livez", "/readyz", "/version", "/version/"}

// newAuthenticator knows clients by certificate and by token. Those with neither are anonymous, and may do what roles allow to
// system:unauthenticated.
func newAuthenticator(verify x509request.VerifyOptionFunc, tokenFile string, tokens ...authenticator.Token) (authenticator.Request, error) {
	if tokenFile != "" {
		static, err := readTokens(tokenFile)
		if err != nil {
			return nil, err
		}
		tokens = append([]authenticator.Token{static}, tokens...)
	}
	token := tokenunion.New(tokens...)
	known := []authenticator.Request{
		x509request.NewDynamic(verify, x509request.CommonNameUserConversion),
		bearertoken.New(token), websocket.NewProtocolAuthenticator(token),
	}
	return union.NewFailOnError(
		group.NewAuthenticatedGroupAdder(union.New(known...)),
		anonymous.NewAuthenticator(nil),
	), nil
}

// readTokens reads a file of static tokens.
func readTokens(path string) (authenticator.Token, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("--token-auth-file: %w", err)
	}
	tokens, err := tokenfile.NewCSV(path)
	if err != nil {
		return nil, fmt.Errorf("--token-auth-file %s: each line must be token,user,uid,\"groups\": %w", path, err)
	}
	return tokens, nil
}

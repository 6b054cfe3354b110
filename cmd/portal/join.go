package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"portal/internal/apiserver"
	"portal/internal/bootstrap"
	"portal/internal/identity"
	"portal/internal/join"
)

// joinOptions are the flags by which a command joins a cluster of Portal, instead of being given a kubeconfig.
type joinOptions struct {
	role                     identity.Role
	server, token, tokenFile string
	hashes                   []string
	skipHash                 bool
	dataDir                  string
}

func (o *joinOptions) addFlags(f *pflag.FlagSet, role identity.Role) {
	o.role = role
	f.StringVar(&o.server, "server", "", "`URL` of a Portal server to join, as portal token create --role "+string(role)+" prints it; instead of --kubeconfig")
	f.StringVar(&o.token, "token", "", "token to join with; not needed again once this machine has a certificate")
	f.StringVar(&o.tokenFile, "token-file", "", "file with the token")
	f.StringSliceVar(&o.hashes, "ca-hash", nil, "hash of the server's certificate authority, sha256:…; may be repeated")
	f.BoolVar(&o.skipHash, "unsafe-skip-ca-hash", false, "join without --ca-hash: know the server by the token alone, as anybody who has it could pretend to")
	f.StringVar(&o.dataDir, "data-dir", "", "folder for the certificate and key of this machine (default: "+filepath.Join(apiserver.DefaultOptions().DataDir, string(role))+" if --server is given)")
}

// given says whether the flags ask to join, or to go on with what was joined.
func (o *joinOptions) given() bool { return o.server != "" || o.dataDir != "" }

// validate reads the flags; others name what says where the API is, too.
func (o *joinOptions) validate(others map[string]string) error {
	if !o.given() {
		if o.token != "" || o.tokenFile != "" || len(o.hashes) > 0 || o.skipHash {
			return errors.New("--token, --token-file, --ca-hash and --unsafe-skip-ca-hash need --server: the URL of the server to join")
		}
		return nil
	}
	for flag, value := range others {
		if value != "" {
			return fmt.Errorf("--%s and --server or --data-dir: give one of them", flag)
		}
	}
	return nil
}

// options are those of the package join. Errors are the user's.
func (o *joinOptions) options(machine string, log *slog.Logger) (join.Options, error) {
	out := join.Options{Role: o.role, Machine: machine, Server: strings.TrimSuffix(o.server, "/"), SkipHash: o.skipHash, Dir: o.dataDir, Log: log}
	if out.Dir == "" {
		dir := apiserver.DefaultOptions().DataDir
		if user := userDataDir(); user != "" {
			dir = user
		}
		out.Dir = filepath.Join(dir, string(o.role))
	}
	text := o.token
	if o.tokenFile != "" {
		if text != "" {
			return out, errors.New("--token and --token-file: give one of them")
		}
		data, err := os.ReadFile(o.tokenFile)
		if err != nil {
			return out, fmt.Errorf("--token-file: %w", err)
		}
		text = strings.TrimSpace(string(data))
	}
	var err error
	if text != "" {
		if out.Token, err = bootstrap.ParseToken(text); err != nil {
			return out, fmt.Errorf("--token: %w", err)
		}
	}
	for _, h := range o.hashes {
		hash, err := bootstrap.ParseHash(h)
		if err != nil {
			return out, fmt.Errorf("--ca-hash: %w", err)
		}
		out.Hashes = append(out.Hashes, hash)
	}
	return out, out.Validate()
}

// join returns how the API is reached, and what keeps the certificate renewed until its context ends.
func (o *joinOptions) join(ctx context.Context, machine string, log *slog.Logger) (*rest.Config, func(context.Context), error) {
	credentials, err := o.credentials(ctx, machine, log)
	if err != nil {
		return nil, nil, err
	}
	return credentials.Config(), credentials.Run, nil
}

func (o *joinOptions) credentials(ctx context.Context, machine string, log *slog.Logger) (*join.Credentials, error) {
	options, err := o.options(machine, log)
	if err != nil {
		return nil, usageError{err}
	}
	return join.Join(ctx, options)
}

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"k8s.io/client-go/rest"

	"portal/internal/identity"
	"portal/internal/join"
	"portal/internal/node"
)

// nodeIdentities are who the parts of a node are to the API. A node reads its own Node only; a proxy, all of them.
type nodeIdentities struct {
	node, proxy, dns, lb *rest.Config
	renew                []func(context.Context)
}

// identities finds out how the API is reached: with a kubeconfig, or by joining. A machine that has joined as a node obtains its
// other identities as that node.
func (o *nodeOptions) identities(ctx context.Context, log *slog.Logger, options node.Options) (*nodeIdentities, error) {
	if o.kubeconfig != "" || !o.join.given() {
		config, err := apiConfigAt("", o.kubeconfig)
		if err != nil {
			return nil, usageError{orJoin(err)}
		}
		return &nodeIdentities{node: config, proxy: config, dns: config, lb: config}, nil
	}
	if err := o.join.validate(nil); err != nil {
		return nil, usageError{err}
	}
	own, err := o.join.credentials(ctx, options.Name, log)
	if err != nil {
		return nil, err
	}
	out := &nodeIdentities{node: own.Config(), renew: []func(context.Context){own.Run}}
	roles := map[identity.Role]**rest.Config{identity.Proxy: &out.proxy, identity.DNS: &out.dns}
	if o.parts.dns == "none" {
		delete(roles, identity.DNS)
	}
	if len(o.parts.balancers.pools) > 0 {
		roles[identity.LB] = &out.lb
	}
	// Each of them waits for the server: together they take no longer than one.
	var joining sync.WaitGroup
	var mu sync.Mutex
	for role, config := range roles {
		joining.Go(func() {
			got, e := join.Join(ctx, join.Options{Role: role, Machine: options.Name, Through: own, Dir: filepath.Join(options.DataDir, string(role)), Log: log})
			mu.Lock()
			defer mu.Unlock()
			if e != nil {
				err = errors.Join(err, fmt.Errorf("the machine's identity as %s: %w", role, e))
				return
			}
			*config, out.renew = got.Config(), append(out.renew, got.Run)
		})
	}
	joining.Wait()
	return out, err
}

// authorities are the CAs that clients of the node are known by: those of the cluster that was joined, as they are now, or of the kubeconfig.
func (o *nodeOptions) authorities(dir string, config *rest.Config) func() ([]byte, error) {
	if o.kubeconfig == "" && o.join.given() {
		return func() ([]byte, error) { return os.ReadFile(filepath.Join(dir, join.AuthorityFile)) }
	}
	return func() ([]byte, error) {
		if len(config.CAData) > 0 {
			return config.CAData, nil
		}
		return os.ReadFile(config.CAFile)
	}
}

// Package server runs the control plane in one process: the API server and, once it is ready, the controllers.
package server

import (
	"context"
	"time"

	"portal/internal/apiserver"
)

// Options are those of the API server and of the controllers.
type Options struct {
	apiserver.Options
	// Controllers to run: "*" all, "none" none, "name" one, "-name" all but one.
	Controllers   []string
	AuditInterval time.Duration
}

// DefaultOptions run every controller.
func DefaultOptions() Options {
	return Options{Options: apiserver.DefaultOptions(), Controllers: []string{"*"}, AuditInterval: 10 * time.Minute}
}

// ControllersHelp explains --controllers.
func ControllersHelp() string { return "controllers to run" }

// Info says where a running server is.
type Info struct{ Address, Kubeconfig, DataDir string }

// Run serves until ctx ends. ready is called when clients can come.
func Run(ctx context.Context, opts Options, ready func(context.Context, Info) error) error {
	api, err := apiserver.New(ctx, opts.Options)
	if err != nil {
		return err
	}
	return api.Run(ctx, func(ctx context.Context) error {
		return ready(ctx, Info{Address: api.Address(), Kubeconfig: api.Kubeconfig(), DataDir: api.DataDir()})
	})
}

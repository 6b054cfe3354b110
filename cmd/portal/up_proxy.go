package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"portal/internal/proxy"
	"portal/internal/server"
)

// upProxy is the service proxy of `portal up`.
type upProxy struct {
	mode string
	note string // why there is none
}

// firstSync is how long `portal up` waits for the proxy before it says that it is up.
const firstSync = 10 * time.Second

// startProxy leads traffic on this machine. Its failure leaves the rest running.
func (o *upOptions) startProxy(cmd *cobra.Command, info server.Info, beside *sync.WaitGroup) upProxy {
	if err := mayAdminister(); err != nil {
		return upProxy{note: "none without root: cluster IPs lead nowhere"}
	}
	options := defaultProxyOptions()
	options.kubeconfig, options.mode, options.healthz = info.Kubeconfig, o.proxy, ""
	options.clusterCIDR = strings.Join(o.server.ClusterCIDRs, ",")
	config, err := options.proxyConfig()
	if err != nil {
		return upProxy{note: "none: " + err.Error()}
	}
	api, err := options.api()
	if err != nil {
		return upProxy{note: "none: " + err.Error()}
	}
	modes := proxyModes(&options)
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	began, failed := make(chan string, 1), make(chan error, 1)
	tell := func(ctx context.Context, p *proxy.Proxy) {
		for !p.Synced() && wait(ctx, 10*time.Millisecond) {
		}
		began <- p.State(nil).Mode
	}
	beside.Go(func() {
		err := options.serve(cmd.Context(), log, config, modes, api, tell)
		if errors.Is(err, syscall.EADDRINUSE) && cmd.Context().Err() == nil {
			options.metrics = "" // somebody else measures; traffic is what matters
			err = options.serve(cmd.Context(), log, config, modes, api, tell)
		}
		// Nothing stays behind: the machine is as it was before.
		cleaning, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		failed <- errors.Join(err, proxy.Cleanup(cleaning, modes))
	})
	select {
	case mode := <-began:
		beside.Go(func() {
			if err := <-failed; err != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "portal: the proxy has ended: %v\n", err)
			}
		})
		return upProxy{mode: mode}
	case err := <-failed:
		return upProxy{note: fmt.Sprintf("none: %v", err)}
	case <-time.After(firstSync):
		return upProxy{mode: "not ready yet"}
	}
}

func (p upProxy) String() string {
	if p.note != "" {
		return p.note
	}
	return p.mode
}

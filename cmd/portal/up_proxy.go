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

	"portal/internal/identity"
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

// startProxy runs the proxy on this machine. Its failure leaves the rest running.
func (o *upOptions) startProxy(cmd *cobra.Command, log *slog.Logger, info server.Info, beside *sync.WaitGroup) upProxy {
	options := defaultProxyOptions()
	options.mode, options.healthz = o.proxy, ""
	options.clusterCIDR = strings.Join(o.server.ClusterCIDRs, ",")
	options.nodePortAddresses, options.configureSysctls = o.nodePortAddresses, o.configureSysctls
	config, err := options.proxyConfig()
	if err != nil {
		return upProxy{note: "none: " + err.Error()}
	}
	api := info.As(identity.Proxy.User(config.Node), identity.Proxy.Group())
	modes := proxyModes(&options)
	synced, ended := make(chan string, 1), make(chan error, 1)
	report := func(ctx context.Context, p *proxy.Proxy) {
		for !p.Synced() && wait(ctx, 10*time.Millisecond) {
		}
		synced <- p.State(nil).Mode
	}
	beside.Go(func() {
		err := options.serve(cmd.Context(), log, config, modes, api, report)
		if errors.Is(err, syscall.EADDRINUSE) && cmd.Context().Err() == nil {
			options.metrics = "" // another program has the port; traffic is what matters
			err = options.serve(cmd.Context(), log, config, modes, api, report)
		}
		// No rules and settings are left behind: the machine is as it was before.
		cleanup, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		ended <- errors.Join(err, proxy.Cleanup(cleanup, modes), options.sysctls.Restore())
	})
	mode := "not ready yet"
	select {
	case mode = <-synced:
	case <-time.After(firstSync):
	case err := <-ended:
		return upProxy{note: fmt.Sprintf("none: %v", err)}
	}
	beside.Go(func() {
		if err := <-ended; err != nil {
			log.Error("the proxy stopped", "err", err)
		}
	})
	return upProxy{mode: mode}
}

func (p upProxy) String() string {
	if p.note != "" {
		return p.note
	}
	return p.mode
}

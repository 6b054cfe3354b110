package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"portal/internal/console"
	"portal/internal/instance"
)

type consoleOptions struct {
	kubeconfig, context string
	listen              string
	logs                logOptions
}

func newConsoleCommand() *cobra.Command {
	var o consoleOptions
	cmd := &cobra.Command{
		Use:   "console",
		Short: "A page in the browser that shows Services and what is wrong with them, of any Kubernetes",
		Long: `Serves the console to this machine, for the API server of a kubeconfig, and prints the address to open. The address has a code in it:
whoever has that sees what the kubeconfig's user may see. Nothing is ever changed. A portal server has the same page at /console/.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.context, "context", "", "context of the kubeconfig (default: its current one)")
	f.StringVar(&o.listen, "listen", "127.0.0.1:8010", "host:port to serve the page at; the host must be this machine's loopback, for there is no TLS")
	o.logs.addFlags(f)
	return cmd
}

func (o *consoleOptions) run(ctx context.Context, out, logs io.Writer) error {
	if _, err := o.logs.setup(ctx, logs, slog.LevelWarn); err != nil {
		return usageError{err}
	}
	host, _, err := net.SplitHostPort(o.listen)
	if err != nil {
		return usageError{fmt.Errorf("--listen %q: must be host:port, such as 127.0.0.1:8010", o.listen)}
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return usageError{fmt.Errorf("--listen %q: must be an address of this machine's loopback, such as 127.0.0.1:8010: the page is served without TLS", o.listen)}
	}
	config, err := apiConfigFor(o.kubeconfig, o.context)
	if err != nil {
		return usageError{err}
	}
	code := rand.Text()
	page, err := console.New(console.Options{API: config, Code: code, Loopback: true, Findings: console.Explained})
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen %s: %w", o.listen, instance.InUse(o.listen, err))
	}
	mux := http.NewServeMux()
	mux.Handle(console.Path, page)
	mux.Handle("/{$}", http.RedirectHandler(console.Path, http.StatusFound))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	var group sync.WaitGroup
	defer group.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group.Go(func() {
		page.Run(ctx)
		_ = server.Close()
	})
	// The code is behind the #, so that a browser does not send it with every request and no log has it.
	fmt.Fprintf(out, "The console of %s is at\n  http://%s%s#code=%s\n", config.Host, listener.Addr(), console.Path, code)
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return ctx.Err()
}

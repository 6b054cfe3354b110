package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func newEchoCommand() *cobra.Command {
	var listen string
	var proxied, encrypted bool
	cmd := &cobra.Command{
		Use:   "echo",
		Short: "A small web server that answers with its host name: a backend to try Services with",
		Long: `A small web server, to try Services with. / answers with the host name; /env/PREFIX with the variables by which the process finds
Services, as far as their names begin with the prefix; /client with the address that the request came from; /header with the request's header
fields, and /proxy with the version of the PROXY header that the connection began with.

The image "portal" of a node is this program: a Pod with that image and the arguments echo, --listen, :9376 is a backend.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := addrPorts([]string{listen})
			if err != nil {
				return usageError{fmt.Errorf("--listen: %w", err)}
			}
			l, err := net.Listen("tcp", at[0].String())
			if err != nil {
				return fmt.Errorf("--listen: %w", err)
			}
			if proxied {
				l = proxyListener{l}
			}
			if encrypted {
				if l, err = selfSigned(l); err != nil {
					return err
				}
			}
			return serveEcho(cmd.Context(), l)
		},
	}
	cmd.Flags().BoolVar(&proxied, "proxy-protocol", false, "connections begin with a PROXY header, version 1 or 2, and are closed if they don't; /client answers with the address that it has")
	cmd.Flags().BoolVar(&encrypted, "tls", false, "speak TLS, with a certificate that signs itself")
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:8080", "ADDRESS:PORT to serve at; without an address: all")
	return cmd
}

// serveEcho answers until the context ends.
func serveEcho(ctx context.Context, l net.Listener) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, name) })
	mux.HandleFunc("GET /client", func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintln(w, host)
	})
	mux.HandleFunc("GET /header", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s\nHost: %s\n", r.Method, r.Proto, r.Host)
		for _, name := range slices.Sorted(maps.Keys(r.Header)) {
			for _, value := range r.Header[name] {
				fmt.Fprintf(w, "%s: %s\n", name, value)
			}
		}
	})
	mux.HandleFunc("GET /proxy", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, proxyVersion(r.Context()))
	})
	mux.HandleFunc("GET /env/{prefix}", func(w http.ResponseWriter, r *http.Request) {
		for _, line := range serviceVariables(os.Environ(), r.PathValue("prefix")) {
			fmt.Fprintln(w, line)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ConnContext: withProxiedConn}
	answered := make(chan error, 1)
	context.AfterFunc(ctx, func() { answered <- server.Shutdown(context.Background()) })
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-answered // Serve returns before the last requests have been answered
}

// serviceVariables are those of an environment that are about Services, and of these the ones that begin with the prefix. Others may
// be secrets.
func serviceVariables(env []string, prefix string) (out []string) {
	for _, line := range env {
		name, _, _ := strings.Cut(line, "=")
		about := strings.Contains(name, "_SERVICE_HOST") || strings.Contains(name, "_SERVICE_PORT") || strings.HasSuffix(name, "_PORT") || strings.Contains(name, "_PORT_")
		if about && strings.HasPrefix(name, prefix) {
			out = append(out, line)
		}
	}
	slices.Sort(out)
	return out
}

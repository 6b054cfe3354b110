package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"portal/internal/server"
	"portal/internal/startup"
)

// upOptions are the flags of `portal up`: those of the server, and of what runs beside it.
type upOptions struct {
	server server.Options
	logs   logOptions
	dns    string
	proxy  string
}

func newUpCommand() *cobra.Command {
	o := upOptions{server: server.DefaultOptions()}
	if dir := userDataDir(); dir != "" {
		o.server.DataDir = dir
	}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Everything on this machine, in the foreground",
		Long:  "Runs everything on this machine in the foreground, and says where things are and what to type next.",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	addServerFlags(cmd.Flags(), &o.server)
	o.logs.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&o.dns, "dns", "auto",
		"ADDRESS:PORT at which names are served; none; or auto: the tenth address of the service range, lent to this machine "+
			"while it runs, or "+fallbackDNS+" where that is not allowed")
	cmd.Flags().StringVar(&o.proxy, "proxy-mode", "auto", "how traffic to Services is led on this machine: none, auto, "+strings.Join(proxyModeNames(), ", "))
	return cmd
}

func (o *upOptions) run(cmd *cobra.Command) error {
	if err := o.logs.apply(); err != nil {
		return usageError{err}
	}
	if err := o.server.Validate(); err != nil {
		return usageError{err}
	}
	if o.dns != "auto" && o.dns != "none" {
		if _, err := addrPorts([]string{o.dns}); err != nil {
			return usageError{fmt.Errorf("--dns: %w, auto or none", err)}
		}
	}
	if o.proxy != "none" && !knownMode(o.proxy) {
		return usageError{fmt.Errorf("--proxy-mode: %q is not one of none, auto, %s", o.proxy, strings.Join(proxyModeNames(), ", "))}
	}
	o.logs.quiet(cmd.ErrOrStderr())
	startup.Collect(garbage)
	startup.Profile()
	out := cmd.OutOrStdout()
	fmt.Fprintln(out, "Portal is starting ...")
	// What runs beside the server ends with the same signal, and is waited for.
	var beside sync.WaitGroup
	err := server.Run(cmd.Context(), o.server, func(_ context.Context, info server.Info) error {
		led := upProxy{note: "none"}
		if o.proxy != "none" {
			led = o.startProxy(cmd, info, &beside)
		}
		var dns *upDNS
		if o.dns != "none" {
			var err error
			if dns, err = o.startDNS(cmd, info, led.note == "", &beside); err != nil {
				fmt.Fprintf(out, "There is no DNS: %v\n", err)
			}
		}
		welcome(out, info, led, dns)
		return nil
	})
	beside.Wait()
	if err == nil {
		fmt.Fprintln(out, "Portal has stopped.")
	}
	return err
}

// startDNS runs the DNS server beside the API. Its failure leaves the rest running.
func (o *upOptions) startDNS(cmd *cobra.Command, info server.Info, led bool, beside *sync.WaitGroup) (*upDNS, error) {
	config, err := apiConfig(info.Kubeconfig)
	if err != nil {
		return nil, err
	}
	dns, err := o.prepareDNS(cmd.Context(), config, info, led)
	if err != nil {
		return nil, err
	}
	open, failed := make(chan struct{}), make(chan error, 1)
	beside.Go(func() {
		err := dns.run(cmd.Context(), cmd, config, func() { close(open) })
		select {
		case <-open:
			if err != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "portal: DNS has ended: %v\n", err)
			}
		default:
			failed <- err
		}
	})
	select {
	case <-open:
		return dns, nil
	case err := <-failed:
		return nil, err
	}
}

func welcome(out io.Writer, info server.Info, led upProxy, dns *upDNS) {
	where, try := "none", ""
	if dns != nil {
		where, try = dns.lines()
	}
	fmt.Fprintf(out, `Portal is up.
  API         https://%s
  proxy       %s
  DNS         %s
  kubeconfig  %s

Try, in another terminal:
  export KUBECONFIG=%s
  portal kubectl create service clusterip web --tcp=80:8080
  portal kubectl get services
  portal audit
%s
Ctrl-C stops it; what was created stays in %s.
`, info.Address, led, where, info.Kubeconfig, info.Kubeconfig, try, info.DataDir)
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/plan"
	"portal/internal/server"
)

// upOptions are the flags of `portal up`: those of the server, and of what runs beside it.
type upOptions struct {
	server            server.Options
	logs              logOptions
	dns               string
	proxy             string
	nodePortAddresses []string
	configureSysctls  bool
}

func newUpCommand() *cobra.Command {
	o := upOptions{server: server.DefaultOptions()}
	o.server.OnConnections = collectByConnections()
	if dir := userDataDir(); dir != "" {
		o.server.DataDir = dir
	}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run everything on this machine, in the foreground",
		Long: `Run the server, the proxy and DNS on this machine in the foreground, and print where they are and what to type next.

Without root it runs the server and DNS at ` + fallbackDNS + `. The proxy needs root: it programs the kernel.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	addServerFlags(f, &o.server)
	o.logs.addFlags(f)
	f.StringVar(&o.dns, "dns", "auto",
		"ADDRESS:PORT to serve DNS at; none; or auto: the tenth address of the service range, added to lo while this runs, or "+
			fallbackDNS+" if that is not allowed")
	f.StringVar(&o.proxy, "proxy-mode", "auto", "proxy mode: none, auto, "+strings.Join(proxyModeNames(), ", "))
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", []string{"all"},
		"addresses that node ports are served at: prefixes, primary (the node's own), localhost, all")
	f.BoolVar(&o.configureSysctls, "configure-sysctls", false,
		"while this runs, turn on forwarding and make a strict rp_filter loose if packets to Services would be lost otherwise")
	return cmd
}

// validate checks the flags before anything is started.
func (o *upOptions) validate() error {
	if err := o.server.Validate(); err != nil {
		return err
	}
	if o.dns != "auto" && o.dns != "none" {
		if _, err := addrPorts([]string{o.dns}); err != nil {
			return fmt.Errorf("--dns: %w, auto or none", err)
		}
	}
	if o.proxy != "none" && !knownMode(o.proxy) {
		return fmt.Errorf("--proxy-mode: %q is not one of none, auto, %s", o.proxy, strings.Join(proxyModeNames(), ", "))
	}
	if _, err := plan.ParseNodePortAddresses(o.nodePortAddresses); err != nil {
		return fmt.Errorf("--nodeport-addresses: %w", err)
	}
	return nil
}

func (o *upOptions) run(cmd *cobra.Command) error {
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelWarn) // a person reads this terminal
	if err != nil {
		return usageError{err}
	}
	if err := o.validate(); err != nil {
		return usageError{err}
	}
	out := cmd.OutOrStdout()
	parts, err := o.claim(cmd.Context(), out)
	if err != nil {
		return err
	}
	defer parts.release()
	collectAt(garbage)
	fmt.Fprintln(out, "Portal is starting ...")
	// What runs beside the server ends with the same signal, and is waited for.
	var beside sync.WaitGroup
	err = server.Run(cmd.Context(), o.server, func(_ context.Context, info server.Info) error {
		// DNS first: its endpoints, which the API has from an earlier run, are then this machine's when the proxy sees them.
		var dns *upDNS
		if o.dns != "none" {
			var err error
			if dns, err = o.startDNS(cmd, log, info, parts, &beside); err != nil {
				fmt.Fprintf(out, "DNS could not be started: %v\n", err)
			}
		}
		proxy := upProxy{note: parts.noProxy}
		if proxy.note == "" {
			proxy = o.startProxy(cmd, log, info, &beside)
		}
		return welcome(out, info, proxy, dns)
	})
	beside.Wait()
	if err == nil || stopped(cmd.Context(), err) {
		fmt.Fprintln(out, "Portal has stopped.")
	}
	return err
}

// upParts says which parts this process may run: one proxy and one DNS server for each network namespace.
type upParts struct {
	locks   []*instance.Lock
	noProxy string // why there is no proxy
	noVIP   string // why DNS can't be at its cluster IP
}

func (p *upParts) release() {
	for _, l := range p.locks {
		l.Release()
	}
}

// handover is how long to wait for an earlier `portal up` that is about to end.
const handover = 5 * time.Second

// claim decides which parts to run. It fails if one can't run that was asked for by name.
func (o *upOptions) claim(ctx context.Context, out io.Writer) (_ *upParts, err error) {
	p := &upParts{}
	defer func() {
		if err != nil {
			p.release()
		}
	}()
	rights, deadline := mayAdminister(), time.Now().Add(handover)
	lock := func(name string) error {
		if rights != nil {
			return rights
		}
		l, err := instance.Acquire(ctx, name, time.Until(deadline), func(h instance.Holder) {
			fmt.Fprintf(out, "Waiting for %v to end ...\n", h)
		})
		if err == nil {
			p.locks = append(p.locks, l)
		}
		return err
	}
	switch o.proxy {
	case "none":
		p.noProxy = "none"
	case "auto":
		err = lock(instance.Proxy)
		if err != nil {
			p.noProxy = "none: " + short(err)
		}
	default:
		if err = lock(instance.Proxy); err != nil {
			return nil, usageError{fmt.Errorf("--proxy-mode %s: %w", o.proxy, err)}
		}
	}
	if o.dns == "auto" {
		if err = lock(instance.DNS); err != nil {
			p.noVIP = short(err)
		}
	}
	return p, ctx.Err()
}

// short says in a few words why a part can't run.
func short(err error) string {
	var held *instance.HeldError
	if errors.As(err, &held) {
		return fmt.Sprintf("%v has it in this network namespace", held.Holder)
	}
	return "needs root"
}

// startDNS runs the DNS server beside the API. Its failure leaves the rest running.
func (o *upOptions) startDNS(cmd *cobra.Command, log *slog.Logger, info server.Info, parts *upParts, beside *sync.WaitGroup) (*upDNS, error) {
	machine, err := machineName("")
	if err != nil {
		return nil, err
	}
	dns, err := o.prepareDNS(cmd.Context(), info, parts.noVIP, parts.noProxy == "")
	if err != nil {
		return nil, err
	}
	config := info.As(identity.DNS.User(machine), identity.DNS.Group())
	open, failed := make(chan struct{}), make(chan error, 1)
	beside.Go(func() {
		err := dns.run(cmd.Context(), cmd, log, config, func() { close(open) })
		select {
		case <-open:
			if err != nil {
				log.Error("DNS stopped", "err", err)
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

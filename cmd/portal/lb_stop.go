package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"portal/internal/lb"
	"portal/internal/lb/standin"
)

// stopGrace is for how long the addresses of a machine are kept for a process that follows. Members of other versions believe no Lease that is longer.
const stopGrace = 15 * time.Second

// stop is what becomes of addresses when ctx ends.
func (o *balancerOptions) stop(ctx context.Context, log *slog.Logger) (out lb.Stop) {
	out.Settled = func() {
		if err := standin.End(ctx, o.folder()); err != nil && ctx.Err() == nil {
			log.Warn("the process that stood in for this one goes on until its time is over", "err", err)
		}
	}
	if o.ephemeral || o.l2OnStop == onStopRelease {
		return out
	}
	out.Grace = stopGrace
	out.Final = func() string { return final(ctx) }
	if os.Getpid() != 1 { // in a container nothing outlives the first process
		out.StandIn = func(addrs []netip.Addr, until time.Time) error {
			args := []string{"lb", "stand-in", "--dir", o.folder(), "--until", until.Format(time.RFC3339Nano), "--interface", strings.Join(o.interfaces, ",")}
			for _, a := range addrs {
				args = append(args, "--address", a.String())
			}
			return standin.Start(o.folder(), "/proc/self/exe", args...)
		}
	}
	return out
}

// final says why no process will follow this one, whose context has ended, or nothing.
func final(ctx context.Context) string {
	if interrupted(ctx) {
		return "interrupted from the keyboard"
	}
	if shuttingDown() {
		return "the machine shuts down"
	}
	return ""
}

// interrupted says whether a context of signal.NotifyContext ended by SIGINT: service managers send SIGTERM.
func interrupted(ctx context.Context) bool {
	cause := context.Cause(ctx)
	return cause != nil && cause.Error() == os.Interrupt.String()+" signal received"
}

// shuttingDown asks systemd, if this machine has it.
func shuttingDown() bool {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	state, _ := exec.CommandContext(ctx, "systemctl", "is-system-running").Output() // its status is not 0 for this state
	return strings.TrimSpace(string(state)) == "stopping"
}

// newLBStandInCommand runs the process that answers for addresses while `portal lb`, which starts it, is restarted. People have no need for it.
func newLBStandInCommand() *cobra.Command {
	var dir, until string
	var addresses, interfaces []string
	var logs logOptions
	cmd := &cobra.Command{
		Use:    "stand-in",
		Short:  "Answer for addresses while portal lb, which starts this, is restarted",
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
			if err != nil {
				return usageError{err}
			}
			nameProcess(standInName)
			options := standin.Options{Dir: dir, Interfaces: interfaces, Ready: standin.Ready, Log: log}
			if dir == "" {
				return usageError{errors.New("--dir: a folder is needed")}
			}
			if options.Until, err = time.Parse(time.RFC3339Nano, until); err != nil {
				return usageError{fmt.Errorf("--until: %q is no time like 2006-01-02T15:04:05Z", until)}
			}
			for _, text := range addresses {
				a, err := netip.ParseAddr(text)
				if err != nil {
					return usageError{fmt.Errorf("--address: %w", err)}
				}
				options.Addresses = append(options.Addresses, a)
			}
			return standin.Serve(cmd.Context(), options)
		},
	}
	f := cmd.Flags()
	f.StringVar(&dir, "dir", "", "folder of the balancer")
	f.StringVar(&until, "until", "", "when it ends at the latest")
	f.StringArrayVar(&addresses, "address", nil, "an address to answer for; may be repeated")
	f.StringSliceVar(&interfaces, "interface", nil, "interfaces to answer on")
	logs.addFlags(f)
	return cmd
}

// Command portal is the Kubernetes Service as a system of its own: see the subcommands.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// usageError is a mistake in how the program was called: told in one line, exit status 2.
type usageError struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// The first signal asks for an orderly end; a second one gets the default treatment, unless it is the same once more:
	// timeout(1), for one, sends it to the process and to its group.
	context.AfterFunc(ctx, func() {
		time.Sleep(time.Second)
		stop()
	})
	os.Exit(run(ctx, os.Args[1:], os.Stderr))
}

func run(ctx context.Context, args []string, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "portal: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	if errors.As(err, &usageError{}) || strings.HasPrefix(err.Error(), "unknown command") {
		return 2
	}
	return 1
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "portal",
		Short:         "The Kubernetes Service as a system of its own",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(
		newUpCommand(),
		newServerCommand(),
		newControllersCommand(),
		newProxyCommand(),
		newDNSCommand(),
		newEnvCommand(),
		newAuditCommand(),
		newVersionCommand(),
		newKubectlCommand(),
	)
	return root
}

// noArgs refuses arguments where only flags are expected.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%s takes no arguments, only flags: %q", cmd.CommandPath(), args[0])}
	}
	return nil
}

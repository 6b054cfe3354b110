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

// usageError is a mistake in how the program was called: reported in one line, exit status 2.
type usageError struct{ error }

func main() {
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	// A terminal that is closed asks for an orderly end too, unless nohup(1) said that it should not matter.
	if !signal.Ignored(syscall.SIGHUP) {
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()
	// The first signal starts an orderly shutdown. A second one ends the process at once, unless it follows immediately:
	// timeout(1), for example, signals the process and its group.
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
	if err == nil || stopped(ctx, err) {
		return 0
	}
	if errors.As(err, &foundError{}) {
		return 1
	}
	fmt.Fprintf(stderr, "portal: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	if errors.As(err, &usageError{}) {
		return 2
	}
	return 1
}

// stopped reports whether an error only follows from stopping the process.
func stopped(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, context.Canceled)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "portal",
		Short:         "The Kubernetes Service as a system of its own",
		Version:       versionLine(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          subcommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(flagError)
	root.SetVersionTemplate("{{.Version}}\n")
	root.AddCommand(
		newUpCommand(),
		newServerCommand(),
		newControllersCommand(),
		newProxyCommand(),
		newDNSCommand(),
		newLBCommand(),
		newNodeCommand(),
		newImageCommand(),
		newRegisterCommand(),
		newDeregisterCommand(),
		newLabCommand(),
		newTraceCommand(),
		newTopCommand(),
		newEnvCommand(),
		newEchoCommand(),
		newExplainCommand(),
		newStatusCommand(),
		newAuditCommand(),
		newConsoleCommand(),
		newCertsCommand(),
		newTokenCommand(),
		newStorageCommand(),
		newVersionCommand(),
		newKubectlCommand(),
	)
	return root
}

// subcommand refuses the name of a subcommand that does not exist, for commands that only group others.
func subcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	hint := fmt.Sprintf("%s --help lists the commands", cmd.CommandPath())
	if similar := closest(args[0], cmd.SuggestionsFor(args[0])); len(similar) > 0 {
		hint = "did you mean " + strings.Join(similar, " or ") + "?"
	}
	return usageError{fmt.Errorf("unknown command %q: %s", strings.TrimPrefix(cmd.CommandPath()+" "+args[0], cmd.Root().Name()+" "), hint)}
}

// noArgs refuses arguments where only flags are expected.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%s takes no arguments, only flags: %q", cmd.CommandPath(), args[0])}
	}
	return nil
}

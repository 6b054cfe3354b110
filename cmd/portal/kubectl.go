package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/rest"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/plugin"

	_ "portal/internal/translations" // keeps kubectl's translations out of all other commands
)

// newKubectlCommand is kubectl itself. Without other instructions it talks to this machine's server.
func newKubectlCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "kubectl [command]",
		Short:              "kubectl, built in and configured for this machine's server",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runKubectl(cmd.Context(), args)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, last string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return completeKubectl(cmd, append(args, last))
		},
	}
}

func runKubectl(ctx context.Context, args []string) error {
	inner, err := innerKubectl(args)
	if err != nil {
		return err
	}
	if err := inner.ExecuteContext(ctx); err != nil {
		return fmt.Errorf("kubectl: %w", err)
	}
	return nil
}

// innerKubectl is kubectl's own command, ready to run.
func innerKubectl(args []string) (*cobra.Command, error) {
	if path := findKubeconfig(); path != "" {
		if err := os.Setenv("KUBECONFIG", path); err != nil {
			return nil, err
		}
	}
	// kubectl reads the process' arguments in places: to find plugins, and for the names in its help.
	os.Args = append([]string{"kubectl"}, args...)
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	inner := kubectl.NewDefaultKubectlCommandWithArgs(kubectl.KubectlOptions{
		PluginHandler: kubectl.NewDefaultPluginHandler(plugin.ValidPluginFilenamePrefixes), Arguments: os.Args, ConfigFlags: kubectlFlags(streams), IOStreams: streams,
	})
	inner.SetArgs(args)
	inner.SilenceErrors = true // reported here, once
	return inner, nil
}

// kubectlDefault is where kubectl looks for a server if nothing says where one is.
const kubectlDefault = "http://localhost:8080"

// kubectlFlags are kubectl's own, but requests fail with what Portal's other commands say if no server is known. Commands that ask no
// server work without one.
func kubectlFlags(streams genericiooptions.IOStreams) *genericclioptions.ConfigFlags {
	flags := genericclioptions.NewConfigFlags(true).WithDeprecatedPasswordFlag().WithDiscoveryBurst(300).WithDiscoveryQPS(50).WithWarningPrinter(streams)
	return flags.WithWrapConfigFn(func(c *rest.Config) *rest.Config {
		if c.Host != kubectlDefault || *flags.APIServer != "" {
			return c
		}
		if _, err := apiConfigFor(*flags.KubeConfig, *flags.Context); err != nil {
			utilruntime.ErrorHandlers = nil // they log each of several attempts to find out what the server has
			c.Wrap(func(http.RoundTripper) http.RoundTripper { return noServer{err} })
		}
		return c
	})
}

// noServer answers requests while no server is known.
type noServer struct{ err error }

func (n noServer) RoundTrip(*http.Request) (*http.Response, error) { return nil, n.err }

// completeKubectl asks kubectl for completions. It prints one a line, and the directive after a colon at the end.
func completeKubectl(cmd *cobra.Command, words []string) ([]cobra.Completion, cobra.ShellCompDirective) {
	inner, err := innerKubectl(append([]string{cobra.ShellCompRequestCmd}, words...))
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var out bytes.Buffer
	inner.SetOut(&out)
	inner.SetErr(io.Discard)
	if err := inner.ExecuteContext(cmd.Context()); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := len(lines) - 1
	directive, err := strconv.Atoi(strings.TrimPrefix(lines[last], ":"))
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return lines[:last], cobra.ShellCompDirective(directive)
}

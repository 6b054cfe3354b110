package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	kubectl "k8s.io/kubectl/pkg/cmd"

	_ "portal/internal/translations" // keeps kubectl's translations out of all other commands
)

// newKubectlCommand is kubectl itself. Without other instructions it talks to this machine's server.
func newKubectlCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "kubectl [command]",
		Short:              "kubectl, built in and configured for this machine's server",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			inner, err := innerKubectl(args)
			if err != nil {
				return err
			}
			if err := inner.ExecuteContext(cmd.Context()); err != nil {
				return fmt.Errorf("kubectl: %w", err)
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, last string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return completeKubectl(cmd, append(args, last))
		},
	}
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
	inner := kubectl.NewDefaultKubectlCommand()
	inner.SetArgs(args)
	inner.SilenceErrors = true // reported here, once
	return inner, nil
}

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

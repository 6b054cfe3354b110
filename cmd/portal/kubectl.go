package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	kubectl "k8s.io/kubectl/pkg/cmd"

	"portal/internal/apiserver"
	_ "portal/internal/translations" // which spares all other commands kubectl's words
)

// newKubectlCommand is kubectl itself, pointed at the local server where the user does not say otherwise.
func newKubectlCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "kubectl [command]",
		Short:              "kubectl, built in and pointed at this machine's server",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := pointKubectl(); err != nil {
				return err
			}
			// kubectl reads the program's arguments in places, for plugins and for the names in its help.
			os.Args = append([]string{"kubectl"}, args...)
			inner := kubectl.NewDefaultKubectlCommand()
			inner.SetArgs(args)
			if err := inner.ExecuteContext(cmd.Context()); err != nil {
				return fmt.Errorf("kubectl: %w", err)
			}
			return nil
		},
	}
}

// pointKubectl sets KUBECONFIG, unless the user has, to the local server's file.
func pointKubectl() error {
	if os.Getenv("KUBECONFIG") != "" {
		return nil
	}
	for _, dir := range []string{os.Getenv("PORTAL_DATA_DIR"), userDataDir(), apiserver.DefaultOptions().DataDir} {
		if dir == "" {
			continue
		}
		if path := kubeconfigIn(dir); readable(path) {
			return os.Setenv("KUBECONFIG", path)
		}
	}
	return nil
}

func readable(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	return f.Close() == nil
}

// userDataDir is where `portal up` keeps its data for somebody who is not root.
func userDataDir() string {
	if os.Geteuid() == 0 {
		return ""
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "share", "portal")
}

package main

import (
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
	kubeversion "k8s.io/component-base/version"
)

// version is Portal's own, set when it is built.
var version = "dev"

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Which Portal this is, and which Kubernetes its API is that of",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info := struct {
				Portal     string `json:"portal"`
				Kubernetes string `json:"kubernetes"`
				Go         string `json:"go"`
				Platform   string `json:"platform"`
			}{version, kubeversion.Get().GitVersion, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			switch output {
			case "json":
				return json.NewEncoder(cmd.OutOrStdout()).Encode(info)
			case "":
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "portal %s (Kubernetes API %s, %s, %s)\n",
					info.Portal, info.Kubernetes, info.Go, info.Platform)
				return err
			}
			return usageError{fmt.Errorf("--output %q: must be json, or left out", output)}
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "json for programs")
	return cmd
}

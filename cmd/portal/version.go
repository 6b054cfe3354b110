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

type versionInfo struct {
	Portal     string `json:"portal"`
	Kubernetes string `json:"kubernetes"`
	Go         string `json:"go"`
	Platform   string `json:"platform"`
}

func currentVersion() versionInfo {
	return versionInfo{version, kubeversion.Get().GitVersion, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
}

// versionLine is what `portal --version` and `portal version` print.
func versionLine() string {
	v := currentVersion()
	return fmt.Sprintf("portal %s (Kubernetes API %s, %s, %s)", v.Portal, v.Kubernetes, v.Go, v.Platform)
}

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of Portal and of the Kubernetes API that it serves",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := checkOutput(output)
			switch {
			case err != nil:
			case output == "json":
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(currentVersion())
			default:
				_, err = fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "output format: json, or one line of text if left out")
	return cmd
}

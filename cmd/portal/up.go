package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"portal/internal/server"
)

func newUpCommand() *cobra.Command {
	opts := server.DefaultOptions()
	if dir := userDataDir(); dir != "" {
		opts.DataDir = dir
	}
	logs := logOptions{}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Everything on this machine, in the foreground",
		Long:  "Runs everything on this machine in the foreground, and says where things are and what to type next.",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := logs.apply(); err != nil {
				return usageError{err}
			}
			if err := opts.Validate(); err != nil {
				return usageError{err}
			}
			tuneMemory()
			out := cmd.OutOrStdout()
			fmt.Fprintln(out, "Portal is starting ...")
			err := server.Run(cmd.Context(), opts, func(_ context.Context, info server.Info) error {
				welcome(out, info)
				return nil
			})
			if err == nil {
				fmt.Fprintln(out, "Portal has stopped.")
			}
			return err
		},
	}
	addServerFlags(cmd.Flags(), &opts)
	logs.addFlags(cmd.Flags())
	return cmd
}

func welcome(out io.Writer, info server.Info) {
	fmt.Fprintf(out, `Portal is up.
  API         https://%s
  kubeconfig  %s

Try, in another terminal:
  export KUBECONFIG=%s
  portal kubectl create service clusterip web --tcp=80:8080
  portal kubectl get services
  portal audit

Ctrl-C stops it; what was created stays in %s.
`, info.Address, info.Kubeconfig, info.Kubeconfig, info.DataDir)
}

package main

import (
	"github.com/spf13/cobra"

	"portal/internal/explain"
	"portal/internal/explain/gather"
)

func newStatusCommand() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "One look at a cluster: servers, controllers, nodes with proxies and DNS, ranges, certificates, what is wrong",
		Long: `Print the state of a cluster on one screen. It only reads, and works with any Kubernetes. The exit status is 0 if nothing is wrong
and 1 if something is; portal explain says what to do about it.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.status(cmd) },
	}
	o.addFlags(cmd)
	return cmd
}

func (o *explainOptions) status(cmd *cobra.Command) error {
	evidence, err := o.gather(cmd, gather.Options{Zone: "cluster.local", SkipNodes: !o.nodes})
	if err != nil {
		return err
	}
	status := explain.Summary(explain.Look(evidence))
	if len(status.Servers) == 0 { // a server at loopback is no endpoint
		status.Servers = []string{o.reached}
	}
	if o.output == "json" {
		err = printJSON(cmd.OutOrStdout(), status)
	} else {
		err = explain.PrintStatus(cmd.OutOrStdout(), status, evidence.Now)
	}
	if err == nil && len(status.Findings) > 0 {
		err = foundError{}
	}
	return err
}

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"portal/internal/audit"
)

type auditOptions struct {
	kubeconfig string
	output     string
	repair     bool
}

func newAuditCommand() *cobra.Command {
	var o auditOptions
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Whether every address and port of a Service is claimed for it, and every claim has its Service",
		Long: `Ask the server to compare all Services with what is claimed for them, and print what does not fit: it can only come
from somebody who edited etcd. The exit status is 0 if all is sound and 1 if not.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	outputFlag(f, &o.output)
	f.BoolVar(&o.repair, "repair", false, "repair first what can be repaired without disturbing a Service")
	return cmd
}

func (o *auditOptions) run(ctx context.Context, out io.Writer) error {
	if err := checkOutput(o.output); err != nil {
		return err
	}
	config, err := apiConfig(o.kubeconfig)
	if err != nil {
		return usageError{err}
	}
	report, err := askAudit(ctx, config, o.repair)
	if err != nil {
		return err
	}
	if o.output == "json" {
		err = printJSON(out, report)
	} else {
		err = printAudit(out, report)
	}
	if err != nil {
		return err
	}
	return remaining(report)
}

// askAudit asks the server for its audit, after repairs if they are wanted.
func askAudit(ctx context.Context, config *rest.Config, repair bool) (audit.Report, error) {
	var report audit.Report
	client, err := serverClient(config)
	if err != nil {
		return report, err
	}
	verb := "GET"
	if repair {
		verb = "POST"
	}
	body, err := client.Verb(verb).AbsPath(audit.Path).Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return report, fmt.Errorf("the server at %s has no %s: it is not Portal's (Kubernetes' own server repairs its allocations by itself)", config.Host, audit.Path)
	}
	if err != nil {
		return report, fmt.Errorf("ask %s for its audit: %w", config.Host, err)
	}
	if err := json.Unmarshal(body, &report); err != nil {
		return report, fmt.Errorf("the answer of %s is not an audit: %w", config.Host, err)
	}
	return report, nil
}

// printAudit tells people what was done, what is left, and what to do about it.
func printAudit(out io.Writer, report audit.Report) error {
	table := newTable(out)
	for i := range report.Repairs {
		fmt.Fprintf(out, "%s: %s\n", report.Repairs[i].Message, &report.Repairs[i])
	}
	fmt.Fprintf(out, "%s, %s and %s claimed at revision %d", counted(report.Services, "Service", "Services"),
		counted(report.Addresses, "address", "addresses"), counted(report.Ports, "port", "ports"), report.Revision)
	if len(report.Findings) == 0 {
		_, err := fmt.Fprintln(out, ": all sound")
		return err
	}
	fmt.Fprintf(out, ": %s\n\n", counted(len(report.Findings), "problem", "problems"))
	fmt.Fprintln(table, "PROBLEM\tSERVICE\tCLAIM\tWHAT IS WRONG\tWHAT TO DO")
	for _, f := range report.Findings {
		remedy := f.Remedy
		if f.Repairable {
			remedy = "portal audit --repair, to " + remedy
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", f.Problem, orDash(f.Service), orDash(f.Claim), f.Message, remedy)
	}
	return table.Flush()
}

// remaining is the error that makes the exit status say that not all is sound.
func remaining(report audit.Report) error {
	repairable := 0
	for _, f := range report.Findings {
		if f.Repairable {
			repairable++
		}
	}
	switch n := len(report.Findings); {
	case n == 0:
		return nil
	case repairable == 0:
		return fmt.Errorf("%s for the administrator to repair", counted(n, "problem is left", "problems are left"))
	default:
		return fmt.Errorf("%s, of which --repair can repair %d", counted(n, "problem is left", "problems are left"), repairable)
	}
}

func counted(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

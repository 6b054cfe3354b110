package main

import (
	"crypto/tls"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"portal/internal/lb/tlspolicy"
)

// policyInfo is what `portal lb policies -o json` prints for each policy.
type policyInfo struct {
	Name       string   `json:"name"`
	Versions   []string `json:"versions"`
	Suites     []string `json:"suites"`
	NotOffered []string `json:"notOffered,omitempty"`
}

func newLBPoliciesCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "policies",
		Short: "List the TLS policies that a Service can name, with their versions and cipher suites",
		Long: `List the TLS policies that the annotation service.beta.kubernetes.io/aws-load-balancer-ssl-negotiation-policy can name, with their TLS
versions and cipher suites, and what of a policy is not offered because Go's TLS does not have it. A Service that names none gets
` + tlspolicy.Default + `.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			var all []policyInfo
			for _, p := range tlspolicy.All() {
				all = append(all, describePolicy(p))
			}
			if output == "json" {
				return printJSON(cmd.OutOrStdout(), all)
			}
			w := newTable(cmd.OutOrStdout())
			for _, p := range all {
				fmt.Fprintf(w, "%s\tversions\t%s\n", p.Name, strings.Join(p.Versions, " "))
				fmt.Fprintf(w, "\tsuites\t%s\n", strings.Join(p.Suites, " "))
				if len(p.NotOffered) > 0 {
					fmt.Fprintf(w, "\tnot offered\t%s\n", strings.Join(p.NotOffered, " "))
				}
			}
			return w.Flush()
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "output format: json, or text if left out")
	return cmd
}

func describePolicy(p tlspolicy.Policy) policyInfo {
	out := policyInfo{Name: p.Name, Suites: p.Suites, NotOffered: p.NotOffered}
	for v := p.MinVersion; v <= p.MaxVersion; v++ {
		out.Versions = append(out.Versions, strings.ReplaceAll(tls.VersionName(v), " ", ""))
	}
	if p.MaxVersion >= tls.VersionTLS13 {
		for _, s := range tls.CipherSuites() {
			if strings.HasPrefix(s.Name, "TLS_AES_") || strings.HasPrefix(s.Name, "TLS_CHACHA20_") {
				out.Suites = append([]string{s.Name}, out.Suites...)
			}
		}
	}
	return out
}

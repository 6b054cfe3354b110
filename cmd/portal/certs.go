package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"portal/internal/apiserver"
	"portal/internal/pki"
)

type certsOptions struct {
	kubeconfig string
	dataDir    string
	output     string
	revoke     bool
}

// renewable are the certificates that can be renewed by name.
var renewable = []string{"ca", "server", "admin", "node-client", "front-proxy-client", "service-account"}

func newCertsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "certs",
		Short: "List and renew the certificates of a server",
		Long: "A server renews its certificates by itself after two thirds of their life, without a restart. These commands show\n" +
			"them, and renew them at once.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCertsListCommand(), newCertsRenewCommand())
	return cmd
}

func newCertsListCommand() *cobra.Command {
	var o certsOptions
	cmd := &cobra.Command{
		Use:   "list",
		Short: "The certificates of a server, until when they are valid and when they will be renewed",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			list, err := o.list(cmd.Context())
			if err != nil {
				return err
			}
			return o.print(cmd.OutOrStdout(), list)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.dataDir, "data-dir", "", "read the files in a server's data folder instead of asking the server")
	return cmd
}

func newCertsRenewCommand() *cobra.Command {
	var o certsOptions
	cmd := &cobra.Command{
		Use:   "renew [ca|server|admin|node-client|front-proxy-client|service-account]...",
		Short: "Renew certificates of a running server at once: those named, or all but ca and service-account",
		Long: "Renews certificates of a running server at once. A renewed CA signs from then on; the one before stays trusted until\n" +
			"it expires. admin.kubeconfig is rewritten, so programs that have a copy of it need the new one before the old expires.\n" +
			"service-account is the key of ServiceAccounts' tokens: the new one signs from then on, and tokens that the one before has\n" +
			"signed stay valid until they expire.",
		ValidArgs: renewable,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			for _, name := range names {
				if !slices.Contains(renewable, name) {
					return usageError{fmt.Errorf("certs renew %q: must be ca, server, admin, node-client, front-proxy-client or service-account", name)}
				}
			}
			if len(names) == 0 {
				names = []string{"server", "admin", "node-client", "front-proxy-client"}
			}
			if o.revoke && !slices.Contains(names, "service-account") {
				return usageError{errors.New("--revoke: is for service-account, which is not among what is renewed")}
			}
			list, err := o.ask(cmd.Context(), "POST", names)
			if err != nil {
				return err
			}
			return o.print(cmd.OutOrStdout(), list)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().BoolVar(&o.revoke, "revoke", false, "with service-account: tokens that earlier keys have signed are refused from now on")
	return cmd
}

func (o *certsOptions) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	outputFlag(cmd.Flags(), &o.output)
}

func (o *certsOptions) validate() error {
	return checkOutput(o.output)
}

func (o *certsOptions) list(ctx context.Context) ([]pki.Info, error) {
	if o.dataDir != "" {
		list, err := pki.List(filepath.Join(o.dataDir, "pki"))
		if err != nil {
			return nil, fmt.Errorf("--data-dir %s: %w", o.dataDir, err)
		}
		return list, nil
	}
	return o.ask(ctx, "GET", nil)
}

// ask sends a request about certificates to the server.
func (o *certsOptions) ask(ctx context.Context, verb string, names []string) ([]pki.Info, error) {
	config, err := apiConfig(o.kubeconfig)
	if err != nil {
		return nil, usageError{err}
	}
	client, err := serverClient(config)
	if err != nil {
		return nil, err
	}
	request := client.Verb(verb).AbsPath(apiserver.CertificatesPath)
	for _, name := range names {
		request = request.Param("name", name)
	}
	if o.revoke {
		request = request.Param("revoke", "true")
	}
	body, err := request.Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("the server at %s has no %s: it is not Portal's", config.Host, apiserver.CertificatesPath)
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s about its certificates: %w", config.Host, err)
	}
	var list []pki.Info
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("the answer of %s is no list of certificates: %w", config.Host, err)
	}
	return list, nil
}

func (o *certsOptions) print(out io.Writer, list []pki.Info) error {
	if o.output == "json" {
		return printJSON(out, list)
	}
	table := newTable(out)
	fmt.Fprintln(table, "NAME\tSUBJECT\tISSUER\tVALID UNTIL\tRENEWED AT")
	for _, info := range list {
		renewed := "-"
		if info.RenewAt != nil {
			renewed = info.RenewAt.Local().Format(time.DateTime)
		}
		until := "-"
		if !info.Until.IsZero() {
			until = info.Until.Local().Format(time.DateTime)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", info.Name, info.Subject, info.Issuer, until, renewed)
	}
	return table.Flush()
}

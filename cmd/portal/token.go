package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/bootstrap"
	"portal/internal/identity"
	"portal/internal/join"
)

// tokenOptions are the flags of `portal token`.
type tokenOptions struct {
	kubeconfig, output        string
	role, description, server string
	ttl                       time.Duration
}

func newTokenCommand() *cobra.Command {
	o := tokenOptions{}
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Create, list and delete the tokens that machines join with",
		Long: "A machine joins the cluster with a token, which it needs once: it obtains a certificate of its own, and renews that.\n" +
			"A token is for one role, and expires.",
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	outputFlag(cmd.PersistentFlags(), &o.output)
	create := &cobra.Command{
		Use:   "create --role ROLE",
		Short: "Create a token and print the command that a machine joins with",
		Long: "Creates a token and prints the command that a machine joins with: the server's URL, the token, and the hash by which the\n" +
			"machine knows the server's certificate authority before it sends the token.",
		Args: noArgs,
		RunE: o.run(o.create),
	}
	f := create.Flags()
	f.StringVar(&o.role, "role", "", "what the token lets a machine join as: "+roleNames())
	f.DurationVar(&o.ttl, "ttl", 24*time.Hour, "how long the token is valid")
	f.StringVar(&o.description, "description", "", "a note for people, which `token list` shows")
	f.StringVar(&o.server, "server", "", "URL in the printed command (default: where the server says it is)")
	cmd.AddCommand(create,
		&cobra.Command{Use: "list", Short: "The tokens, what for and until when; not their secrets", Args: noArgs, RunE: o.run(o.list)},
		&cobra.Command{
			Use: "delete ID...", Short: "Delete tokens: machines that have joined stay",
			Args: func(_ *cobra.Command, args []string) error {
				if len(args) == 0 {
					return usageError{fmt.Errorf("token delete takes the IDs of tokens, as `portal token list` shows them")}
				}
				return nil
			},
			RunE: o.run(o.delete),
		})
	return cmd
}

func roleNames() string {
	var names []string
	for _, r := range identity.Roles {
		names = append(names, string(r))
	}
	return strings.Join(names, ", ")
}

// run checks what the commands have in common and makes a client.
func (o *tokenOptions) run(do func(context.Context, *cobra.Command, *tokenClient, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := checkOutput(o.output); err != nil {
			return err
		}
		client, config, err := apiClient(o.kubeconfig)
		if err != nil {
			return err
		}
		return do(cmd.Context(), cmd, &tokenClient{client, config}, args)
	}
}

type tokenClient struct {
	kubernetes.Interface
	config *rest.Config
}

// createdToken is what `portal token create -o json` prints.
type createdToken struct {
	ID       string    `json:"id"`
	Token    string    `json:"token"`
	Role     string    `json:"role"`
	Expires  time.Time `json:"expires"`
	Server   string    `json:"server"`
	CAHashes []string  `json:"caHashes"`
	Command  string    `json:"command"`
}

func (o *tokenOptions) create(ctx context.Context, cmd *cobra.Command, client *tokenClient, _ []string) error {
	role, err := identity.ParseRole(o.role)
	if err != nil {
		return usageError{fmt.Errorf("--role: %w", err)}
	}
	if o.ttl < time.Second {
		return usageError{fmt.Errorf("--ttl %s: must be a second at least: tokens expire", o.ttl)}
	}
	server, hashes, err := o.cluster(ctx, client)
	if err != nil {
		return err
	}
	token, err := bootstrap.NewToken()
	if err != nil {
		return err
	}
	expires := time.Now().Add(o.ttl).UTC().Truncate(time.Second)
	secret := bootstrap.NewSecret(token, bootstrap.Grant{Expires: expires, Groups: []string{role.BootstrapGroup()}, Description: o.description})
	if _, err := client.CoreV1().Secrets(metav1.NamespaceSystem).Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create the token at %s: %w", client.config.Host, err)
	}
	command := []string{"portal", string(role), "--server", server, "--token", token.String()}
	for _, h := range hashes {
		command = append(command, "--ca-hash", h)
	}
	made := createdToken{
		ID: token.ID, Token: token.String(), Role: string(role), Expires: expires, Server: server, CAHashes: hashes,
		Command: strings.Join(command, " "),
	}
	if o.output == "json" {
		return printJSON(cmd.OutOrStdout(), made)
	}
	// Only the command is printed to the standard output, so that a script can run it.
	note := cmd.ErrOrStderr()
	fmt.Fprintf(note, "To join a machine as %s, run there until %s:\n", role, expires.Local().Format(time.DateTime))
	if loopback(server) {
		fmt.Fprintln(note, "(the server is reached from this machine only: start it with --listen ADDRESS:PORT, or say with --server where others reach it)")
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), made.Command)
	return err
}

// cluster is where machines join, and the hashes of the CAs that they will find there.
func (o *tokenOptions) cluster(ctx context.Context, client *tokenClient) (server string, hashes []string, err error) {
	info, err := client.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(ctx, bootstrap.ClusterInfo, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", nil, fmt.Errorf("the server at %s has no kube-public/%s: it is not Portal's", client.config.Host, bootstrap.ClusterInfo)
	}
	if err != nil {
		return "", nil, fmt.Errorf("ask %s about the cluster: %w", client.config.Host, err)
	}
	server, authorities, err := join.Cluster(info)
	if err != nil {
		return "", nil, fmt.Errorf("kube-public/%s: %w", bootstrap.ClusterInfo, err)
	}
	if loopback(server) && !loopback(client.config.Host) {
		server = client.config.Host
	}
	if o.server != "" {
		if u, err := url.Parse(o.server); err != nil || u.Scheme != "https" || u.Host == "" {
			return "", nil, usageError{fmt.Errorf("--server %q: must be a URL like https://10.0.0.1:6443", o.server)}
		}
		server = o.server
	}
	for _, ca := range authorities {
		hashes = append(hashes, bootstrap.Hash(ca))
	}
	return server, hashes, nil
}

// loopback says whether a URL is one that only this machine reaches.
func loopback(server string) bool {
	u, err := url.Parse(server)
	if err != nil {
		return false
	}
	host := u.Hostname()
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback() || net.ParseIP(host).IsUnspecified()
}

// listedToken is what `portal token list -o json` prints of each.
type listedToken struct {
	ID          string     `json:"id"`
	Role        string     `json:"role,omitempty"`
	Groups      []string   `json:"groups,omitempty"`
	Expires     *time.Time `json:"expires,omitempty"`
	Expired     bool       `json:"expired,omitempty"`
	Description string     `json:"description,omitempty"`
}

func (o *tokenOptions) list(ctx context.Context, cmd *cobra.Command, client *tokenClient, _ []string) error {
	secrets, err := client.CoreV1().Secrets(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{FieldSelector: "type=" + string(bootstrap.SecretType)})
	if err != nil {
		return fmt.Errorf("list the tokens at %s: %w", client.config.Host, err)
	}
	tokens := []listedToken{}
	for i := range secrets.Items {
		token, grant, err := bootstrap.ReadSecret(&secrets.Items[i])
		if err != nil {
			continue // of no use to anybody
		}
		t := listedToken{ID: token.ID, Groups: grant.Groups, Description: grant.Description, Expired: bootstrap.Expired(&secrets.Items[i], time.Now())}
		if !grant.Expires.IsZero() {
			t.Expires = &grant.Expires
		}
		for _, g := range grant.Groups {
			if role, ok := identity.RoleOfGroup(g); ok {
				t.Role = string(role)
			}
		}
		tokens = append(tokens, t)
	}
	if o.output == "json" {
		return printJSON(cmd.OutOrStdout(), tokens)
	}
	return printTokens(cmd.OutOrStdout(), tokens)
}

func printTokens(out io.Writer, tokens []listedToken) error {
	table := newTable(out)
	fmt.Fprintln(table, "ID\tROLE\tEXPIRES\tDESCRIPTION")
	for _, t := range tokens {
		expires := "never"
		if t.Expires != nil {
			expires = t.Expires.Local().Format(time.DateTime)
		}
		if t.Expired {
			expires = "expired"
		}
		role := t.Role
		if role == "" {
			role = strings.Join(t.Groups, ",")
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", t.ID, orDash(role), expires, orDash(t.Description))
	}
	return table.Flush()
}

func (o *tokenOptions) delete(ctx context.Context, cmd *cobra.Command, client *tokenClient, args []string) error {
	for _, arg := range args {
		id, _, _ := strings.Cut(arg, ".") // the whole token will do
		if !bootstrap.ValidID(id) {
			return usageError{fmt.Errorf("token delete: an ID has 6 characters of a-z and 0-9, as `portal token list` shows it")}
		}
		err := client.CoreV1().Secrets(metav1.NamespaceSystem).Delete(ctx, bootstrap.SecretName(id), metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return fmt.Errorf("there is no token %s: it may have expired", id)
		}
		if err != nil {
			return fmt.Errorf("delete the token %s at %s: %w", id, client.config.Host, err)
		}
		if o.output == "" {
			fmt.Fprintf(cmd.OutOrStdout(), "token %s deleted\n", id)
		}
	}
	return nil
}

package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"portal/internal/server"
)

func newServerCommand() *cobra.Command {
	opts := server.DefaultOptions()
	opts.DataDir = cmp.Or(os.Getenv(dataDirVariable), opts.DataDir)
	logs := logOptions{}
	cmd := &cobra.Command{
		Use:   "server",
		Short: "The control plane: API server, controllers, embedded etcd or --etcd-servers",
		Long: "Runs the control plane: the API server, the controllers, and an etcd in the same process unless --etcd-servers\n" +
			"names one. Writes DATA-DIR/admin.kubeconfig before it is ready.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo); err != nil {
				return usageError{err}
			}
			if err := opts.Validate(); err != nil {
				return usageError{err}
			}
			adapt(cmd.Context(), &opts.Options)
			return server.Run(cmd.Context(), opts, func(ctx context.Context, _ server.Info) error {
				trimMemory(ctx, func() bool { return true })
				return nil
			})
		},
	}
	addServerFlags(cmd.Flags(), &opts)
	logs.addFlags(cmd.Flags())
	return cmd
}

func addServerFlags(f *pflag.FlagSet, o *server.Options) {
	f.StringVar(&o.DataDir, "data-dir", o.DataDir, "folder for etcd's files, certificates and admin.kubeconfig")
	f.StringVar(&o.Listen, "listen", o.Listen, "host:port to serve the API at")
	f.StringVar(&o.AdvertiseAddress, "advertise-address", o.AdvertiseAddress,
		"address at which others reach this server (default: that of --listen, unless it is loopback)")
	f.StringSliceVar(&o.ServiceCIDRs, "service-cluster-ip-range", o.ServiceCIDRs,
		"ranges of cluster IPs, one of IPv4 or IPv6 or both; the first is the default family")
	f.StringVar(&o.NodePorts, "service-node-port-range", o.NodePorts, "ports of NodePort Services")
	f.StringSliceVar(&o.Store.Servers, "etcd-servers", o.Store.Servers, "URLs of an etcd cluster (default: an etcd in this process)")
	f.StringVar(&o.Store.CAFile, "etcd-cafile", o.Store.CAFile, "authority of the etcd cluster's certificates")
	f.StringVar(&o.Store.CertFile, "etcd-certfile", o.Store.CertFile, "certificate to show to the etcd cluster")
	f.StringVar(&o.Store.KeyFile, "etcd-keyfile", o.Store.KeyFile, "its key")
	f.Int64Var(&o.Store.QuotaBytes, "etcd-quota-bytes", o.Store.QuotaBytes, "most that the embedded etcd may keep")
	f.DurationVar(&o.Store.CompactionInterval, "etcd-compaction-interval", o.Store.CompactionInterval, "how often old revisions are dropped")
	addEncryptionFlags(f, &o.Encryption)
	addAuditFlags(f, o.Audit)
	f.StringVar(&o.Tracing.ConfigFile, "tracing-config-file", o.Tracing.ConfigFile,
		"file that says where OpenTelemetry traces of requests go, a TracingConfiguration of apiserver.config.k8s.io/v1")
	f.StringVar(&o.TokenFile, "token-auth-file", o.TokenFile, `CSV file of static tokens: token,user,uid,"group1,group2"`)
	f.StringSliceVar(&o.AuthorizationModes, "authorization-mode", o.AuthorizationModes,
		"what decides whether a request is allowed, in this order: Node (what nodes need), RBAC (roles), AlwaysAllow")
	f.StringArrayVar(&o.Tokens.Issuers, "service-account-issuer", o.Tokens.Issuers,
		"issuer of ServiceAccounts' tokens; given several times, the first issues and all are accepted")
	f.StringVar(&o.Tokens.SigningKeyFile, "service-account-signing-key-file", o.Tokens.SigningKeyFile,
		"private key that signs ServiceAccounts' tokens (default: one that the server makes in DATA-DIR/pki)")
	f.StringArrayVar(&o.Tokens.KeyFiles, "service-account-key-file", o.Tokens.KeyFiles,
		"further keys whose tokens are accepted; may be given several times")
	f.StringVar(&o.Tokens.KeysURI, "service-account-jwks-uri", o.Tokens.KeysURI,
		"URL of the public keys in the issuer's discovery document (default: that of this server)")
	f.DurationVar(&o.Tokens.MaxExpiration, "service-account-max-token-expiration", o.Tokens.MaxExpiration,
		"longest life of a token, at least 1h; a request for more gets this much; 0: no limit")
	f.BoolVar(&o.Tokens.Extend, "service-account-extend-token-expiration", o.Tokens.Extend,
		"let the tokens that Pods get by default live for a year, for programs that don't read them anew")
	f.StringSliceVar(&o.Tokens.Audiences, "api-audiences", o.Tokens.Audiences,
		"audiences of tokens that this server accepts (default: those of --service-account-issuer)")
	f.StringSliceVar(&o.EnableAdmission, "enable-admission-plugins", o.EnableAdmission,
		"admission plugins to turn on: ServiceAccount, which is on by default where the controller serviceaccount runs")
	f.StringSliceVar(&o.DisableAdmission, "disable-admission-plugins", o.DisableAdmission, "admission plugins to turn off")
	f.StringSliceVar(&o.ExtraSANs, "tls-san", o.ExtraSANs, "further names and addresses in the server's certificate")
	f.DurationVar(&o.Lifetimes.Certificate, "certificate-lifetime", o.Lifetimes.Certificate,
		"how long certificates are valid; they are renewed after two thirds of it, while the server runs")
	f.DurationVar(&o.Lifetimes.Authority, "ca-lifetime", o.Lifetimes.Authority,
		"how long the certificate authority is valid; the next one is created after two thirds of it, and both are trusted")
	f.BoolVar(&o.AdoptCA, "adopt-ca", o.AdoptCA,
		"start although the cluster in this etcd has another certificate authority, which is lost, and register this server's")
	f.BoolVar(&o.DenyExternalIPs, "deny-service-external-ips", o.DenyExternalIPs,
		"refuse new spec.externalIPs in Services: whoever may set them can draw others' traffic (CVE-2020-8554)")
	f.BoolVar(&o.AllowPrivileged, "allow-privileged", o.AllowPrivileged, "accept Pods with privileged containers: whoever may create Pods is then root on nodes")
	f.DurationVar(&o.EventTTL, "event-ttl", o.EventTTL, "how long Events are kept")
	f.IntVar(&o.MaxInFlight, "max-requests-inflight", o.MaxInFlight, "read requests answered at once")
	f.IntVar(&o.MaxMutatingInFlight, "max-mutating-requests-inflight", o.MaxMutatingInFlight, "writing requests answered at once")
	f.BoolVar(&o.PriorityAndFairness, "enable-priority-and-fairness", o.PriorityAndFairness, "let requests wait for their turn, by priority and user (flowcontrol.apiserver.k8s.io)")
	f.DurationVar(&o.RequestTimeout, "request-timeout", o.RequestTimeout, "time a request other than a watch may take")
	f.Int64Var(&o.MaxBodyBytes, "max-request-bytes", o.MaxBodyBytes, "largest request body")
	f.StringSliceVar(&o.Controllers, "controllers", o.Controllers,
		fmt.Sprintf("which controllers to run, of %v: * is all, none is none, -name leaves one out", server.ControllerNames()))
	f.StringSliceVar(&o.ClusterCIDRs, "cluster-cidr", o.ClusterCIDRs,
		"ranges of the Pods' addresses, cut up for the nodes: at most one IPv4 and one IPv6; none leaves nodes alone")
	f.DurationVar(&o.NodeGracePeriod, "node-monitor-grace-period", o.NodeGracePeriod, "how long a node may go without renewing its Lease before it counts as lost")
	f.IntVar(&o.MaxEndpointsPerSlice, "max-endpoints-per-slice", o.MaxEndpointsPerSlice, "endpoints in one EndpointSlice at most, up to 1000")
	f.BoolVar(&o.Console, "console", o.Console, "serve the console, a page that shows Services and what is wrong with them, at /console/")
	f.DurationVar(&o.AuditInterval, "audit-interval", o.AuditInterval, "how often allocations are checked against their Services")
}

// Package server runs the control plane in one process: the API server and, once it is ready, the controllers.
package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/client-go/rest"

	"portal/internal/apiserver"
	"portal/internal/audit"
	"portal/internal/console"
	"portal/internal/controllers"
	"portal/internal/controllers/account"
	"portal/internal/identity"
)

// Options are those of the API server and of the controllers.
type Options struct {
	apiserver.Options
	// Controllers to run, as controllers.ParseSelection reads them.
	Controllers []string
	// ClusterCIDRs are cut up for the nodes' Pods; none leaves nodes alone.
	ClusterCIDRs         []string
	MaxEndpointsPerSlice int
	// NodeGracePeriod is how long a node may go without renewing its Lease.
	NodeGracePeriod time.Duration
	AuditInterval   time.Duration
	// Console says whether the console's page is served.
	Console bool
}

// DefaultOptions run every controller.
func DefaultOptions() Options {
	return Options{
		Options: apiserver.DefaultOptions(), Controllers: []string{"*"}, MaxEndpointsPerSlice: 100, NodeGracePeriod: 50 * time.Second, AuditInterval: 10 * time.Minute,
		Console: true,
	}
}

// ControllerNames are those of the controllers that a server can run.
func ControllerNames() []string { return append(controllers.Names(), audit.Name) }

// Validate says what is wrong with the options, naming the flags.
func (o Options) Validate() error {
	_, err := controllers.ParseSelection(o.Controllers, audit.Name)
	if err != nil {
		err = fmt.Errorf("--%w", err)
	}
	_, rangeErr := o.clusterCIDRs()
	if o.MaxEndpointsPerSlice < 1 || o.MaxEndpointsPerSlice > 1000 {
		err = errors.Join(err, fmt.Errorf("--max-endpoints-per-slice %d: must be from 1 to 1000", o.MaxEndpointsPerSlice))
	}
	if o.NodeGracePeriod <= 0 {
		err = errors.Join(err, fmt.Errorf("--node-monitor-grace-period %s: must be positive", o.NodeGracePeriod))
	}
	return errors.Join(o.Options.Validate(), err, rangeErr)
}

func (o Options) clusterCIDRs() ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, text := range o.ClusterCIDRs {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("--cluster-cidr %q: must be a range like 10.244.0.0/16", text)
		}
		out = append(out, prefix)
	}
	return out, nil
}

// Info says where a running server is; Console is the console's URL, or none. As is how other parts of the process reach its API, as a user with the rights of their
// roles.
type Info struct {
	Address, Console, Kubeconfig, DataDir string
	As                                    func(user string, groups ...string) *rest.Config
	RootCA                                func() []byte
}

// Run serves until ctx ends. ready is called when clients can come.
func Run(ctx context.Context, opts Options, ready func(context.Context, Info) error) error {
	selection, err := controllers.ParseSelection(opts.Controllers, audit.Name)
	if err != nil {
		return err
	}
	opts.DefaultAccounts = selection.Has(account.DefaultName)
	api, err := apiserver.New(ctx, opts.Options)
	if err != nil {
		return err
	}
	auditor := api.NewAuditor(opts.AuditInterval)
	api.Handle("/portal/v1/audit", auditor.Handler())
	var page *console.Console
	info := Info{Address: api.Address(), Console: "none", Kubeconfig: api.Kubeconfig(), DataDir: api.DataDir(), As: api.ConfigAs, RootCA: api.RootCA}
	if opts.Console {
		if page, err = console.New(console.Options{API: api.AnonymousConfig(), NodePorts: api.NodePorts(), Known: api.KnownClient, Findings: console.Explained}); err != nil {
			api.Close()
			return err
		}
		api.HandleOpen(console.Path, page)
		info.Console = "https://" + api.Address() + console.Path
	}
	return api.Run(ctx, apiserver.Hooks{
		Ready: func(ctx context.Context) error { return ready(ctx, info) },
		Work: func(ctx context.Context) error {
			var group sync.WaitGroup
			defer group.Wait()
			if page != nil {
				group.Go(func() { page.Run(ctx) })
			}
			if selection.Empty() {
				return nil
			}
			return opts.control(ctx, api, selection, auditor)
		},
	})
}

// asServiceAccount acts as a service account in kube-system, whether there is an object of that name or not.
func asServiceAccount(api *apiserver.Server, name string) *rest.Config {
	user := serviceaccount.MakeUsername(metav1.NamespaceSystem, name)
	return api.ConfigAs(user, serviceaccount.MakeGroupNames(metav1.NamespaceSystem)...)
}

// embeddedSuffix ends the leader identity of a server whose etcd is in its own process.
const embeddedSuffix = "_embedded"

// control runs the controllers whenever this server leads.
func (o Options) control(ctx context.Context, api *apiserver.Server, selection controllers.Selection, auditor *audit.Auditor) error {
	ranges, err := o.clusterCIDRs()
	if err != nil {
		return err
	}
	cfg := controllers.Config{
		REST:                 api.ConfigAs(identity.Controllers),
		As:                   func(account string) *rest.Config { return asServiceAccount(api, account) },
		ClusterCIDRs:         ranges,
		ServiceCIDRs:         api.ServiceRanges(),
		RootCA:               api.RootCA,
		MaxEndpointsPerSlice: o.MaxEndpointsPerSlice,
		NodeGracePeriod:      o.NodeGracePeriod,
		Authority:            api.Authority(),
		ServerHosts:          api.Hosts,
		CertificateLife:      o.Lifetimes.Certificate,
		Own:                  map[string]func(context.Context) error{audit.Name: auditor.Run},
	}
	election := controllers.DefaultElection()
	if election.Identity, err = controllers.NewIdentity(); err != nil {
		return err
	}
	if len(o.Store.Servers) == 0 {
		// Only one process at a time has the embedded etcd open, so a Lease in it that another such process holds is
		// that of one that has ended.
		election.Identity += embeddedSuffix
		election.Ended = func(identity string) bool { return strings.HasSuffix(identity, embeddedSuffix) }
	}
	if err := controllers.Lead(ctx, cfg, selection, election); err != nil {
		return fmt.Errorf("controllers: %w", err)
	}
	return nil
}

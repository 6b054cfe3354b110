package controllers

import (
	"context"

	"k8s.io/client-go/informers"
	"k8s.io/klog/v2"

	"portal/internal/controllers/account"
	"portal/internal/controllers/aggregation"
	"portal/internal/controllers/bootstraptoken"
	"portal/internal/controllers/csr"
	"portal/internal/controllers/endpoints"
	"portal/internal/controllers/endpointslice"
	"portal/internal/controllers/garbage"
	"portal/internal/controllers/mirror"
	"portal/internal/controllers/namespace"
	"portal/internal/controllers/node"
	"portal/internal/controllers/servicecidr"
)

// runner is a controller that has been constructed and not yet started.
type runner interface {
	// Run works until ctx ends, and returns when all it started has ended.
	Run(ctx context.Context) error
}

// runFunc is a controller that is a function.
type runFunc func(ctx context.Context) error

func (f runFunc) Run(ctx context.Context) error { return f(ctx) }

// registry lists the controllers that there are. A new one is a line here: its constructor asks the shared part for
// the informers it needs, which are running and synced before its Run is called.
var registry = []struct {
	name string
	make func(*shared) (runner, error)
}{
	{"endpoints", newEndpoints},
	{"endpointslice", newEndpointSlice},
	{"mirror", newMirror},
	{"namespace", newNamespace},
	{"node", newNode},
	{"garbage", newGarbage},
	{servicecidr.Name, newServiceCIDR},
	{aggregation.Name, newAggregation},
	{csr.ApproverName, newApprover},
	{csr.SignerName, newSigner},
	{csr.CleanerName, newCleaner},
	{bootstraptoken.SignerName, newBootstrapSigner},
	{bootstraptoken.CleanerName, newTokenCleaner},
	{account.DefaultName, newDefaultAccount},
	{account.RootCAName, newRootCA},
	{account.TokenName, newAccountToken},
}

// accounts are the service accounts in kube-system that controllers write as: those of Kubernetes' controllers with the same
// task, so that the default roles of these are the controllers' rights.
var accounts = map[string]string{
	"endpoints":                "endpoint-controller",
	"endpointslice":            "endpointslice-controller",
	"mirror":                   "endpointslicemirroring-controller",
	"namespace":                "namespace-controller",
	"node":                     "node-controller",
	"garbage":                  "generic-garbage-collector",
	servicecidr.Name:           "service-cidrs-controller",
	aggregation.Name:           "clusterrole-aggregation-controller",
	csr.ApproverName:           "certificate-controller",
	csr.SignerName:             "certificate-controller",
	csr.CleanerName:            "certificate-controller",
	bootstraptoken.SignerName:  "bootstrap-signer",
	bootstraptoken.CleanerName: "token-cleaner",
	account.DefaultName:        "service-account-controller",
	account.RootCAName:         "root-ca-cert-publisher",
	account.TokenName:          "tokens-controller",
}

// Names are those of the controllers that there are.
func Names() []string {
	names := make([]string, len(registry))
	for i, c := range registry {
		names[i] = c.name
	}
	return names
}

func newEndpoints(s *shared) (runner, error) {
	return endpoints.New(endpoints.Deps{
		Client: s.as("endpoints").client, Recorder: s.recorder, Members: s.memberWatch(), Services: s.serviceLister(),
		Endpoints: s.endpoints(), Workers: s.cfg.EndpointsWorkers,
	})
}

func newEndpointSlice(s *shared) (runner, error) {
	return endpointslice.New(endpointslice.Deps{
		Client: s.as("endpointslice").client, Recorder: s.recorder, Members: s.memberWatch(), Services: s.serviceLister(),
		Slices: s.slices(), Pods: s.pods(), Nodes: s.nodes(),
		MaxEndpointsPerSlice: s.cfg.MaxEndpointsPerSlice, Workers: s.cfg.SliceWorkers,
	})
}

func newMirror(s *shared) (runner, error) {
	return mirror.New(mirror.Deps{
		Client: s.as("mirror").client, Recorder: s.recorder, Services: s.services(), Endpoints: s.endpoints(), Slices: s.slices(),
		MaxEndpointsPerSubset: s.cfg.MaxEndpointsPerSubset, Workers: 2,
	})
}

func newNamespace(s *shared) (runner, error) {
	own := s.as("namespace")
	return namespace.New(namespace.Deps{
		Client: own.client, Metadata: own.metadata, Discovery: s.discovery, Namespaces: s.namespaces(), Workers: 4,
	})
}

func newNode(s *shared) (runner, error) {
	ranges, err := s.cfg.ranges()
	if err != nil {
		return nil, err
	}
	return node.New(node.Deps{
		Client: s.as("node").client, Recorder: s.recorder, Nodes: s.nodes(), Leases: s.leases(), Pods: s.pods(), Clock: s.cfg.Clock,
		GracePeriod: s.cfg.NodeGracePeriod, MonitorPeriod: s.cfg.NodeMonitorPeriod,
		Ranges: ranges, Reserved: s.cfg.ServiceCIDRs,
	})
}

func newGarbage(s *shared) (runner, error) {
	own := s.as("garbage")
	return garbage.New(garbage.Deps{
		Client: own.client, Metadata: own.metadata, Discovery: s.discovery,
		Namespaces: s.namespaces(), Pods: s.pods(), Nodes: s.nodes(), Clock: s.cfg.Clock,
		FinishedPods: s.cfg.FinishedPods, Workers: 8,
	})
}

func newServiceCIDR(s *shared) (runner, error) {
	client := s.as(servicecidr.Name).client
	return runFunc(func(ctx context.Context) error {
		if !servicecidr.WaitServed(ctx, s.discovery, s.cfg.Clock) {
			return nil
		}
		factory := informers.NewSharedInformerFactory(client, 0)
		controller := servicecidr.New(client, factory)
		factory.Start(ctx.Done())
		defer factory.Shutdown()
		return controller.Run(ctx)
	}), nil
}

func newAggregation(s *shared) (runner, error) {
	client := s.as(aggregation.Name).client
	return runFunc(func(ctx context.Context) error {
		factory := informers.NewSharedInformerFactory(client, 0)
		controller, err := aggregation.New(client, factory)
		if err != nil {
			return err
		}
		factory.Start(ctx.Done())
		defer factory.Shutdown()
		controller.Run(ctx)
		return nil
	}), nil
}

func (s *shared) csrDeps(name string) csr.Deps {
	return csr.Deps{Client: s.as(name).client, Requests: s.signingRequests(), Clock: s.cfg.Clock}
}

func newApprover(s *shared) (runner, error) { return csr.NewApprover(s.csrDeps(csr.ApproverName)) }

// newSigner signs only in a process that was given a CA.
func newSigner(s *shared) (runner, error) {
	if s.cfg.Authority == nil {
		return runFunc(func(ctx context.Context) error {
			klog.FromContext(ctx).Info("approved certificate requests are not signed here: no certificate authority was given")
			return nil
		}), nil
	}
	return csr.NewSigner(s.csrDeps(csr.SignerName), s.cfg.Authority, s.cfg.CertificateLife)
}

func newCleaner(s *shared) (runner, error) { return csr.NewCleaner(s.csrDeps(csr.CleanerName)) }

func newBootstrapSigner(s *shared) (runner, error) {
	return bootstraptoken.NewSigner(s.as(bootstraptoken.SignerName).client, s.cfg.Clock)
}

func newTokenCleaner(s *shared) (runner, error) {
	return bootstraptoken.NewCleaner(s.as(bootstraptoken.CleanerName).client, s.cfg.Clock)
}

func newDefaultAccount(s *shared) (runner, error) {
	return account.NewDefault(account.Deps{Client: s.as(account.DefaultName).client, Namespaces: s.namespaces(), Accounts: s.accounts()})
}

func newRootCA(s *shared) (runner, error) {
	return account.NewRootCA(account.Deps{
		Client: s.as(account.RootCAName).client, Namespaces: s.namespaces(), ConfigMaps: s.rootCAConfigMaps(), RootCA: s.cfg.rootCA(),
	})
}

func newAccountToken(s *shared) (runner, error) {
	return account.NewToken(account.Deps{Client: s.as(account.TokenName).client, Accounts: s.accounts(), Secrets: s.tokenSecrets(), RootCA: s.cfg.rootCA()})
}

func (c Config) ranges() ([]node.Range, error) {
	return node.Ranges(c.ClusterCIDRs, c.NodeCIDRMaskSizeIPv4, c.NodeCIDRMaskSizeIPv6)
}

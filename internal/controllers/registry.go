package controllers

import (
	"context"

	certificatesv1 "k8s.io/api/certificates/v1"
	networkingv1 "k8s.io/api/networking/v1"
	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"portal/internal/controllers/account"
	"portal/internal/controllers/aggregation"
	"portal/internal/controllers/bootstraptoken"
	"portal/internal/controllers/clusterdns"
	"portal/internal/controllers/cronjob"
	"portal/internal/controllers/csr"
	"portal/internal/controllers/daemonset"
	"portal/internal/controllers/deployment"
	"portal/internal/controllers/disruption"
	"portal/internal/controllers/endpoints"
	"portal/internal/controllers/endpointslice"
	"portal/internal/controllers/findings"
	"portal/internal/controllers/garbage"
	"portal/internal/controllers/job"
	"portal/internal/controllers/jobttl"
	"portal/internal/controllers/mirror"
	"portal/internal/controllers/namespace"
	"portal/internal/controllers/node"
	"portal/internal/controllers/policystatus"
	"portal/internal/controllers/replicaset"
	"portal/internal/controllers/resourcequota"
	"portal/internal/controllers/scheduling"
	"portal/internal/controllers/served"
	"portal/internal/controllers/servicecidr"
	"portal/internal/controllers/statefulset"
	"portal/internal/controllers/storagemigration"
	"portal/internal/controllers/tainteviction"
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
	{tainteviction.Name, newTaintEviction},
	{"garbage", newGarbage},
	{servicecidr.Name, newServiceCIDR},
	{resourcequota.Name, newResourceQuota},
	{storagemigration.Name, newStorageMigration},
	{aggregation.Name, newAggregation},
	{csr.ApproverName, newApprover},
	{csr.SignerName, newSigner},
	{csr.CleanerName, newCleaner},
	{csr.PodCleanerName, newPodCleaner},
	{bootstraptoken.SignerName, newBootstrapSigner},
	{bootstraptoken.CleanerName, newTokenCleaner},
	{account.DefaultName, newDefaultAccount},
	{account.RootCAName, newRootCA},
	{account.TokenName, newAccountToken},
	{policystatus.Name, newPolicyStatus},
	{deployment.Name, newDeployment},
	{replicaset.Name, newReplicaSet},
	{replicaset.ControllerName, newReplicationController},
	{statefulset.Name, newStatefulSet},
	{daemonset.Name, newDaemonSet},
	{disruption.Name, newDisruption},
	{job.Name, newJob},
	{cronjob.Name, newCronJob},
	{jobttl.Name, newJobTTL},
	{scheduling.Name, newScheduler},
	{clusterdns.Name, newClusterDNS},
	{findings.Name, newFindings},
}

// accounts are the service accounts in kube-system that controllers write as: those of Kubernetes' controllers with the same
// task, so that the default roles of these are the controllers' rights.
var accounts = map[string]string{
	"endpoints":                "endpoint-controller",
	"endpointslice":            "endpointslice-controller",
	"mirror":                   "endpointslicemirroring-controller",
	"namespace":                "namespace-controller",
	"node":                     "node-controller",
	tainteviction.Name:         "node-controller",
	"garbage":                  "generic-garbage-collector",
	servicecidr.Name:           "service-cidrs-controller",
	resourcequota.Name:         "resourcequota-controller",
	storagemigration.Name:      "storage-version-migrator-controller",
	aggregation.Name:           "clusterrole-aggregation-controller",
	csr.ApproverName:           "certificate-controller",
	csr.SignerName:             "certificate-controller",
	csr.CleanerName:            "certificate-controller",
	csr.PodCleanerName:         "podcertificaterequestcleaner",
	bootstraptoken.SignerName:  "bootstrap-signer",
	bootstraptoken.CleanerName: "token-cleaner",
	account.DefaultName:        "service-account-controller",
	account.RootCAName:         "root-ca-cert-publisher",
	account.TokenName:          "tokens-controller",
	policystatus.Name:          "validatingadmissionpolicy-status-controller",
	deployment.Name:            "deployment-controller",
	replicaset.Name:            "replicaset-controller",
	replicaset.ControllerName:  "replication-controller",
	statefulset.Name:           "statefulset-controller",
	daemonset.Name:             "daemon-set-controller",
	disruption.Name:            "disruption-controller",
	job.Name:                   "job-controller",
	cronjob.Name:               "cronjob-controller",
	jobttl.Name:                "ttl-after-finished-controller",
	scheduling.Name:            "kube-scheduler",
	clusterdns.Name:            "cluster-dns-controller",
	findings.Name:              "findings-controller",
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

func newTaintEviction(s *shared) (runner, error) {
	return tainteviction.New(tainteviction.Deps{
		Client: s.as(tainteviction.Name).client, Recorder: s.recorder, Nodes: s.nodes(), Pods: s.pods(), Clock: s.cfg.Clock, Workers: 8,
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

// alone runs a controller with informers that no other has, once the API serves what it needs.
func (s *shared) alone(client kubernetes.Interface, need *served.Need, build func(informers.SharedInformerFactory) (runner, error)) runner {
	return runFunc(func(ctx context.Context) error {
		if need != nil && !served.Wait(ctx, s.discovery, s.cfg.Clock, *need) {
			return nil
		}
		factory := informers.NewSharedInformerFactory(client, 0)
		controller, err := build(factory)
		if err != nil {
			return err
		}
		factory.Start(ctx.Done())
		defer factory.Shutdown()
		return controller.Run(ctx)
	})
}

func newServiceCIDR(s *shared) (runner, error) {
	client := s.as(servicecidr.Name).client
	// Kubernetes serves them from 1.33 on.
	need := served.Need{Controller: servicecidr.Name, Version: networkingv1.SchemeGroupVersion, Resources: []string{"ipaddresses", "servicecidrs"}}
	return s.alone(client, &need, func(factory informers.SharedInformerFactory) (runner, error) {
		return servicecidr.New(client, factory), nil
	}), nil
}

func newResourceQuota(s *shared) (runner, error) {
	own := s.as(resourcequota.Name)
	return s.alone(own.client, nil, func(factory informers.SharedInformerFactory) (runner, error) {
		return resourcequota.New(own.client, own.metadata, s.discovery, factory, s.cfg.Clock)
	}), nil
}

func newStorageMigration(s *shared) (runner, error) {
	own := s.as(storagemigration.Name)
	// Kubernetes serves them from 1.37 on.
	need := served.Need{Controller: storagemigration.Name, Version: storagemigrationv1.SchemeGroupVersion, Resources: []string{"storageversionmigrations"}}
	// The account writes; it may not watch.
	return s.alone(s.client, &need, func(factory informers.SharedInformerFactory) (runner, error) {
		return storagemigration.New(own.client, own.metadata, s.discovery, factory, s.cfg.Clock)
	}), nil
}

func newAggregation(s *shared) (runner, error) {
	client := s.as(aggregation.Name).client
	return s.alone(client, nil, func(factory informers.SharedInformerFactory) (runner, error) { return aggregation.New(client, factory) }), nil
}

func (s *shared) csrDeps(name string) csr.Deps {
	return csr.Deps{Client: s.as(name).client, Requests: s.signingRequests(), Clock: s.cfg.Clock}
}

func newApprover(s *shared) (runner, error) {
	deps := s.csrDeps(csr.ApproverName)
	deps.Nodes, deps.Endpoints, deps.ServerHosts = s.nodes(), s.endpoints(), s.cfg.ServerHosts
	return csr.NewApprover(deps)
}

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

func newPodCleaner(s *shared) (runner, error) {
	client := s.as(csr.PodCleanerName).client
	// Kubernetes serves them from 1.37 on.
	need := served.Need{Controller: csr.PodCleanerName, Version: certificatesv1.SchemeGroupVersion, Resources: []string{"podcertificaterequests"}}
	return s.alone(client, &need, func(factory informers.SharedInformerFactory) (runner, error) {
		return csr.NewPodCleaner(client, factory, s.cfg.Clock)
	}), nil
}

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
	own := s.as(account.TokenName).client
	return account.NewToken(account.Deps{Client: own, Accounts: s.accounts(), Secrets: s.tokenSecrets(own), RootCA: s.cfg.rootCA()})
}

func newPolicyStatus(s *shared) (runner, error) {
	client := s.as(policystatus.Name).client
	return s.alone(client, nil, func(factory informers.SharedInformerFactory) (runner, error) {
		return policystatus.New(client, factory)
	}), nil
}

func newDeployment(s *shared) (runner, error) {
	return deployment.New(deployment.Deps{
		Client: s.as(deployment.Name).client, Recorder: s.recorder, Deployments: s.deployments(), Sets: s.replicaSets(), Pods: s.pods(),
		Clock: s.cfg.Clock, Workers: 5,
	})
}

func newReplicaSet(s *shared) (runner, error) {
	return replicaset.New(replicaset.Deps{
		Client: s.as(replicaset.Name).client, Recorder: s.recorder, Sets: s.replicaSets(), Pods: s.pods(), Clock: s.cfg.Clock, Workers: 5,
	})
}

func newReplicationController(s *shared) (runner, error) {
	return replicaset.NewReplicationController(replicaset.Deps{
		Client: s.as(replicaset.ControllerName).client, Recorder: s.recorder, Sets: s.replicationControllers(), Pods: s.pods(), Clock: s.cfg.Clock,
		Workers: 5,
	})
}

func newStatefulSet(s *shared) (runner, error) {
	return statefulset.New(statefulset.Deps{
		Client: s.as(statefulset.Name).client, Recorder: s.recorder, Sets: s.statefulSets(), Pods: s.pods(), Revisions: s.revisions(),
		Clock: s.cfg.Clock, Workers: 5,
	})
}

func newDaemonSet(s *shared) (runner, error) {
	return daemonset.New(daemonset.Deps{
		Client: s.as(daemonset.Name).client, Recorder: s.recorder, Sets: s.daemonSets(), Pods: s.pods(), Nodes: s.nodes(), Revisions: s.revisions(),
		Clock: s.cfg.Clock, Workers: 2,
	})
}

func newDisruption(s *shared) (runner, error) {
	client := s.as(disruption.Name).client
	return disruption.New(disruption.Deps{
		Client: client, Recorder: s.recorder, Budgets: s.budgets(), Pods: s.pods(), Clock: s.cfg.Clock, Workers: 2,
		Owners: disruption.Owners{
			Client: client, Discovery: s.discovery, Deployments: s.deployments(), ReplicaSets: s.replicaSets(), StatefulSets: s.statefulSets(),
			ReplicationControllers: s.replicationControllers(),
		},
	})
}

func newJob(s *shared) (runner, error) {
	return job.New(job.Deps{
		Client: s.as(job.Name).client, Recorder: s.recorder, Jobs: s.jobs(), Pods: s.pods(), Clock: s.cfg.Clock, Workers: 5,
	})
}

func newCronJob(s *shared) (runner, error) {
	return cronjob.New(cronjob.Deps{
		Client: s.as(cronjob.Name).client, Recorder: s.recorder, CronJobs: s.cronJobs(), Jobs: s.jobs(), Clock: s.cfg.Clock, Workers: 5,
	})
}

func newJobTTL(s *shared) (runner, error) {
	return jobttl.New(jobttl.Deps{Client: s.as(jobttl.Name).client, Jobs: s.jobs(), Clock: s.cfg.Clock, Workers: 5})
}

func newScheduler(s *shared) (runner, error) {
	return scheduling.New(scheduling.Deps{
		Client: s.as(scheduling.Name).client, Recorder: s.recorder, Pods: s.pods(), Nodes: s.nodes(), Namespaces: s.namespaces(), Clock: s.cfg.Clock,
		Workers: 16,
	})
}

func newClusterDNS(s *shared) (runner, error) {
	return clusterdns.New(clusterdns.Deps{
		Client: s.as(clusterdns.Name).client, Nodes: s.nodes(), Services: s.services(), Slices: s.slices(), Ranges: s.cfg.ServiceCIDRs, Clock: s.cfg.Clock,
	})
}

func newFindings(s *shared) (runner, error) {
	return findings.New(findings.Deps{
		Client: s.as(findings.Name).client, Clock: s.cfg.Clock, Watched: []cache.SharedIndexInformer{s.services(), s.slices(), s.pods(), s.nodes()},
	})
}

func (c Config) ranges() ([]node.Range, error) {
	return node.Ranges(c.ClusterCIDRs, c.NodeCIDRMaskSizeIPv4, c.NodeCIDRMaskSizeIPv6)
}

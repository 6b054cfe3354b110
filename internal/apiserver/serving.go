package apiserver

import (
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	extensions "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	basecompatibility "k8s.io/component-base/compatibility"
	registration "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset/typed/apiregistration/v1"
	"k8s.io/streaming/pkg/httpstream"

	"portal/internal/apiserver/aggregation"
	"portal/internal/apiserver/authz"
	"portal/internal/apiserver/authz/nodes"
	"portal/internal/apiserver/registry/connect"
	"portal/internal/ensure"
	"portal/internal/identity"
	"portal/internal/rbac/policy"
)

func (s *Server) config(scheme *runtime.Scheme, codecs serializer.CodecFactory) (*genericserver.Config, error) {
	config := genericserver.NewConfig(codecs)
	config.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	config.FeatureGate = compatibility.DefaultComponentGlobalsRegistry.FeatureGateFor(basecompatibility.DefaultKubeComponent)
	config.MaxRequestsInFlight, config.MaxMutatingRequestsInFlight = 0, 0 // withInFlightLimit instead
	config.RequestTimeout = s.opts.RequestTimeout
	config.MaxRequestBodyBytes = s.opts.MaxBodyBytes
	config.ShutdownWatchTerminationGracePeriod = 500 * time.Millisecond
	config.ShutdownSendRetryAfter = true
	config.EnableProfiling = true
	longRunning := config.LongRunningFunc
	config.LongRunningFunc = func(r *http.Request, info *request.RequestInfo) bool {
		return longRunning(r, info) || connect.Subresource(info) || httpstream.IsUpgradeRequest(r) && s.aggregator.Remote(info) || strings.HasPrefix(r.URL.Path, StoragePath) // a large database takes its time
	}
	namer := openapi.NewDefinitionNamer(scheme, extensions.Scheme)
	config.OpenAPIConfig = genericserver.DefaultOpenAPIConfig(openAPIDefinitions, namer)
	config.OpenAPIConfig.Info.Title = "Portal"
	config.OpenAPIV3Config = genericserver.DefaultOpenAPIV3Config(openAPIDefinitions, namer)
	config.OpenAPIV3Config.Info.Title = "Portal"
	config.SkipOpenAPIInstallation = true // serveDocuments instead

	if err := s.secure(config); err != nil {
		return nil, err
	}
	s.trace(config)
	s.loopback = config.LoopbackClientConfig
	s.loopback.ContentType = "application/vnd.kubernetes.protobuf"
	s.loopback.QPS = -1
	s.loopback.WarningHandler = restclient.NoWarnings{} // warnings are for people
	ownClient, err := restclient.HTTPClientFor(s.loopback)
	if err != nil {
		return nil, err
	}
	s.transport = ownClient.Transport
	client, err := kubernetes.NewForConfigAndClient(s.loopback, ownClient)
	if err != nil {
		return nil, err
	}
	s.client = client
	registrations, err := registration.NewForConfigAndClient(s.loopback, ownClient)
	if err != nil {
		return nil, err
	}
	s.aggregator = aggregation.New(aggregation.Options{
		Client: registrations.APIServices(), Certificate: s.certs.forExtensions, Serializer: codecs,
		Resolve: s.resolver.ResolveEndpoint, Service: s.resolver.service, Slices: s.resolver.GetEndpointSlices,
	})
	s.joining.follow(client)
	if s.endpointsClient, err = s.clientAs(identity.Membership); err != nil {
		return nil, err
	}
	if s.events, err = s.clientAs(identity.Audit); err != nil {
		return nil, err
	}
	s.loop = ensure.New(s.reportSystem, slices.Concat(s.system(), authz.Defaults(client, s.defaults), s.flowControlDefaults())...)
	s.factory = informers.NewSharedInformerFactory(client, 0)
	s.shareFairly(config)
	s.guards = newGuards()
	s.guards.pools.ranges = func() []netip.Prefix { return s.allocator.Ranges() }
	guards, err := s.guards.chain(s.factory, config.Authorization.Authorizer, s.opts, s.objects)
	if err != nil {
		return nil, err
	}
	if config.AdmissionControl, err = s.extendAdmission(config, guards); err != nil {
		return nil, err
	}
	s.traceAdmission(config)
	etcd := healthz.NamedCheck("etcd", func(r *http.Request) error { return s.store.Check(r.Context()) })
	config.AddHealthChecks(etcd)
	// Only readiness: a restart does not make room.
	config.AddReadyzChecks(healthz.NamedCheck(storageCheck, func(*http.Request) error { return s.store.Writable() }))
	s.encryption.addChecks(config)
	if err := s.opts.Audit.applyTo(config); err != nil {
		return nil, err
	}
	config.BuildHandlerChainFunc = func(api http.Handler, c *genericserver.Config) http.Handler {
		api = passingOn(api, withMemberLimit(sayWhy(ownMistakes(withWholeEvents(api), codecs), s.store), codecs, s.opts.MaxBodyBytes), codecs)
		api = s.aggregator.Handler(api)
		if s.turns != nil {
			api = s.turns.withAnswerSizes(api)
		}
		api = withInFlightLimit(api, c, s.opts.MaxInFlight, s.opts.MaxMutatingInFlight)
		return s.listener.sawRequest(s.openFirst(genericserver.DefaultBuildHandlerChain(s.listener.sawClient(api), c)))
	}
	return config, nil
}

// secure sets up the certificates, who is let in and what they may do.
func (s *Server) secure(config *genericserver.Config) error {
	serving := serveroptions.NewSecureServingOptions()
	serving.Listener = s.listener
	serving.BindPort = int(s.opts.port)
	serving.BindAddress = s.listener.Addr().(*net.TCPAddr).IP
	serving.ServerCert.GeneratedCert = servingCertificate{s.certs}
	if err := serving.WithLoopback().ApplyTo(&config.SecureServing, &config.LoopbackClientConfig); err != nil {
		return err
	}
	config.SecureServing.ClientCA = clientAuthority{s.certs}
	config.ExternalAddress = s.externalAddress()
	if s.opts.advertise.IsValid() {
		config.PublicAddress = s.opts.advertise.AsSlice()
	} else {
		config.PublicAddress = net.IPv4(127, 0, 0, 1)
	}
	s.joining = &bootstrapTokens{}
	who, err := newAuthenticator(clientAuthority{s.certs}.VerifyOptions, s.opts.TokenFile, &s.inside, s.joining, s.accountTokens())
	if err != nil {
		return err
	}
	config.Authentication.Authenticator = who
	config.Authentication.APIAudiences = s.opts.Tokens.Audiences
	if s.defaults, err = policy.Default(); err != nil {
		return err
	}
	s.access, err = authz.NewAccess(s.opts.AuthorizationModes, authz.Authorizer{Index: s.roles},
		nodes.Authorizer{Graph: s.nodes, Rules: s.defaults.Rules("system:node")}, s.known)
	if err != nil {
		return err
	}
	config.Authorization.Authorizer = s.access
	config.RuleResolver = s.access
	genericserver.AuthorizeClientBearerToken(config.LoopbackClientConfig, &config.Authentication, &config.Authorization)
	return nil
}

// Hosts are the names and addresses that clients know the server by.
func (s *Server) Hosts() []string { return s.hosts() }

// hosts are the names and addresses that clients know the server by.
func (s *Server) hosts() []string {
	hosts := []string{
		"localhost", "127.0.0.1", "::1",
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}
	if name, err := os.Hostname(); err == nil {
		hosts = append(hosts, name)
	}
	if ip := net.ParseIP(s.opts.host); ip != nil && !ip.IsUnspecified() {
		hosts = append(hosts, s.opts.host)
	}
	if s.opts.advertise.IsValid() {
		hosts = append(hosts, s.opts.advertise.String())
	}
	// Those of the flags too: before the cluster's own have been read they are all that is known, and the certificate should not change then.
	for _, p := range slices.Concat(s.opts.ranges, s.clusterRanges()) {
		if host := p.Addr().Next().String(); !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	return append(hosts, s.opts.ExtraSANs...)
}

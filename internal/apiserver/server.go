package apiserver

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/registry/rest"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/component-base/tracing"

	"portal/internal/alloc"
	"portal/internal/apiserver/aggregation"
	"portal/internal/apiserver/authz"
	"portal/internal/apiserver/authz/nodes"
	"portal/internal/apiserver/documents"
	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/connect"
	"portal/internal/apiserver/registry/disruption"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/service"
	"portal/internal/apiserver/tokens"
	"portal/internal/audit"
	"portal/internal/ensure"
	"portal/internal/pki"
	"portal/internal/rbac"
	"portal/internal/rbac/policy"
	"portal/internal/store"
)

// Server is the API, ready to run.
type Server struct {
	opts      *completed
	store     *store.Store
	generic   *genericserver.GenericAPIServer
	loopback  *restclient.Config
	client    kubernetes.Interface
	transport http.RoundTripper // of client
	factory   informers.SharedInformerFactory
	allocator *alloc.Allocator
	tracker   *tracker
	listener  *limitedListener
	tracer    tracing.TracerProvider // nil: requests are not traced
	certs     *certificates
	// access decides what users may do: by roles and bindings, and for nodes by the Pods that are on them.
	access   *authz.Access
	known    chan struct{} // closed when roles and nodes have been read
	roles    *rbac.Index
	nodes    *nodes.Graph
	defaults *policy.Policy
	// inside are the tokens of other parts of this process; endpointsClient and events are clients of two of them.
	inside                  insideTokens
	endpointsClient, events kubernetes.Interface
	joining                 *bootstrapTokens
	tokenKeys               *tokenKeys
	issuer                  *tokens.Issuer
	// objects reads what tokens are bound to.
	objects objects
	// core and networking code objects as they are stored.
	core, networking runtime.Codec
	// kv reads and writes them in etcd.
	kv     clientv3.KV
	guards *guards
	// evictions deletes Pods as far as their budgets allow.
	evictions *disruption.Evictions
	// resolver finds webhooks, custom serves custom resources.
	resolver *serviceResolver
	custom   *customResources
	// aggregator has other servers' group versions be part of this API.
	aggregator *aggregation.Aggregator
	turns      *turns
	load       *loadMeter
	// reach passes requests on to nodes, Pods and Services.
	reach *connect.Reach
	// kinds maps kinds to resources, schemas has their fields: for policies.
	kinds   *restmapper.DeferredDiscoveryRESTMapper
	schemas schemas

	encryption *encryption
	// documented is what the OpenAPI documents are built from.
	documented documents.Sources
	// open are handlers that find out themselves who comes, by the beginning of their paths.
	open map[string]http.Handler

	// ranges are the cluster's own, once they have been read.
	ranges      atomic.Pointer[[]netip.Prefix]
	loop        *ensure.Loop
	otherRanges sync.Once
	systemMu    sync.Mutex
	systemErrs  map[string]string
	// hasAnnounced says that this server has said where it is.
	hasAnnounced atomic.Bool
}

// New opens the store, binds the address and builds the API. The caller must Run the server, or Close it.
func New(ctx context.Context, opts Options) (_ *Server, err error) {
	c, err := opts.complete()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	registerMetrics()
	pod.AllowPrivileged(c.AllowPrivileged)
	aggregation.RegisterMetrics()
	s := &Server{opts: c, roles: rbac.NewIndex(), nodes: nodes.NewGraph(), known: make(chan struct{}), systemErrs: map[string]string{}, resolver: &serviceResolver{}, evictions: disruption.NewEvictions()}
	s.load = &loadMeter{report: c.OnLoad}
	if c.OnLoad == nil {
		s.load.report = func(Load) {}
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	// The port first: a second server on the same port should say so before it waits for anything.
	listener, err := c.bind()
	if err != nil {
		return nil, err
	}
	s.listener = limitConnections(listener, connectionLimit(c.FilesBeside), s.cpus(), firstRequestTimeout, s.load.waited)
	s.listener.count = s.load.connections
	c.port = uint16(s.listener.Addr().(*net.TCPAddr).Port)
	if err := s.openTracer(ctx); err != nil {
		return nil, err
	}
	if s.store, err = store.Open(ctx, c.Store); err != nil {
		return nil, withHolder(err)
	}
	if s.encryption, err = openEncryption(ctx, s.store, c.Encryption); err != nil {
		return nil, err
	}
	if err := s.openCertificates(ctx); err != nil {
		return nil, err
	}
	if err := s.openTokens(ctx); err != nil {
		return nil, err
	}
	if err := s.build(); err != nil {
		return nil, err
	}
	return s, nil
}

// Close frees what New took. It is for a server that is not Run.
func (s *Server) Close() {
	if s.generic != nil {
		s.generic.Destroy()
	}
	if s.tracer != nil {
		_ = s.tracer.Shutdown(context.Background())
	}
	if s.encryption != nil {
		s.encryption.close()
	}
	if s.store != nil {
		s.store.Close()
	}
	if s.listener != nil {
		_ = s.listener.Close()
	}
}

// build puts the API together: scheme, resources, storage, filters.
func (s *Server) build() error {
	scheme := newScheme()
	codecs := serializer.NewCodecFactory(scheme)
	codec := storageCodecs(scheme, codecs)
	s.core, s.networking = codec(corev1.Resource("services")), codec(networkingv1.Resource("ipaddresses"))
	s.allocator = alloc.New(uint16(s.opts.ports.Base), uint16(s.opts.ports.Base+s.opts.ports.Size-1),
		rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), time.Now)
	s.allocator.SetRanges(s.opts.ranges)
	s.tracker = newTracker(s.store, s.allocator)

	config, err := s.config(scheme, codecs)
	if err != nil {
		return err
	}
	resources := s.resources(config.Authentication.Authenticator)
	if err := addResources(scheme, resources); err != nil {
		return err
	}
	getter := &store.RESTOptions{
		Store: s.store, Counts: config.StorageObjectCountTracker,
		Codec: withDefinitions(codec),
		// As in Kubernetes; data that older versions wrote is there.
		Unqualified: unqualifiedGroups(), Paths: storagePaths, Places: storagePlaces(),
		ClaimPaths: claimPaths(), Transformers: s.encryption.transformers,
		Claimers: map[schema.GroupResource]store.Claimer{corev1.Resource("services"): service.Claimer(s.networking)},
		OnRead: map[schema.GroupResource]func(runtime.Object){
			corev1.Resource("services"): func(obj runtime.Object) {
				if svc, ok := obj.(*corev1.Service); ok {
					service.OnRead(svc, s.families())
				}
			},
		},
		Uncached: map[schema.GroupResource]bool{
			corev1.Resource("events"): true,
			// One for each Service, which hardly anybody reads: the server itself follows the keys alone.
			networkingv1.Resource("ipaddresses"): true,
		},
		Vital: map[schema.GroupResource]bool{
			{Group: coordinationv1.GroupName, Resource: "leases"}: true, // without them no controller leads, and nothing is cleaned up
		},
	}
	config.RESTOptionsGetter = getter
	s.kv = getter.KV()
	if s.custom, err = newCustomResources(config, s, getter); err != nil {
		return err
	}
	if s.generic, err = config.Complete(s.factory).New("portal", s.custom.extensions.GenericAPIServer); err != nil {
		return err
	}
	s.Handle(CertificatesPath, s.certs)
	s.serveDiscovery()
	for _, path := range []string{StoragePath, StoragePath + "/defrag", StoragePath + "/reencrypt", StoragePath + "/snapshot"} {
		s.Handle(path, storageHandler(s.store, s.encryption))
	}
	s.reach = connect.New(connect.Reach{
		Get: s.objects.get, Slices: s.resolver.GetEndpointSlices, Authorizer: s.access,
		Nodes: &connect.Nodes{Certificate: s.certs.forNodes, Authorities: s.certs.bundle, Instead: s.opts.NodeInstead},
	})
	if err := s.install(scheme, codecs, getter, resources); err != nil {
		return err
	}
	s.serveDocuments(config)
	s.schemas.custom.Store(s.custom)
	if err := s.custom.attach(s.generic, func() { s.aggregator.Rebuild(); s.aggregator.Check() }); err != nil {
		return err
	}
	return s.aggregator.Attach(aggregation.Own{
		BuiltIn: builtInVersions(s.generic), Custom: s.custom.versions, Handler: s.generic.UnprotectedHandler(),
		Discovery: config.AggregatedDiscoveryGroupManager, Addresses: discovery.DefaultAddresses{DefaultAddress: config.ExternalAddress},
	})
}

// builtInVersions are the group versions that a server has installed.
func builtInVersions(server *genericserver.GenericAPIServer) []schema.GroupVersion {
	var out []schema.GroupVersion
	for _, path := range server.ListedPaths() {
		switch parts := strings.Split(path, "/"); {
		case len(parts) == 3 && parts[1] == "api":
			out = append(out, schema.GroupVersion{Version: parts[2]})
		case len(parts) == 4 && parts[1] == "apis":
			out = append(out, schema.GroupVersion{Group: parts[2], Version: parts[3]})
		}
	}
	return out
}

// families are the address families of the service ranges, the first being the default.
func (s *Server) families() []corev1.IPFamily {
	var out []corev1.IPFamily
	for _, p := range s.clusterRanges() {
		if p.Addr().Is4() {
			out = append(out, corev1.IPv4Protocol)
		} else {
			out = append(out, corev1.IPv6Protocol)
		}
	}
	return out
}

// install adds every resource's storage to its group.
func (s *Server) install(scheme *runtime.Scheme, codecs serializer.CodecFactory, getter *store.RESTOptions,
	resources []registry.Resource,
) error {
	params := runtime.NewParameterCodec(scheme)
	byGroup := map[string]*genericserver.APIGroupInfo{}
	var order []string
	for _, r := range resources {
		version := r.GroupVersion()
		info, ok := byGroup[version.Group]
		if !ok {
			made := genericserver.NewDefaultAPIGroupInfo(version.Group, scheme, params, codecs)
			info = &made
			byGroup[version.Group] = info
			order = append(order, version.Group)
		}
		storage, err := r.Storage(scheme, getter)
		if err != nil {
			return err
		}
		if info.VersionedResourcesStorageMap[version.Version] == nil {
			info.VersionedResourcesStorageMap[version.Version] = map[string]rest.Storage{}
		}
		if version == corev1.SchemeGroupVersion {
			maps.Copy(storage, s.reach.Subresources(r.Name()))
		}
		for path, handler := range storage {
			info.VersionedResourcesStorageMap[version.Version][path] = handler
			s.guards.connect(version, path, handler)
			s.objects.connect(version, path, handler)
			s.resolver.connect(version, path, handler)
			s.evictions.Connect(version, path, handler)
		}
	}
	var named []*genericserver.APIGroupInfo
	for _, group := range order {
		if group == corev1.GroupName {
			if err := s.generic.InstallLegacyAPIGroup(genericserver.DefaultLegacyAPIPrefix, byGroup[group]); err != nil {
				return err
			}
			continue
		}
		named = append(named, byGroup[group])
	}
	return s.generic.InstallAPIGroups(named...)
}

// Client talks to the server from inside, with all rights. It is for what the server does for itself.
func (s *Server) Client() kubernetes.Interface { return s.client }

// ServiceRanges are the cluster's own ranges of cluster IPs.
func (s *Server) ServiceRanges() []netip.Prefix { return s.clusterRanges() }

// Authority is the CA that signs this server's certificates, and others' certificate requests.
func (s *Server) Authority() *pki.Authority { return s.certs.authority }

// NewAuditor makes an auditor of what this server's store holds.
func (s *Server) NewAuditor(interval time.Duration) *audit.Auditor {
	return audit.New(audit.Options{
		KV: s.kv, Core: s.core, Networking: s.networking, NodePorts: s.opts.ports, Client: s.events, Interval: interval,
	})
}

// Address is where the server listens.
func (s *Server) Address() string { return s.listener.Addr().String() }

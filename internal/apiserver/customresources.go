package apiserver

import (
	"cmp"
	"maps"
	"net/http"
	"slices"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsv1beta1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	extensions "k8s.io/apiextensions-apiserver/pkg/apiserver"
	extensionsopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/apiserver/pkg/endpoints/filters"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/notfoundhandler"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/common"

	generated "portal/internal/apiserver/openapi"
	"portal/internal/store"
)

// customResources serves CustomResourceDefinitions and what they define: k8s.io/apiextensions-apiserver, behind the server of
// the resources that Portal knows itself. To clients it is one server: discovery and OpenAPI are the front server's, and list
// what the definitions add.
type customResources struct {
	extensions *extensions.CustomResourceDefinitions
	front      *genericserver.GenericAPIServer
}

// newCustomResources builds the server of custom resources from the front server's configuration, which it completes with
// what both must share.
func newCustomResources(config *genericserver.Config, s *Server, getter *store.RESTOptions) (*customResources, error) {
	config.AggregatedDiscoveryGroupManager = aggregated.NewResourceManager("apis")
	behind := *config
	behind.RESTOptionsGetter = getter
	behind.MergedResourceConfig = extensions.DefaultAPIResourceConfigSource()
	behind.PostStartHooks = map[string]genericserver.PostStartHookConfigEntry{}
	// What the front server does for both.
	behind.SkipOpenAPIInstallation = true
	behind.EnableIndex, behind.EnableProfiling, behind.EnableMetrics = false, false, false
	behind.BuildHandlerChainFunc = func(api http.Handler, _ *genericserver.Config) http.Handler { return api }
	masters := 1
	if len(s.opts.Store.Servers) > 0 {
		masters = 2 // others may be at the same etcd, and get time to see a definition before its objects come
	}
	made := extensions.Config{
		GenericConfig: &genericserver.RecommendedConfig{Config: behind, SharedInformerFactory: s.factory},
		ExtraConfig: extensions.ExtraConfig{
			CRDRESTOptionsGetter: &store.CustomResources{RESTOptions: getter, Codec: unstructured.UnstructuredJSONScheme},
			MasterCount:          masters,
			ServiceResolver:      s.resolver,
			AuthResolverWrapper:  webhookCredentials(s.loopback, s.tracerOrNoop()),
		},
	}
	last := notfoundhandler.New(config.Serializer, filters.NoMuxAndDiscoveryIncompleteKey)
	server, err := made.Complete().New(genericserver.NewEmptyDelegateWithCustomHandler(last))
	if err != nil {
		return nil, err
	}
	return &customResources{extensions: server}, nil
}

// attach makes one server of the two. It comes before the front server is run. changed is called when definitions came or went.
func (c *customResources) attach(front *genericserver.GenericAPIServer, changed func()) error {
	c.front = front
	// Definitions themselves are served by the front, so that they are in its OpenAPI.
	for _, service := range c.extensions.GenericAPIServer.Handler.GoRestfulContainer.RegisteredWebServices() {
		if service.RootPath() == "/apis/"+apiextensions.GroupName || service.RootPath() == "/apis/"+apiextensionsv1.SchemeGroupVersion.String() {
			front.Handler.GoRestfulContainer.Add(service)
		}
	}
	informer := c.informer()
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		UpdateFunc: func(_, _ any) { changed() },
		DeleteFunc: func(any) { changed() },
	})
	if err != nil {
		return err
	}
	return front.AddPostStartHook("portal-custom-resource-groups", func(hook genericserver.PostStartHookContext) error {
		cache.WaitForCacheSync(hook.Done(), handler.HasSynced)
		return nil
	})
}

func (c *customResources) informer() cache.SharedIndexInformer {
	return c.extensions.Informers.Apiextensions().V1().CustomResourceDefinitions().Informer()
}

// versions are the group versions of established definitions, and whether all definitions have been read. Groups that the server knows
// itself are not theirs.
func (c *customResources) versions() ([]schema.GroupVersion, bool) {
	builtIn := unqualifiedGroups()
	var out []schema.GroupVersion
	for version := range c.revisions() {
		if !builtIn[version.Group] && version.Group != apiextensions.GroupName {
			out = append(out, version)
		}
	}
	return out, c.informer().HasSynced()
}

// revisions tell versions of the definitions' schemas apart.
func (c *customResources) revisions() map[schema.GroupVersion]string {
	all, err := c.extensions.Informers.Apiextensions().V1().CustomResourceDefinitions().Lister().List(labels.Everything())
	if err != nil {
		return nil // a lister reads a cache, which does not fail
	}
	slices.SortFunc(all, func(a, b *apiextensionsv1.CustomResourceDefinition) int { return cmp.Compare(a.Name, b.Name) })
	out := map[schema.GroupVersion]string{}
	for _, definition := range all {
		for _, v := range definition.Spec.Versions {
			if v.Served && established(definition) {
				out[schema.GroupVersion{Group: definition.Spec.Group, Version: v.Name}] += "," + definition.ResourceVersion
			}
		}
	}
	return out
}

func established(definition *apiextensionsv1.CustomResourceDefinition) bool {
	return slices.ContainsFunc(definition.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
		return c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
	})
}

// withDefinitions is a choice of storage codecs that knows CustomResourceDefinitions too. They are stored as Kubernetes stores
// them: in v1beta1, which has a schema only once if all versions have the same.
func withDefinitions(codec func(schema.GroupResource) runtime.Codec) func(schema.GroupResource) runtime.Codec {
	definitions := extensions.Codecs.LegacyCodec(apiextensionsv1beta1.SchemeGroupVersion, apiextensionsv1.SchemeGroupVersion)
	return func(resource schema.GroupResource) runtime.Codec {
		if resource.Group == apiextensions.GroupName {
			return definitions
		}
		return codec(resource)
	}
}

// openAPIDefinitions are the schemas of all that the server knows itself.
func openAPIDefinitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	out := extensionsopenapi.GetOpenAPIDefinitions(ref)
	maps.Copy(out, generated.GetOpenAPIDefinitions(ref))
	return out
}

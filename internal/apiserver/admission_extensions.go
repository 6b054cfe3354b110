package apiserver

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota"
	webhookinit "k8s.io/apiserver/pkg/admission/plugin/webhook/initializer"
	mutatingwebhook "k8s.io/apiserver/pkg/admission/plugin/webhook/mutating"
	validatingwebhook "k8s.io/apiserver/pkg/admission/plugin/webhook/validating"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/openapi"
	"k8s.io/client-go/restmapper"

	"portal/internal/apiserver/registry/admissionregistration"
)

// kindsPeriod is how often the kinds that policies name as their parameters are looked up again.
const kindsPeriod = 30 * time.Second

// extendAdmission puts what users configure behind the server's own guards: policies in CEL and webhooks, in Kubernetes' order.
// What webhooks change passes the guards again where a webhook asks for that.
func (s *Server) extendAdmission(config *genericserver.Config, guards admission.Interface) (admission.Interface, error) {
	kinds, err := dynamic.NewForConfig(s.loopback)
	if err != nil {
		return nil, err
	}
	s.kinds = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(s.client.Discovery()))
	err = config.AddPostStartHook("portal-admission-kinds", func(hook genericserver.PostStartHookContext) error {
		go wait.UntilWithContext(hook, func(context.Context) { s.kinds.Reset() }, kindsPeriod)
		return nil
	})
	if err != nil {
		return nil, err
	}
	s.schemas.client = s.client.Discovery()
	client := schemaClient{s.client, &s.schemas}
	plugins := admission.NewPlugins()
	const own = "Portal"
	plugins.Register(own, func(io.Reader) (admission.Interface, error) { return guards, nil })
	mutating.Register(plugins)
	mutatingwebhook.Register(plugins)
	validating.Register(plugins)
	validatingwebhook.Register(plugins)
	plugins.Register(resourcequota.PluginName, func(io.Reader) (admission.Interface, error) { return newQuotas() })
	return plugins.NewFromPlugins(
		[]string{own, mutating.PluginName, mutatingwebhook.PluginName, validating.PluginName, validatingwebhook.PluginName,
			resourcequota.PluginName}, // last: what was counted must not be refused for another reason
		unconfigured{}, admission.PluginInitializers{
			initializer.NewAPIServerIDInitializer(config.APIServerID),
			initializer.New(client, kinds, s.factory, config.Authorization.Authorizer, config.FeatureGate, config.EffectiveVersion,
				config.DrainedNotify(), s.kinds),
			webhookinit.NewPluginInitializer(webhookCredentials(s.loopback, s.tracerOrNoop()), s.resolver),
			excluding(admissionregistration.Virtual),
			counting{},
		}, nil)
}

// unconfigured gives no plugin a configuration of its own.
type unconfigured struct{}

func (unconfigured) ConfigFor(string) (io.Reader, error) { return nil, nil }

// excluding tells plugins which resources they never see.
type excluding []schema.GroupResource

func (e excluding) Initialize(plugin admission.Interface) {
	if wants, ok := plugin.(initializer.WantsExcludedAdmissionResources); ok {
		wants.SetExcludedAdmissionResources(e)
	}
}

// mayRead says why a user may not read the parameters of a policy. What can't be determined stands for everything.
func (s *Server) mayRead(ctx context.Context, kind *admissionregistrationv1.ParamKind, verb, namespace, name string) error {
	who, ok := genericrequest.UserFrom(ctx)
	if !ok {
		return fmt.Errorf("the request has no user")
	}
	asked := authorizer.AttributesRecord{
		User: who, Verb: verb, Namespace: namespace, Name: name, APIGroup: "*", APIVersion: "*", Resource: "*", ResourceRequest: true,
	}
	what := "objects of every kind, because the kind of the parameters is not known"
	if kind != nil {
		if version, err := schema.ParseGroupVersion(kind.APIVersion); err == nil {
			asked.APIGroup, asked.APIVersion = version.Group, version.Version
			if mapping, err := s.kinds.RESTMapping(version.WithKind(kind.Kind).GroupKind(), version.Version); err == nil {
				asked.Resource = mapping.Resource.Resource
			}
		}
		what = kind.Kind + " of " + kind.APIVersion
	}
	decision, _, err := s.access.Authorize(ctx, asked)
	if err == nil && decision != authorizer.DecisionAllow {
		err = fmt.Errorf("user %q may not %s %s, which the policy reads", who.GetName(), verb, what)
	}
	return err
}

// validatingKind and mutatingKind are the kinds of the parameters of policies.
func (s *Server) validatingKind(ctx context.Context, policy string) *admissionregistrationv1.ParamKind {
	found, err := s.client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, policy, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return found.Spec.ParamKind
}

func (s *Server) mutatingKind(ctx context.Context, policy string) *admissionregistrationv1.ParamKind {
	found, err := s.client.AdmissionregistrationV1().MutatingAdmissionPolicies().Get(ctx, policy, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return found.Spec.ParamKind
}

// schemas are what mutating policies learn kinds' fields from. The plugin asks for their versions every 5 s, which the
// OpenAPI service would answer from checksums of all its documents, made for that. Here the answer is known anyway: what
// the server serves itself never changes, and definitions have a resourceVersion.
type schemas struct {
	client discovery.DiscoveryInterface
	custom atomic.Pointer[customResources]
}

var _ openapi.Client = &schemas{}

// Paths are the documents, each with the version that it has now.
func (s *schemas) Paths() (map[string]openapi.GroupVersion, error) {
	out := map[string]openapi.GroupVersion{}
	add := func(version schema.GroupVersion, revision string) {
		path := "apis/" + version.String()
		if version.Group == "" {
			path = "api/" + version.Version
		}
		out[path] = document{s.client, path, revision}
	}
	for _, group := range groups {
		add(group.version, "")
	}
	if custom := s.custom.Load(); custom != nil {
		for version, revision := range custom.revisions() {
			add(version, revision)
		}
	}
	return out, nil
}

// document is the OpenAPI document of a group's version.
type document struct {
	client         discovery.DiscoveryInterface
	path, revision string
}

// Schema fetches the document.
func (d document) Schema(contentType string) ([]byte, error) {
	all, err := d.client.OpenAPIV3().Paths()
	if err != nil {
		return nil, err
	}
	found, ok := all[d.path]
	if !ok {
		return nil, fmt.Errorf("%s has no OpenAPI document yet", strings.TrimPrefix(d.path, "apis/"))
	}
	return found.Schema(contentType)
}

// ServerRelativeURL tells versions of the document apart.
func (d document) ServerRelativeURL() string {
	return "/openapi/v3/" + d.path + "?revision=" + d.revision
}

// schemaClient is a client whose OpenAPI is that of schemas.
type schemaClient struct {
	kubernetes.Interface
	schemas *schemas
}

func (c schemaClient) Discovery() discovery.DiscoveryInterfaces {
	return schemaDiscovery{c.Interface.Discovery(), c.schemas}
}

type schemaDiscovery struct {
	discovery.DiscoveryInterfaces
	schemas *schemas
}

func (d schemaDiscovery) OpenAPIV3() openapi.Client { return d.schemas }

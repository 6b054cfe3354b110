package controllers

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"portal/internal/controllers/account"
	"portal/internal/controllers/membership"
	"portal/internal/controllers/sliceview"
	"portal/internal/controllers/workload"
)

// shared is what controllers have in common: clients, and one informer a kind, of those kinds that a selected
// controller asked for.
type shared struct {
	cfg        Config
	wrap       func(http.RoundTripper) http.RoundTripper
	apiClients // for what all of them read
	discovery  discovery.DiscoveryInterface
	events     record.EventBroadcaster
	recorder   record.EventRecorder

	informers map[string]cache.SharedIndexInformer
	members   *membership.Watch
	handlers  []cache.InformerSynced
	err       error
}

// newShared makes the clients. They stop what runs under ctx when they find that the API was restored.
func newShared(ctx context.Context, cfg Config, stop context.CancelCauseFunc) (*shared, error) {
	s := &shared{cfg: cfg, informers: map[string]cache.SharedIndexInformer{}}
	s.wrap = func(next http.RoundTripper) http.RoundTripper {
		return transport{ctx: ctx, next: next, restored: stop, health: cfg.Health}
	}
	var err error
	if s.apiClients, err = s.clients(cfg.REST); err != nil {
		return nil, err
	}
	s.discovery = s.client.Discovery()
	s.events = record.NewBroadcaster(record.WithContext(ctx))
	s.events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: s.client.CoreV1().Events("")})
	s.recorder = s.events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "portal-controllers"})
	return s, nil
}

// apiClients are the clients of one who talks to the API.
type apiClients struct {
	client   kubernetes.Interface
	metadata metadata.Interface
}

func (s *shared) clients(as *rest.Config) (out apiClients, err error) {
	config := rest.AddUserAgent(rest.CopyConfig(as), "portal-controllers")
	config.QPS, config.RateLimiter = -1, nil
	config.WarningHandler = rest.NoWarnings{} // that Endpoints are deprecated is known, and their writers are why they live
	config.Wrap(s.wrap)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return out, err
	}
	proto := rest.CopyConfig(config)
	proto.ContentType = runtime.ContentTypeProtobuf
	proto.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	if out.client, err = kubernetes.NewForConfigAndClient(proto, client); err != nil {
		return out, err
	}
	out.metadata, err = metadata.NewForConfigAndClient(metadata.ConfigFor(config), client)
	return out, err
}

// as is the account that a controller writes with. An error is returned when the controllers start.
func (s *shared) as(controller string) apiClients {
	if s.cfg.As == nil {
		return s.apiClients
	}
	name, ok := accounts[controller]
	if !ok && s.err == nil {
		s.err = fmt.Errorf("controller %s has no account", controller)
	}
	out, err := s.clients(s.cfg.As(name))
	if err != nil && s.err == nil {
		s.err = fmt.Errorf("account %s: %w", name, err)
	}
	return out
}

func (s *shared) close() { s.events.Shutdown() }

// informer makes or finds the informer of a kind. Objects come stripped to what the controllers use.
func (s *shared) informer(kind string, strip cache.TransformFunc, make func(informers.SharedInformerFactory) cache.SharedIndexInformer, indexers cache.Indexers) cache.SharedIndexInformer {
	return s.informerAs(s.client, kind, strip, make, indexers)
}

// informerAs is informer with the client of one controller, for a kind that nobody else reads.
func (s *shared) informerAs(client kubernetes.Interface, kind string, strip cache.TransformFunc, make func(informers.SharedInformerFactory) cache.SharedIndexInformer, indexers cache.Indexers) cache.SharedIndexInformer {
	if i := s.informers[kind]; i != nil {
		return i
	}
	// Each kind has a factory of its own, because namespace and transform are settings of a factory. Nothing is resynced
	// periodically: every queue retries until it has succeeded.
	i := make(informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(strip), informers.WithNamespace(namespaceOf[kind]),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = fieldsOf[kind] })))
	_ = i.SetWatchErrorHandlerWithContext(membership.LogWatchError) // it fails only once the informer runs
	if err := i.AddIndexers(indexers); err != nil && s.err == nil {
		s.err = fmt.Errorf("index of %s: %w", kind, err)
	}
	s.informers[kind] = i
	return i
}

// namespaceOf are the kinds of which only one namespace is watched.
var namespaceOf = map[string]string{"leases": corev1.NamespaceNodeLease}

// fieldsOf are the kinds of which only some objects are watched.
var fieldsOf = map[string]string{
	"configmaps": "metadata.name=" + account.RootCAConfigMap,
	"secrets":    "type=" + string(corev1.SecretTypeServiceAccountToken),
}

func (s *shared) pods() cache.SharedIndexInformer {
	return s.informer("pods", strip(stripPod), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().Pods().Informer()
	}, cache.Indexers{membership.ByNode: membership.IndexByNode, workload.ByController: workload.IndexByController})
}

func (s *shared) deployments() cache.SharedIndexInformer {
	return s.informer("deployments", strip(keep[*appsv1.Deployment]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Apps().V1().Deployments().Informer()
	}, nil)
}

func (s *shared) replicaSets() cache.SharedIndexInformer {
	return s.informer("replicasets", strip(keep[*appsv1.ReplicaSet]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Apps().V1().ReplicaSets().Informer()
	}, cache.Indexers{workload.ByController: workload.IndexByController})
}

func (s *shared) statefulSets() cache.SharedIndexInformer {
	return s.informer("statefulsets", strip(keep[*appsv1.StatefulSet]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Apps().V1().StatefulSets().Informer()
	}, nil)
}

func (s *shared) daemonSets() cache.SharedIndexInformer {
	return s.informer("daemonsets", strip(keep[*appsv1.DaemonSet]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Apps().V1().DaemonSets().Informer()
	}, nil)
}

func (s *shared) revisions() cache.SharedIndexInformer {
	return s.informer("controllerrevisions", strip(keep[*appsv1.ControllerRevision]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Apps().V1().ControllerRevisions().Informer()
	}, cache.Indexers{workload.ByController: workload.IndexByController})
}

func (s *shared) replicationControllers() cache.SharedIndexInformer {
	return s.informer("replicationcontrollers", strip(keep[*corev1.ReplicationController]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().ReplicationControllers().Informer()
	}, nil)
}

func (s *shared) jobs() cache.SharedIndexInformer {
	return s.informer("jobs", strip(keep[*batchv1.Job]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Batch().V1().Jobs().Informer()
	}, cache.Indexers{workload.ByController: workload.IndexByController})
}

func (s *shared) cronJobs() cache.SharedIndexInformer {
	return s.informer("cronjobs", strip(keep[*batchv1.CronJob]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Batch().V1().CronJobs().Informer()
	}, nil)
}

func (s *shared) budgets() cache.SharedIndexInformer {
	return s.informer("poddisruptionbudgets", strip(keep[*policyv1.PodDisruptionBudget]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Policy().V1().PodDisruptionBudgets().Informer()
	}, nil)
}

func (s *shared) services() cache.SharedIndexInformer {
	return s.informer("services", strip(stripService), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().Services().Informer()
	}, nil)
}

func (s *shared) serviceLister() corelisters.ServiceLister {
	return corelisters.NewServiceLister(s.services().GetIndexer())
}

func (s *shared) endpoints() cache.SharedIndexInformer {
	return s.informer("endpoints", strip(keep[*corev1.Endpoints]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().Endpoints().Informer()
	}, nil)
}

func (s *shared) slices() cache.SharedIndexInformer {
	return s.informer("endpointslices", strip(keep[*discoveryv1.EndpointSlice]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Discovery().V1().EndpointSlices().Informer()
	}, cache.Indexers{sliceview.ByService: sliceview.IndexByService})
}

func (s *shared) nodes() cache.SharedIndexInformer {
	return s.informer("nodes", strip(stripNode), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().Nodes().Informer()
	}, nil)
}

func (s *shared) leases() cache.SharedIndexInformer {
	return s.informer("leases", strip(keep[*coordinationv1.Lease]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Coordination().V1().Leases().Informer()
	}, nil)
}

func (s *shared) namespaces() cache.SharedIndexInformer {
	return s.informer("namespaces", strip(keep[*corev1.Namespace]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().Namespaces().Informer()
	}, nil)
}

func (s *shared) signingRequests() cache.SharedIndexInformer {
	return s.informer("certificatesigningrequests", strip(keep[*certificatesv1.CertificateSigningRequest]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Certificates().V1().CertificateSigningRequests().Informer()
	}, nil)
}

func (s *shared) accounts() cache.SharedIndexInformer {
	return s.informer("serviceaccounts", strip(stripAccount), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().ServiceAccounts().Informer()
	}, nil)
}

// rootCAConfigMaps are those with the API server's CA, of every namespace.
func (s *shared) rootCAConfigMaps() cache.SharedIndexInformer {
	return s.informer("configmaps", strip(keep[*corev1.ConfigMap]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().ConfigMaps().Informer()
	}, nil)
}

// tokenSecrets are those that hold a ServiceAccount's token, or ask for one. Only the controller of tokens may read them.
func (s *shared) tokenSecrets(client kubernetes.Interface) cache.SharedIndexInformer {
	return s.informerAs(client, "secrets", strip(keep[*corev1.Secret]), func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
		return f.Core().V1().Secrets().Informer()
	}, cache.Indexers{account.ByAccount: account.IndexByAccount})
}

// memberWatch is the one watch of which Pods are which Service's.
func (s *shared) memberWatch() *membership.Watch {
	if s.members == nil {
		s.members = membership.NewWatch()
		s.pods()
		s.services()
	}
	return s.members
}

// start starts what the controllers asked for.
func (s *shared) start(ctx context.Context, done *sync.WaitGroup) error {
	if s.members != nil {
		synced, err := s.members.Attach(s.pods(), s.services())
		if err != nil && s.err == nil {
			s.err = err
		}
		s.handlers = append(s.handlers, synced...)
	}
	if s.err != nil {
		return s.err
	}
	for _, i := range s.informers {
		s.handlers = append(s.handlers, i.HasSynced)
		done.Go(func() { i.RunWithContext(ctx) })
	}
	return nil
}

func (s *shared) synced() []cache.InformerSynced { return s.handlers }

// strip makes a transform of a function on one type. The managed fields of an object are a good part of it and
// nobody's business here.
func strip[T metav1.Object](f func(T) T) cache.TransformFunc {
	return func(obj any) (any, error) {
		t, ok := obj.(T)
		if !ok {
			return obj, nil
		}
		t.SetManagedFields(nil)
		return f(t), nil
	}
}

// keep keeps everything: the object is written back one day, and what is missing then is deleted.
func keep[T metav1.Object](t T) T { return t }

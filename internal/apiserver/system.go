package apiserver

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/klog/v2"

	"portal/internal/apiserver/authz"
	"portal/internal/apiserver/registry/priorityclass"
	"portal/internal/bootstrap"
	"portal/internal/ensure"
	"portal/internal/identity"
)

// systemNamespaces exist in every cluster.
var systemNamespaces = []string{
	metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease,
}

const (
	// defaultName is the name of the objects that stand for the API itself.
	defaultName = "kubernetes"
	// authenticationConfig is where Kubernetes' components look for the authority of client certificates.
	authenticationConfig = "extension-apiserver-authentication"
	// firstPassTimeout is how long readiness waits for the system objects. What could not be created by then is retried
	// while the server runs.
	firstPassTimeout = 10 * time.Second
)

// system are the objects that every cluster has. Several servers may reconcile them at once.
func (s *Server) system() []ensure.Object {
	core := s.client.CoreV1()
	named := func(name string) metav1.ListOptions {
		return metav1.ListOptions{FieldSelector: "metadata.name=" + name}
	}
	objects := []ensure.Object{{
		Name:   "servicecidr " + defaultName,
		Ensure: s.ensureServiceCIDR,
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return s.client.NetworkingV1().ServiceCIDRs().Watch(ctx, named(defaultName))
		},
	}, {
		Name:   "service default/" + defaultName,
		Ensure: s.ensureService,
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return core.Services(metav1.NamespaceDefault).Watch(ctx, named(defaultName))
		},
	}, {
		Name:   "configmap kube-system/" + authenticationConfig,
		Ensure: s.ensureAuthenticationConfig,
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return core.ConfigMaps(metav1.NamespaceSystem).Watch(ctx, named(authenticationConfig))
		},
	}, {
		Name:   "configmap kube-public/" + bootstrap.ClusterInfo,
		Ensure: s.ensureClusterInfo,
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return core.ConfigMaps(metav1.NamespacePublic).Watch(ctx, named(bootstrap.ClusterInfo))
		},
	}}
	for i, class := range priorityclass.System() {
		object := ensure.Object{Name: "priorityclass " + class.Name, Ensure: func(ctx context.Context) error { return s.ensurePriorityClass(ctx, class) }}
		if i == 0 { // one watch for all of them
			object.Watch = func(ctx context.Context) (watch.Interface, error) {
				return s.client.SchedulingV1().PriorityClasses().Watch(ctx, metav1.ListOptions{})
			}
		}
		objects = append(objects, object)
	}
	for i, name := range systemNamespaces {
		object := ensure.Object{Name: "namespace " + name, Ensure: func(ctx context.Context) error { return s.ensureNamespace(ctx, name) }}
		if i == 0 { // one watch for all of them
			object.Watch = func(ctx context.Context) (watch.Interface, error) {
				return core.Namespaces().Watch(ctx, metav1.ListOptions{
					LabelSelector: fmt.Sprintf("%s in (%s)", corev1.LabelMetadataName, strings.Join(systemNamespaces, ",")),
				})
			}
		}
		objects = slices.Insert(objects, i, object)
	}
	return objects
}

// endpointsOf are the endpoints of the kubernetes Service as the members' keys in etcd say they should be.
func endpointsOf(m *serverEndpoints) []ensure.Object {
	return []ensure.Object{{
		Name:   "endpoints default/" + defaultName,
		Ensure: m.reconcile,
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return m.client.CoreV1().Endpoints(metav1.NamespaceDefault).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + defaultName})
		},
	}, {
		Name:   "endpointslices of default/" + defaultName,
		Ensure: func(context.Context) error { return nil }, // written with the Endpoints
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return m.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Watch(ctx, metav1.ListOptions{
				LabelSelector: discoveryv1.LabelServiceName + "=" + defaultName,
			})
		},
	}}
}

// bootstrap follows the ranges and creates the system objects before the server is ready, as far as that is possible: no
// failure here may keep the server from serving, because serving is what the administrator needs to mend it.
func (s *Server) bootstrap(hook genericserver.PostStartHookContext) error {
	defer close(s.known)
	first, cancel := context.WithTimeout(hook, firstPassTimeout)
	defer cancel()
	if err := authz.Follow(s.factory, s.roles); err != nil {
		return err
	}
	go s.joining.secrets.RunWithContext(hook)
	if err := s.followServiceCIDRs(hook, first); err != nil {
		klog.ErrorS(err, "service ranges could not be read at start, using those of --service-cluster-ip-range until they can")
	}
	var aggregation sync.WaitGroup
	aggregation.Go(func() { s.aggregator.Start(first) })
	s.loop.Once(first)
	aggregation.Wait()
	// Requests are authorized by what the informers have: the server is ready when they have the default roles.
	s.factory.WaitForCacheSync(first.Done())
	s.nodes.WaitSynced(first)
	authz.Known(first, s.roles, s.defaults)
	return nil
}

// reportSystem logs when an object begins to fail, fails for another reason, and is well again.
func (s *Server) reportSystem(name string, err error) {
	var text string
	failing := 0.0
	if err != nil {
		text, failing = err.Error(), 1
	}
	systemFailing.WithLabelValues(name).Set(failing)
	s.systemMu.Lock()
	defer s.systemMu.Unlock()
	before, known := s.systemErrs[name]
	switch {
	case text == before:
	case err != nil:
		klog.ErrorS(err, "system object could not be reconciled, retrying", "object", name)
	case known:
		klog.InfoS("system object is reconciled again", "object", name)
	}
	s.systemErrs[name] = text
}

// ensurePriorityClass creates a class that Pods of the system name.
func (s *Server) ensurePriorityClass(ctx context.Context, class *schedulingv1.PriorityClass) error {
	client := s.client.SchedulingV1().PriorityClasses()
	if _, err := client.Get(ctx, class.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err
	}
	_, err := client.Create(ctx, class, metav1.CreateOptions{})
	return ignoreRace(err)
}

func (s *Server) ensureNamespace(ctx context.Context, name string) error {
	client := s.client.CoreV1().Namespaces()
	if _, err := client.Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err // one that is being deleted comes back when it is gone
	}
	_, err := client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	return ignoreRace(err)
}

// ensureServiceCIDR makes the cluster's own ranges an object like those that users add.
func (s *Server) ensureServiceCIDR(ctx context.Context) error {
	client := s.client.NetworkingV1().ServiceCIDRs()
	cidr, err := client.Get(ctx, defaultName, metav1.GetOptions{})
	if err == nil && cidr.DeletionTimestamp != nil {
		// Services hold addresses of it, so that its finalizer would stay for ever. Addresses of its ranges are allocated meanwhile
		// (usableRanges), and the claims on the addresses are objects of their own: nothing is lost between its end and its next life.
		cidr.Finalizers = nil
		if _, err = client.Update(ctx, cidr, metav1.UpdateOptions{}); ignoreRace(err) != nil {
			return err
		}
		cidr, err = client.Get(ctx, defaultName, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		cidr, err = client.Create(ctx, &networkingv1.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: defaultName},
			Spec:       networkingv1.ServiceCIDRSpec{CIDRs: texts(s.clusterRanges())},
		}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			cidr, err = client.Get(ctx, defaultName, metav1.GetOptions{})
		}
	}
	if err != nil {
		return err
	}
	// Whoever does not name ranges means those that the cluster has.
	if flag := texts(s.opts.ranges); !slices.Equal(cidr.Spec.CIDRs, flag) && !slices.Equal(flag, DefaultOptions().ServiceCIDRs) {
		s.otherRanges.Do(func() {
			klog.ErrorS(nil, "the ranges in --service-cluster-ip-range are not those of the ServiceCIDR "+defaultName+", which stay in force; "+
				"add others with a ServiceCIDR object", "flag", flag, "cluster", cidr.Spec.CIDRs)
		})
	}
	if meta.IsStatusConditionTrue(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
		return nil
	}
	cidr.Status.Conditions = []metav1.Condition{{
		Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue, LastTransitionTime: metav1.Now(),
	}}
	_, err = client.UpdateStatus(ctx, cidr, metav1.UpdateOptions{})
	return ignoreRace(err)
}

func texts(prefixes []netip.Prefix) []string {
	var out []string
	for _, p := range prefixes {
		out = append(out, p.String())
	}
	return out
}

// ensureService makes the Service through which Pods reach the API, at the first address of the first range.
func (s *Server) ensureService(ctx context.Context) error {
	client := s.client.CoreV1().Services(metav1.NamespaceDefault)
	want := s.apiService()
	svc, err := client.Get(ctx, defaultName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return s.createService(ctx, want)
	case err != nil:
		return err
	case svc.DeletionTimestamp != nil:
		svc.Finalizers = nil
		_, err = client.Update(ctx, svc, metav1.UpdateOptions{})
	case svc.Spec.ClusterIP != want.Spec.ClusterIP && svc.Spec.Type != corev1.ServiceTypeExternalName:
		// A cluster IP cannot be changed. It is created again in the next pass.
		err = client.Delete(ctx, defaultName, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &svc.UID}})
	case svc.Spec.Type != want.Spec.Type || len(svc.Spec.Selector) > 0 || !samePorts(svc.Spec.Ports, want.Spec.Ports):
		want.ResourceVersion = svc.ResourceVersion
		_, err = client.Update(ctx, want, metav1.UpdateOptions{})
	}
	return ignoreRace(err)
}

func (s *Server) apiService() *corev1.Service {
	single := corev1.IPFamilyPolicySingleStack
	first := s.clusterRanges()[0].Addr().Next()
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: defaultName, Namespace: metav1.NamespaceDefault,
			Labels: map[string]string{"component": "apiserver", "provider": "kubernetes"},
		},
		Spec: corev1.ServiceSpec{
			Type:           corev1.ServiceTypeClusterIP,
			ClusterIP:      first.String(),
			ClusterIPs:     []string{first.String()},
			IPFamilyPolicy: &single,
			IPFamilies:     []corev1.IPFamily{familyOf(first)},
			Ports: []corev1.ServicePort{{
				Name: "https", Protocol: corev1.ProtocolTCP, Port: 443, TargetPort: intstr.FromInt32(int32(s.opts.port)),
			}},
		},
	}
}

// samePorts leaves target ports alone: those of several servers may differ, and the endpoints say where each is.
func samePorts(a, b []corev1.ServicePort) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.ServicePort) bool {
		return x.Name == y.Name && x.Protocol == y.Protocol && x.Port == y.Port
	})
}

// createService creates the Service. Its address is reserved for it, but a store that was written before that was enforced
// may say otherwise: a claim without a Service is removed, and a Service that holds the address is named.
func (s *Server) createService(ctx context.Context, want *corev1.Service) error {
	services := s.client.CoreV1().Services(metav1.NamespaceDefault)
	_, err := services.Create(ctx, want, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) {
		return ignoreRace(err)
	}
	addresses := s.client.NetworkingV1().IPAddresses()
	claim, getErr := addresses.Get(ctx, want.Spec.ClusterIP, metav1.GetOptions{})
	if getErr != nil {
		return err
	}
	// The API rejects this as long as a Service holds the address.
	deleteErr := addresses.Delete(ctx, claim.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &claim.UID}})
	if deleteErr == nil || apierrors.IsNotFound(deleteErr) {
		_, err = services.Create(ctx, want, metav1.CreateOptions{})
		return ignoreRace(err)
	}
	owner := "an unknown object"
	if ref := claim.Spec.ParentRef; ref != nil {
		owner = fmt.Sprintf("Service %s/%s", ref.Namespace, ref.Name)
	}
	return fmt.Errorf("its address %s is held by %s: delete that Service, or create it again with another address", claim.Name, owner)
}

// ensureAuthenticationConfig publishes the authority of client certificates where Kubernetes' components look for it.
func (s *Server) ensureAuthenticationConfig(ctx context.Context) error {
	client := s.client.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	bundle := string(s.certs.agreed())
	want := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: authenticationConfig, Namespace: metav1.NamespaceSystem},
		Data: map[string]string{
			"client-ca-file": bundle,
			// API servers behind Services believe this server, and nobody else with a certificate of the cluster, who asks.
			"requestheader-client-ca-file":       bundle,
			"requestheader-allowed-names":        `["` + identity.FrontProxy + `"]`,
			"requestheader-username-headers":     `["X-Remote-User"]`,
			"requestheader-uid-headers":          `["X-Remote-Uid"]`,
			"requestheader-group-headers":        `["X-Remote-Group"]`,
			"requestheader-extra-headers-prefix": `["X-Remote-Extra-"]`,
		},
	}
	current, err := client.Get(ctx, authenticationConfig, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = client.Create(ctx, want, metav1.CreateOptions{})
	case err != nil:
	case current.DeletionTimestamp != nil:
		current.Finalizers = nil
		_, err = client.Update(ctx, current, metav1.UpdateOptions{})
	case maps.Equal(current.Data, want.Data):
	case current.Immutable != nil && *current.Immutable:
		err = replaceImmutable(current.UID, func(opts metav1.DeleteOptions) error {
			return client.Delete(ctx, authenticationConfig, opts)
		}, func() error {
			_, err := client.Create(ctx, want, metav1.CreateOptions{})
			return err
		})
	default:
		current.Data, current.BinaryData = want.Data, nil
		_, err = client.Update(ctx, current, metav1.UpdateOptions{})
	}
	return ignoreRace(err)
}

// replaceImmutable deletes the object that was looked at, and no other, and creates it anew.
func replaceImmutable(uid types.UID, remove func(metav1.DeleteOptions) error, create func() error) error {
	if err := remove(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}); err != nil {
		return err
	}
	return create()
}

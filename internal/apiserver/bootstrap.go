package apiserver

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// systemNamespaces exist in every cluster.
var systemNamespaces = []string{
	metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease,
}

// defaultName is the name of the objects that stand for the API itself.
const defaultName = "kubernetes"

// bootstrap makes what every cluster has. Several servers may do it at once.
func (s *Server) bootstrap(hook genericserver.PostStartHookContext) error {
	for _, name := range systemNamespaces {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := s.client.CoreV1().Namespaces().Create(hook, namespace, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("namespace %s: %w", name, err)
		}
	}
	if err := s.ensureServiceCIDR(hook); err != nil {
		return fmt.Errorf("ServiceCIDR %s: %w", defaultName, err)
	}
	if err := s.followServiceCIDRs(hook); err != nil {
		return err
	}
	if err := s.ensureService(hook); err != nil {
		return fmt.Errorf("service %s: %w", defaultName, err)
	}
	return s.ensureAuthenticationConfig(hook)
}

// ensureServiceCIDR makes the ranges of the flags an object like those that users add.
func (s *Server) ensureServiceCIDR(ctx context.Context) error {
	client := s.client.NetworkingV1().ServiceCIDRs()
	var want []string
	for _, p := range s.opts.ranges {
		want = append(want, p.String())
	}
	cidr, err := client.Get(ctx, defaultName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		cidr, err = client.Create(ctx, &networkingv1.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: defaultName},
			Spec:       networkingv1.ServiceCIDRSpec{CIDRs: want},
		}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			cidr, err = client.Get(ctx, defaultName, metav1.GetOptions{})
		}
	}
	if err != nil {
		return err
	}
	if !slices.Equal(cidr.Spec.CIDRs, want) {
		klog.InfoS("The ranges in --service-cluster-ip-range are not those that this cluster was made with, which stay in force; "+
			"add others with a ServiceCIDR object", "flag", want, "cluster", cidr.Spec.CIDRs)
	}
	if meta.IsStatusConditionTrue(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
		return nil
	}
	cidr.Status.Conditions = []metav1.Condition{{
		Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue, LastTransitionTime: metav1.Now(),
	}}
	_, err = client.UpdateStatus(ctx, cidr, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) {
		return nil // another server was quicker
	}
	return err
}

// followServiceCIDRs keeps the book's ranges those of the ServiceCIDR objects that are ready.
func (s *Server) followServiceCIDRs(hook genericserver.PostStartHookContext) error {
	informer := s.factory.Networking().V1().ServiceCIDRs()
	update := func(any) {
		list, err := informer.Lister().List(labels.Everything())
		if err != nil {
			return
		}
		s.book.SetRanges(usableRanges(list))
	}
	handler, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: update, UpdateFunc: func(_, now any) { update(now) }, DeleteFunc: update,
	})
	if err != nil {
		return err
	}
	s.factory.Start(hook.Done())
	if !cache.WaitForCacheSync(hook.Done(), handler.HasSynced) {
		return hook.Err()
	}
	return nil
}

// usableRanges are the prefixes of the ServiceCIDRs that are neither going away nor said to be not ready, the oldest
// first, so that a cluster's own range is used up before those added to it.
func usableRanges(list []*networkingv1.ServiceCIDR) []netip.Prefix {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b *networkingv1.ServiceCIDR) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	var out []netip.Prefix
	for _, cidr := range list {
		if cidr.DeletionTimestamp != nil || meta.IsStatusConditionFalse(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
			continue
		}
		for _, text := range cidr.Spec.CIDRs {
			if p, err := netip.ParsePrefix(text); err == nil && !slices.Contains(out, p.Masked()) {
				out = append(out, p.Masked())
			}
		}
	}
	return out
}

// ensureService makes the Service through which Pods reach the API, at the first address of the range.
func (s *Server) ensureService(ctx context.Context) error {
	client := s.client.CoreV1().Services(metav1.NamespaceDefault)
	if _, err := client.Get(ctx, defaultName, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err
	}
	single := corev1.IPFamilyPolicySingleStack
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: defaultName, Namespace: metav1.NamespaceDefault,
			Labels: map[string]string{"component": "apiserver", "provider": "kubernetes"},
		},
		Spec: corev1.ServiceSpec{
			ClusterIP:      s.opts.ranges[0].Addr().Next().String(),
			IPFamilyPolicy: &single,
			IPFamilies:     s.families()[:1],
			Ports: []corev1.ServicePort{{
				Name: "https", Protocol: corev1.ProtocolTCP, Port: 443, TargetPort: intstr.FromInt32(int32(s.opts.port)),
			}},
		},
	}
	_, err := client.Create(ctx, svc, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// ensureAuthenticationConfig publishes the authority of client certificates where Kubernetes' components look for it.
func (s *Server) ensureAuthenticationConfig(ctx context.Context) error {
	const name = "extension-apiserver-authentication"
	client := s.client.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	want := map[string]string{
		"client-ca-file": string(s.authority.PEM),
		// Nothing stands before this API that would speak for others, and no certificate has this name. Without the
		// entries, components that look for them complain for ever.
		"requestheader-client-ca-file":       string(s.authority.PEM),
		"requestheader-allowed-names":        `["portal-front-proxy"]`,
		"requestheader-username-headers":     `["X-Remote-User"]`,
		"requestheader-uid-headers":          `["X-Remote-Uid"]`,
		"requestheader-group-headers":        `["X-Remote-Group"]`,
		"requestheader-extra-headers-prefix": `["X-Remote-Extra-"]`,
	}
	current, err := client.Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = client.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceSystem}, Data: want,
		}, metav1.CreateOptions{})
	case err == nil && !maps.Equal(current.Data, want):
		current.Data = want
		_, err = client.Update(ctx, current, metav1.UpdateOptions{})
	}
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

package controllers_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// refuseSlices has the API server refuse slices of a family in the test's namespace, until the function is called.
func (w *world) refuseSlices(family discoveryv1.AddressType) (allow func()) {
	w.Helper()
	policies := w.client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	bindings := w.client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	here := &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: w.namespace}}
	_, err := policies.Create(w.ctx(), &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: w.namespace},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{"discovery.k8s.io"}, APIVersions: []string{"v1"}, Resources: []string{"endpointslices"}},
			}}}},
			Validations: []admissionv1.Validation{{Expression: fmt.Sprintf("object.addressType != %q", family)}},
		},
	}, metav1.CreateOptions{})
	w.must(err)
	allow = func() { _ = policies.Delete(w.ctx(), w.namespace, metav1.DeleteOptions{}) }
	w.Cleanup(allow)
	_, err = bindings.Create(w.ctx(), &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: w.namespace},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: w.namespace, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			MatchResources: &admissionv1.MatchResources{NamespaceSelector: here},
		},
	}, metav1.CreateOptions{})
	w.must(err)
	w.Cleanup(func() { _ = bindings.Delete(w.ctx(), w.namespace, metav1.DeleteOptions{}) })
	w.eventually(20*time.Second, func() string {
		_, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).Create(w.ctx(), &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "probe"}, AddressType: family,
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || !strings.Contains(err.Error(), w.namespace) {
			return fmt.Sprintf("slices are not refused yet: %v", err)
		}
		return ""
	})
	return allow
}

// TestARefusedSliceHoldsBackNoOther: of hand-made Endpoints whose IPv4 slice is refused, the IPv6 slice is made, changed and deleted as if
// nothing was, and the IPv4 slice follows when it may.
func TestARefusedSliceHoldsBackNoOther(t *testing.T) {
	w := newWorld(t)
	allow := w.refuseSlices(discoveryv1.AddressTypeIPv4)
	w.addService("s")
	client := w.client.CoreV1().Endpoints(w.namespace)
	subsets := func(ips ...string) []corev1.EndpointSubset {
		s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "web", Port: 80, Protocol: corev1.ProtocolTCP}}}
		for _, ip := range ips {
			s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
		}
		return []corev1.EndpointSubset{s}
	}
	e, err := client.Create(w.ctx(), &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Subsets: subsets("192.0.2.1", "2001:db8::1")}, metav1.CreateOptions{})
	w.must(err)
	w.run("mirror")
	mirrored := func(want ...string) {
		t.Helper()
		w.eventually(10*time.Second, func() string {
			list, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).List(w.ctx(), metav1.ListOptions{})
			w.must(err)
			var got []string
			for _, s := range list.Items {
				for _, e := range s.Endpoints {
					got = append(got, e.Addresses...)
				}
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				return fmt.Sprintf("mirrored are %v, want %v", got, want)
			}
			return ""
		})
	}
	change := func(ips ...string) {
		t.Helper()
		e.Subsets = subsets(ips...)
		e, err = client.Update(w.ctx(), e, metav1.UpdateOptions{})
		w.must(err)
	}
	mirrored("2001:db8::1")
	change("192.0.2.1", "2001:db8::2")
	mirrored("2001:db8::2")
	change("192.0.2.1")
	mirrored()
	change("192.0.2.1", "2001:db8::3")
	mirrored("2001:db8::3")
	allow()
	mirrored("192.0.2.1", "2001:db8::3")
}

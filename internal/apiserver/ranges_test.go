package apiserver

import (
	"crypto/tls"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestStoredRangesHold: a server that is started without its first ranges goes by those that the cluster has: for families, and in its certificate.
func TestStoredRangesHold(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.ServiceCIDRs = []string{"10.0.0.0/16"}
	_, stop := startStoppable(t, opts)
	stop()
	opts.ServiceCIDRs = DefaultOptions().ServiceCIDRs
	s := start(t, opts)
	made, err := s.Client().CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "both"},
		Spec:       corev1.ServiceSpec{IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicyPreferDualStack), Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if ips := made.Spec.ClusterIPs; len(ips) != 1 || !strings.HasPrefix(ips[0], "10.0.") || len(made.Spec.IPFamilies) != 1 {
		t.Errorf("addresses %v, families %v", ips, made.Spec.IPFamilies)
	}
	c, err := tls.Dial("tcp", s.Address(), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it is looked at
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.ConnectionState().PeerCertificates[0].VerifyHostname("10.0.0.1"); err != nil {
		t.Errorf("the cluster IP of the API: %v", err)
	}
}

// TestUsableRanges: a range that is being deleted, or of which somebody says anything but that it is ready, is not used.
func TestUsableRanges(t *testing.T) {
	at := metav1.NewTime(time.Unix(1, 0))
	cidr := func(name, prefix string, ready metav1.ConditionStatus) *networkingv1.ServiceCIDR {
		out := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: at}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{prefix}}}
		if ready != "" {
			out.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady, Status: ready}}
		}
		return out
	}
	deleted := cidr("deleted", "10.5.0.0/24", metav1.ConditionTrue)
	deleted.DeletionTimestamp = &at
	own := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	got := usableRanges([]*networkingv1.ServiceCIDR{
		cidr("a", "10.1.0.0/24", ""), cidr("b", "10.2.0.0/24", metav1.ConditionTrue), cidr("c", "10.3.0.0/24", metav1.ConditionFalse),
		cidr("d", "10.4.0.0/24", metav1.ConditionUnknown), deleted,
	}, own)
	want := append(own, netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("10.2.0.0/24"))
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

package apiserver

import (
	"crypto/tls"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
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

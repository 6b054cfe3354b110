package clusterdns

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestTenthAddresses(t *testing.T) {
	got := TenthAddresses([]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112"), netip.MustParsePrefix("10.9.0.0/29")})
	if fmt.Sprint(got) != "[10.96.0.10 fd00:96::a]" {
		t.Error(got)
	}
}

// TestAnnounced: a node speaks for its own addresses only.
func TestAnnounced(t *testing.T) {
	for _, c := range []struct{ cidrs, text, want string }{
		{"10.244.1.0/24 fd00:244:1::/64", "10.244.1.1,fd00:244:1::1", "[10.244.1.1 fd00:244:1::1]"},
		{"10.244.1.0/24", "10.244.2.1", "[]"},
		{"10.244.1.0/24", "10.244.2.1, 10.244.1.1", "[10.244.1.1]"},
		{"10.244.1.0/24", "fe80::1%eth0,x,", "[]"},
		{"", "192.0.2.1", "[192.0.2.1]"},
		{"", "127.0.0.1,::,169.254.169.254", "[]"},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{Annotation: c.text}}}
		var cidr string
		for rest := c.cidrs; rest != ""; {
			if n, _ := fmt.Sscan(rest, &cidr); n != 1 {
				break
			}
			node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, cidr)
			rest = rest[min(len(rest), len(cidr)+1):]
		}
		if got := fmt.Sprint(Announced(node)); got != c.want {
			t.Errorf("%q of a node with %s: %s, want %s", c.text, c.cidrs, got, c.want)
		}
	}
	if got := Announced(&corev1.Node{}); got != nil {
		t.Error(got)
	}
}

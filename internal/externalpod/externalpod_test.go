package externalpod

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.1": "", "2001:db8::1": "", "192.0.2.1, 2001:db8::1": "", "2001:db8::1,192.0.2.1": "",
		"": "no IP address", "host": "no IP address", "192.0.2.1,": "no IP address", "192.0.2.01": "no IP address", "192.0.2.1:80": "no IP address",
		"192.0.2.1,192.0.2.2": "of a family", "192.0.2.1,2001:db8::1,2001:db8::2": "of a family", "127.0.0.1": "loopback", "::1": "loopback", "0.0.0.0": "any address",
		"::": "any address", "169.254.1.1": "link-local", "fe80::1": "link-local", "fe80::1%eth0": "zone", "224.0.0.1": "group", "239.1.1.1": "group", "ff02::1": "group",
		"255.255.255.255": "group", "::ffff:192.0.2.1": "as such",
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{AddressesAnnotation: text}}}
		got, err := Addresses(pod)
		switch {
		case want == "" && (err != nil || len(got) == 0):
			t.Errorf("%q: %v, %v", text, got, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), AddressesAnnotation)):
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, err := Addresses(&corev1.Pod{}); err == nil || !strings.Contains(err.Error(), "is required") {
		t.Errorf("%v", err)
	}
	if Is(&corev1.Pod{}) || !Is(&corev1.Pod{Spec: corev1.PodSpec{RuntimeClassName: ptr.To("external")}}) {
		t.Error("Is is wrong")
	}
}

package main

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// The cluster's networks are the ranges of Services, and the Pod ranges and addresses of nodes. What the account may not read
// is an error that keeps the rest, and what was known of it.
func TestClusterNetworks(t *testing.T) {
	client := fake.NewClientset(
		&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"198.51.100.0/24", "2001:db8:96::/112"}}},
		&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.NodeSpec{PodCIDR: "203.0.113.0/26", PodCIDRs: []string{"203.0.113.0/26", "2001:db8:1::/64"}},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.7"}, {Type: corev1.NodeHostName, Address: "a"}}},
		},
	)
	check := func(when string, known *networks, want ...string) {
		t.Helper()
		err := known.read(t.Context(), client)
		got := known.list()
		for _, w := range append(want, "127.0.0.1/32") {
			if !slices.Contains(got, netip.MustParsePrefix(w)) {
				t.Errorf("%s: %s is missing in %v (%v)", when, w, got, err)
			}
		}
	}
	all := &networks{}
	check("as administrator", all, "198.51.100.0/24", "2001:db8:96::/112", "203.0.113.0/26", "2001:db8:1::/64", "192.0.2.7/32")
	client.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", errors.New("not yours"))
	})
	check("without the right to nodes", &networks{}, "198.51.100.0/24")
	check("while nodes can't be read", all, "198.51.100.0/24", "203.0.113.0/26", "192.0.2.7/32")
	if err := all.read(t.Context(), client); !apierrors.IsForbidden(err) {
		t.Errorf("without the right to nodes: %v", err)
	}
	// An API from before 1.33 has no ServiceCIDRs.
	client.PrependReactor("list", "servicecidrs", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewNotFound(schema.GroupResource{Resource: "servicecidrs"}, "")
	})
	if err := all.read(t.Context(), client); !apierrors.IsForbidden(err) {
		t.Errorf("without ServiceCIDRs: %v", err)
	}
}

// TestAllowRecursion: without --allow-recursion only private networks and the cluster's may resolve other names.
func TestAllowRecursion(t *testing.T) {
	outside := netip.MustParseAddr("192.0.2.1")
	for _, c := range []struct {
		args             []string
		private, outside bool
	}{
		{nil, true, false},
		{[]string{"--allow-recursion=any"}, false, true},
		{[]string{"--allow-recursion=192.0.2.0/24"}, false, true},
		{[]string{"--allow-recursion=private,192.0.2.1"}, true, true},
		{[]string{"--allow-recursion="}, false, false},
	} {
		flags := newDNSCommand().Flags()
		if err := flags.Parse(c.args); err != nil {
			t.Fatal(err)
		}
		given, err := flags.GetStringSlice("allow-recursion")
		if err != nil {
			t.Fatal(err)
		}
		list, private, err := recursionNetworks(given)
		if err != nil {
			t.Fatal(err)
		}
		if may := slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(outside) }); private != c.private || may != c.outside || list == nil {
			t.Errorf("%v: %v, private %v", c.args, list, private)
		}
	}
}

package apiserver

import (
	"bytes"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"portal/internal/store"
)

// TestLayout pins where objects are kept in etcd: what an older version stored is found after an upgrade.
func TestLayout(t *testing.T) {
	codecs := storageCodecs(newScheme(), serializer.NewCodecFactory(newScheme()))
	options := &store.RESTOptions{Unqualified: unqualifiedGroups(), Paths: storagePaths, Codec: func(r schema.GroupResource) runtime.Codec {
		if r.Group == "example.com" {
			r.Group = ""
		}
		return codecs(r)
	}}
	view := storageView(nil, nil)
	for resource, want := range map[schema.GroupResource]string{
		{Resource: "namespaces"}:                                               "/namespaces",
		{Resource: "nodes"}:                                                    "/nodes",
		{Resource: "pods"}:                                                     "/pods",
		{Resource: "services"}:                                                 "/services/specs",
		{Resource: "endpoints"}:                                                "/services/endpoints",
		{Resource: "events"}:                                                   "/events",
		{Resource: "secrets"}:                                                  "/secrets",
		{Resource: "configmaps"}:                                               "/configmaps",
		{Resource: "serviceaccounts"}:                                          "/serviceaccounts",
		{Group: "discovery.k8s.io", Resource: "endpointslices"}:                "/endpointslices",
		{Group: "networking.k8s.io", Resource: "servicecidrs"}:                 "/servicecidrs",
		{Group: "networking.k8s.io", Resource: "ipaddresses"}:                  "/ipaddresses",
		{Group: "networking.k8s.io", Resource: "ingresses"}:                    "/ingresses",
		{Group: "networking.k8s.io", Resource: "ingressclasses"}:               "/ingressclasses",
		{Resource: "replicationcontrollers"}:                                   "/controllers",
		{Group: "apps", Resource: "deployments"}:                               "/deployments",
		{Group: "scheduling.k8s.io", Resource: "priorityclasses"}:              "/priorityclasses",
		{Group: "node.k8s.io", Resource: "runtimeclasses"}:                     "/runtimeclasses",
		{Group: "coordination.k8s.io", Resource: "leases"}:                     "/leases",
		{Group: "certificates.k8s.io", Resource: "certificatesigningrequests"}: "/certificatesigningrequests",
		{Group: "example.com", Resource: "services"}:                           "/example.com/services",
		{Group: "example.com", Resource: "endpointslices"}:                     "/example.com/endpointslices",
	} {
		got, err := options.GetRESTOptions(resource, nil)
		if err != nil || got.ResourcePrefix != want {
			t.Errorf("%s is kept at %s, want %s (%v)", resource, got.ResourcePrefix, want, err)
		}
		// What is found there is encrypted as that resource.
		if found, ok := view.ResourceAt(store.Prefix + want + "/default/a"); !ok || found != resource {
			t.Errorf("what is at %s is taken for %s", want, found)
		}
	}
}

// Claims on ports are encrypted with the Services; what Portal keeps for itself is not encrypted.
func TestLayoutOfWhatIsNoObject(t *testing.T) {
	view := storageView(nil, nil)
	for key, want := range map[string]schema.GroupResource{
		"/registry/nodeports/30000":        {Resource: "services"},
		"/registry/ipaddresses/10.96.0.10": {Group: "networking.k8s.io", Resource: "ipaddresses"},
		memberPrefix + "10.0.0.1:6443":     {},
		authorityRoot + "/a":               {},
		"/registry/portal/encryption/x/y":  {},
		"compact_rev_key":                  {},
	} {
		if got, ok := view.ResourceAt(key); got != want || ok != (want != schema.GroupResource{}) {
			t.Errorf("%s is encrypted as %s, want %s", key, got, want)
		}
	}
}

// A kind with several versions is stored in the first of its group, and read from any.
func TestSeveralVersions(t *testing.T) {
	scheme := newScheme()
	old := schema.GroupVersion{Group: discoveryv1.GroupName, Version: "v1beta1"}
	scheme.AddKnownTypeWithName(old.WithKind("EndpointSlice"), &discoveryv1.EndpointSlice{})
	if err := scheme.SetVersionPriority(discoveryv1.SchemeGroupVersion, old); err != nil {
		t.Fatal(err)
	}
	codec := storageCodecs(scheme, serializer.NewCodecFactory(scheme))(discoveryv1.Resource("endpointslices"))
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: corev1.NamespaceDefault}}
	data, err := runtime.Encode(codec, slice)
	if err != nil || !bytes.Contains(data, []byte("discovery.k8s.io/v1")) || bytes.Contains(data, []byte("v1beta1")) {
		t.Fatalf("stored as %q, %v", data, err)
	}
	was := []byte(`{"apiVersion":"discovery.k8s.io/v1beta1","kind":"EndpointSlice","metadata":{"name":"b"}}`)
	read, err := runtime.Decode(codec, was)
	if err != nil || read.(*discoveryv1.EndpointSlice).Name != "b" {
		t.Errorf("read from an older version: %v, %v", read, err)
	}
}

package test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/internal/apiserver/registry/service"
	"portal/internal/store"
)

// reporter is what testing.T and rapid.T have in common.
type reporter interface {
	Helper()
	Errorf(format string, args ...any)
	Fatal(args ...any)
}

// claimsOf are the claims that stored Services must have, each with its owner. One address or port with two owners
// fails the test.
func claimsOf(t reporter, services []corev1.Service) (addresses, ports map[string]string) {
	t.Helper()
	addresses, ports = map[string]string{}, map[string]string{}
	take := func(claims map[string]string, what, owner string) {
		if other := claims[what]; other != "" {
			t.Errorf("%s belongs to %s and to %s", what, other, owner)
		}
		claims[what] = owner
	}
	for i := range services {
		held := service.Claims(&services[i])
		owner := services[i].Namespace + "/" + services[i].Name
		for _, addr := range held.Addresses {
			take(addresses, addr.String(), owner)
		}
		for _, port := range held.Ports() {
			take(ports, fmt.Sprint(port), owner)
		}
	}
	return addresses, ports
}

// checkClaims demands that the claims are exactly those of the Services, as far as the API shows them. etcd is nil
// where the test can't look into it.
func checkClaims(t reporter, client kubernetes.Interface, etcd *clientv3.Client) {
	t.Helper()
	ports := checkAddresses(t, client)
	compareClaims(t, "node port (by dry run)", ports, portsByDryRun(t, client, ports))
	if etcd != nil {
		compareClaims(t, "node port", ports, portsInEtcd(t, etcd))
	}
}

// checkAddresses compares the IPAddress objects with the Services, and returns the ports that are held.
func checkAddresses(t reporter, client kubernetes.Interface) (ports map[string]string) {
	t.Helper()
	services, err := client.CoreV1().Services("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	objects, err := client.NetworkingV1().IPAddresses().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	addresses, ports := claimsOf(t, services.Items)
	found := map[string]string{}
	for _, o := range objects.Items {
		found[o.Name] = o.Spec.ParentRef.Namespace + "/" + o.Spec.ParentRef.Name
	}
	compareClaims(t, "IPAddress", addresses, found)
	return ports
}

// portsInEtcd are the claims on ports as they are kept.
func portsInEtcd(t reporter, etcd *clientv3.Client) map[string]string {
	t.Helper()
	resp, err := etcd.Get(context.Background(), store.Prefix+service.PortPrefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, kv := range resp.Kvs {
		var owner service.Owner
		if err := json.Unmarshal(kv.Value, &owner); err != nil {
			t.Errorf("%s: %v", kv.Key, err)
		}
		found[strings.TrimPrefix(string(kv.Key), store.Prefix+service.PortPrefix)] = owner.Namespace + "/" + owner.Name
	}
	return found
}

func compareClaims(t reporter, what string, want, found map[string]string) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if found[key] != want[key] {
			t.Errorf("%s %s: its Service is %s, the claim says %q", what, key, want[key], found[key])
		}
	}
	for _, key := range slices.Sorted(maps.Keys(found)) {
		if want[key] == "" {
			t.Errorf("%s %s: claimed for %s, which does not have it", what, key, found[key])
		}
	}
}

// portsByDryRun asks of every port of the range whether it could be had. It can't say who has one that is taken, so it
// believes owners.
func portsByDryRun(t reporter, client kubernetes.Interface, owners map[string]string) map[string]string {
	t.Helper()
	found := map[string]string{}
	var mu sync.Mutex
	var group sync.WaitGroup
	limit := make(chan struct{}, 8)
	for port := int32(firstNodePort); port <= lastNodePort; port++ {
		group.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			_, err := client.CoreV1().Services("default").Create(context.Background(), &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: "probe"},
				Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80, NodePort: port}}},
			}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			mu.Lock()
			defer mu.Unlock()
			if apierrors.IsInvalid(err) {
				key := fmt.Sprint(port)
				if found[key] = owners[key]; found[key] == "" {
					found[key] = "somebody"
				}
			} else if err != nil {
				t.Errorf("dry run with node port %d: %v", port, err)
			}
		})
	}
	group.Wait()
	return found
}

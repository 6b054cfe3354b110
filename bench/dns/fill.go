package main

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const namespace = "bench"

type client struct{ *kubernetes.Clientset }

func newClient(kubeconfig string) (client, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return client{}, err
	}
	config.QPS = -1
	config.ContentType = "application/vnd.kubernetes.protobuf"
	c, err := kubernetes.NewForConfig(config)
	return client{c}, err
}

// parallel calls do for 0 to n-1 from sixteen goroutines and returns the first error.
func parallel(n int, do func(int) error) error {
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	next := make(chan int)
	for range 16 {
		wg.Go(func() {
			for i := range next {
				if err := do(i); err != nil && !apierrors.IsAlreadyExists(err) {
					once.Do(func() { first = err })
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return first
}

func (c client) fillServices(ctx context.Context, n int) error {
	_, err := c.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return parallel(n, func(i int) error {
		name := fmt.Sprintf("svc-%05d", i)
		_, err := c.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		addrs := []string{fmt.Sprintf("10.%d.%d.%d", 128+i>>16, i>>8&255, i&255), fmt.Sprintf("10.%d.%d.%d", 160+i>>16, i>>8&255, i&255)}
		return c.slice(ctx, name, addrs)
	})
}

func (c client) fillHeadless(ctx context.Context, n int) error {
	return parallel(n, func(i int) error {
		name := fmt.Sprintf("set-%05d", i)
		_, err := c.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{ClusterIP: "None", Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		var addrs []string
		for j := range 100 {
			addrs = append(addrs, fmt.Sprintf("10.%d.%d.%d", 192+i>>8, i&255, j+1))
		}
		return c.slice(ctx, name, addrs)
	})
}

// slice writes the endpoints of a Service; those of headless ones have hostnames, as a StatefulSet's.
func (c client) slice(ctx context.Context, service string, addrs []string) error {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	name, port, ready := "http", int32(8080), true
	s.Ports = []discoveryv1.EndpointPort{{Name: &name, Port: &port}}
	for i, a := range addrs {
		e := discoveryv1.Endpoint{Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}
		if len(addrs) > 2 {
			host := fmt.Sprintf("pod-%d", i)
			e.Hostname = &host
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	_, err := c.DiscoveryV1().EndpointSlices(namespace).Create(ctx, s, metav1.CreateOptions{})
	return err
}

package main

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/bench/report"
)

const namespace = "bench"

type client struct{ *kubernetes.Clientset }

// create makes n objects, of which those that are there already are left as they are.
func create(ctx context.Context, n int, do func(int) error) error {
	return report.Each(ctx, 16, n, func(i int) error {
		if err := do(i); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	})
}

func (c client) fillServices(ctx context.Context, n int) error {
	_, err := c.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return create(ctx, n, func(i int) error {
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
	return create(ctx, n, func(i int) error {
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

package servicecidr

import (
	"context"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// An API server that doesn't serve ServiceCIDRs is asked again this often: it may be upgraded.
	discoveryPeriod = 5 * time.Minute
	// One that doesn't answer is asked again this often.
	discoveryRetry = time.Second
)

// WaitServed waits until the API server serves ServiceCIDRs and IPAddresses; false if ctx ends before. Kubernetes serves
// them from 1.33 on.
func WaitServed(ctx context.Context, client discovery.DiscoveryInterface, clock clock.Clock) bool {
	logged := false
	for ctx.Err() == nil {
		missing, err := notServed(client)
		switch {
		case err == nil && len(missing) == 0:
			return true
		case err == nil && !logged:
			logged = true
			klog.FromContext(ctx).Info("the API server doesn't serve what this controller is about, it does nothing",
				"controller", Name, "groupVersion", networkingv1.SchemeGroupVersion, "resources", strings.Join(missing, ","), "nextCheckIn", discoveryPeriod)
		}
		wait := discoveryPeriod
		if err != nil {
			wait = discoveryRetry
		}
		select {
		case <-ctx.Done():
		case <-clock.After(wait):
		}
	}
	return false
}

// notServed are the resources that the controller needs and the API server doesn't have.
func notServed(client discovery.DiscoveryInterface) ([]string, error) {
	missing := []string{"ipaddresses", "servicecidrs"}
	list, err := client.ServerResourcesForGroupVersion(networkingv1.SchemeGroupVersion.String())
	if apierrors.IsNotFound(err) {
		return missing, nil
	} else if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(missing, func(name string) bool {
		return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == name })
	}), nil
}

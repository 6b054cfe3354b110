// Package served waits for an API server to serve what a controller is about: an older Kubernetes may not yet.
package served

import (
	"context"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// An API server that doesn't serve them is asked again this often: it may be upgraded.
	discoveryPeriod = 5 * time.Minute
	// One that doesn't answer is asked again this often.
	discoveryRetry = time.Second
)

// Need is what a controller needs.
type Need struct {
	Controller string
	Version    schema.GroupVersion
	Resources  []string
}

// Wait waits until the API server serves what is needed; false if ctx ends before.
func Wait(ctx context.Context, client discovery.DiscoveryInterface, clock clock.Clock, need Need) bool {
	logged := false
	for ctx.Err() == nil {
		missing, err := notServed(client, need)
		switch {
		case err == nil && len(missing) == 0:
			return true
		case err == nil && !logged:
			logged = true
			klog.FromContext(ctx).Info("the API server doesn't serve what this controller is about, it does nothing",
				"controller", need.Controller, "groupVersion", need.Version, "resources", strings.Join(missing, ","), "nextCheckIn", discoveryPeriod)
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

// notServed are the resources that are needed and the API server doesn't have.
func notServed(client discovery.DiscoveryInterface, need Need) ([]string, error) {
	list, err := client.ServerResourcesForGroupVersion(need.Version.String())
	if apierrors.IsNotFound(err) {
		return need.Resources, nil
	} else if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(need.Resources), func(name string) bool {
		return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == name })
	}), nil
}

package controllers_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// addOwned makes a slice that Services own.
func (w *world) addOwned(name string, block bool, owners ...*corev1.Service) *discoveryv1.EndpointSlice {
	w.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelManagedBy: "test"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, o := range owners {
		ref := metav1.OwnerReference{APIVersion: "v1", Kind: "Service", Name: o.Name, UID: o.UID}
		if block {
			ref.BlockOwnerDeletion = &block
		}
		slice.OwnerReferences = append(slice.OwnerReferences, ref)
	}
	made, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).Create(w.ctx(), slice, metav1.CreateOptions{})
	w.must(err)
	return made
}

// owners says whose a slice is: "-" if it is gone.
func (w *world) owners(name string) string {
	slice, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).Get(w.ctx(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "-"
	} else if err != nil {
		return err.Error()
	}
	names := []string{}
	for _, ref := range slice.OwnerReferences {
		names = append(names, ref.Name)
	}
	return fmt.Sprint(names)
}

func (w *world) expectOwners(want map[string]string) {
	w.Helper()
	w.eventually(10*time.Second, func() string {
		for name, owners := range want {
			if got := w.owners(name); got != owners {
				return fmt.Sprintf("%s: owned by %s, want %s", name, got, owners)
			}
		}
		return ""
	})
}

func (w *world) deleteService(name string, policy metav1.DeletionPropagation) {
	w.Helper()
	w.must(w.client.CoreV1().Services(w.namespace).Delete(w.ctx(), name, metav1.DeleteOptions{PropagationPolicy: &policy}))
}

func (w *world) gone(name string) string {
	if _, err := w.client.CoreV1().Services(w.namespace).Get(w.ctx(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return fmt.Sprintf("Service %s is still there: %v", name, err)
	}
	return ""
}

func TestWhatIsOwnedFollowsItsOwners(t *testing.T) {
	w := newWorld(t)
	a, b, c := w.addService("a"), w.addService("b"), w.addService("c")
	w.addOwned("of-a", false, a)
	w.addOwned("of-both", false, a, b)
	w.addOwned("of-b", false, b)
	w.addOwned("of-c", true, c)
	w.run("garbage")
	// Made while nobody could know: its owner never was.
	w.addOwned("of-nobody", false, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "no-such-uid"}})
	w.expectOwners(map[string]string{"of-a": "[a]", "of-both": "[a b]", "of-b": "[b]", "of-nobody": "-"})

	w.deleteService("a", metav1.DeletePropagationBackground)
	w.expectOwners(map[string]string{"of-a": "-", "of-both": "[b]", "of-b": "[b]"})
	w.deleteService("b", metav1.DeletePropagationOrphan)
	w.expectOwners(map[string]string{"of-both": "[]", "of-b": "[]"})
	w.eventually(5*time.Second, func() string { return w.gone("b") })
	w.deleteService("c", metav1.DeletePropagationForeground)
	w.expectOwners(map[string]string{"of-c": "-"})
	w.eventually(5*time.Second, func() string { return w.gone("c") })
}

func TestForegroundWaitsForWhatBlocks(t *testing.T) {
	w := newWorld(t)
	a := w.addService("a")
	held := w.addOwned("held", true, a)
	held.Finalizers = []string{"example.com/wait"}
	held, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).Update(w.ctx(), held, metav1.UpdateOptions{})
	w.must(err)
	w.run("garbage")
	w.deleteService("a", metav1.DeletePropagationForeground)
	w.eventually(5*time.Second, func() string {
		if held, err = w.client.DiscoveryV1().EndpointSlices(w.namespace).Get(w.ctx(), "held", metav1.GetOptions{}); err != nil || held.DeletionTimestamp == nil {
			return fmt.Sprintf("the slice isn't being deleted: %v", err)
		}
		return ""
	})
	time.Sleep(300 * time.Millisecond)
	if w.gone("a") == "" {
		t.Error("the Service went before what it waits for")
	}
	held.Finalizers = nil
	_, err = w.client.DiscoveryV1().EndpointSlices(w.namespace).Update(w.ctx(), held, metav1.UpdateOptions{})
	w.must(err)
	w.eventually(5*time.Second, func() string { return w.gone("a") })
}

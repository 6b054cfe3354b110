package ensure

import (
	"context"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SliceWriter is what Slice needs of a client.
type SliceWriter interface {
	Create(context.Context, *discoveryv1.EndpointSlice, metav1.CreateOptions) (*discoveryv1.EndpointSlice, error)
	Update(context.Context, *discoveryv1.EndpointSlice, metav1.UpdateOptions) (*discoveryv1.EndpointSlice, error)
	Delete(context.Context, string, metav1.DeleteOptions) error
}

// Slice makes the EndpointSlice of a name what it should be, and says whether it wrote. current is the one that has the name, whatever
// its labels say: whoever looks for it by labels does not find one that lost them, and can't create it either. It is nil if there is none.
func Slice(ctx context.Context, client SliceWriter, current, want *discoveryv1.EndpointSlice) (wrote bool, err error) {
	switch {
	case current == nil:
	case current.AddressType != want.AddressType: // it can't be changed
		if err := client.Delete(ctx, current.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &current.UID}}); err != nil {
			return false, err
		}
	case sameSlice(current, want):
		return false, nil
	default:
		next := current.DeepCopy()
		next.Labels, next.Endpoints, next.Ports = want.Labels, want.Endpoints, want.Ports
		_, err = client.Update(ctx, next, metav1.UpdateOptions{})
		return true, err
	}
	_, err = client.Create(ctx, want, metav1.CreateOptions{})
	return true, err
}

// sameSlice allows no more labels than wanted: some hide a slice from proxies.
func sameSlice(a, b *discoveryv1.EndpointSlice) bool {
	return equality.Semantic.DeepEqual(a.Labels, b.Labels) && equality.Semantic.DeepEqual(a.Endpoints, b.Endpoints) && equality.Semantic.DeepEqual(a.Ports, b.Ports)
}

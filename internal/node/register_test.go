package node

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"portal/internal/node/image"
)

// TestDeletedNode: a Node that somebody deletes is made again with the Pod CIDRs that its Pods' addresses are of, unless another node has
// them by now.
func TestDeletedNode(t *testing.T) {
	for name, c := range map[string]struct{ ready, taken, want bool }{
		"new": {}, "deleted": {ready: true, want: true}, "deleted, and its addresses are another's": {ready: true, taken: true},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			client.PrependReactor("create", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
				if node := a.(clienttesting.CreateAction).GetObject().(*corev1.Node); c.taken && len(node.Spec.PodCIDRs) > 0 {
					return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), node.Name, errors.New("spec.podCIDRs: another node's"))
				}
				return false, nil, nil
			})
			a := &Agent{
				Options: Options{Client: client, Name: "node1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Log: slog.New(slog.DiscardHandler)},
				up:      make(chan struct{}), images: image.NewStore(image.Options{}), host: hostFacts{capacity: corev1.ResourceList{}},
				connections: &connections{cidrs: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}},
			}
			if c.ready {
				close(a.up)
			}
			var written time.Time
			if err := a.report(t.Context(), &written); err != nil {
				t.Fatal(err)
			}
			node, err := client.CoreV1().Nodes().Get(t.Context(), "node1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Equal(node.Spec.PodCIDRs, []string{"10.244.3.0/24"}); got != c.want {
				t.Errorf("spec.podCIDRs: %v", node.Spec.PodCIDRs)
			}
		})
	}
}

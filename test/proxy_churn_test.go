package test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/intent"
)

// churn changes Services all the time: they come, go, get other endpoints, other types.
type churn struct {
	*proxyLab
	pods []netip.Addr
	rand *rand.Rand
	stop chan struct{}
	wg   sync.WaitGroup

	changes int
	err     error
}

func churnName(i int) string { return fmt.Sprintf("churn-%03d", i) }

// churn creates n Services and changes one after the other, with a pause between.
func (l *proxyLab) churn(t *testing.T, pods []netip.Addr, n int, seed uint64, pause time.Duration) *churn {
	t.Helper()
	c := &churn{proxyLab: l, pods: pods, rand: rand.New(rand.NewPCG(seed, seed)), stop: make(chan struct{})}
	for i := range n {
		if err := c.make(context.Background(), churnName(i)); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c.wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-c.stop:
				return
			case <-time.After(pause):
			}
			if err := c.change(ctx, churnName(c.rand.IntN(n))); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) && ctx.Err() == nil {
				c.err = err
				return
			}
			c.changes++
		}
	})
	return c
}

// end ends the changes.
func (c *churn) end(t *testing.T) {
	t.Helper()
	close(c.stop)
	c.wg.Wait()
	if c.err != nil {
		t.Fatalf("changing Services: %v", c.err)
	}
	t.Logf("%d changes", c.changes)
}

func (c *churn) some() []netip.Addr {
	out := append([]netip.Addr{}, c.pods...)
	c.rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:c.rand.IntN(min(len(out), 6))]
}

func (c *churn) make(ctx context.Context, name string) error {
	s := labService(name, func(s *corev1.ServiceSpec) {
		if c.rand.IntN(4) == 0 {
			s.Type = corev1.ServiceTypeNodePort
		}
		if c.rand.IntN(4) == 0 {
			s.SessionAffinity = corev1.ServiceAffinityClientIP
		}
	})
	if _, err := c.client.CoreV1().Services(labNamespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
		return err
	}
	slice := labSlice(name, intent.IPv4, c.some(), c.LocalPods(intent.IPv4))
	_, err := c.client.DiscoveryV1().EndpointSlices(labNamespace).Create(ctx, slice, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = c.client.DiscoveryV1().EndpointSlices(labNamespace).Update(ctx, slice, metav1.UpdateOptions{})
	}
	return err
}

func (c *churn) change(ctx context.Context, name string) error {
	services, slices := c.client.CoreV1().Services(labNamespace), c.client.DiscoveryV1().EndpointSlices(labNamespace)
	switch dice := c.rand.IntN(10); {
	case dice < 6: // other endpoints
		_, err := slices.Update(ctx, labSlice(name, intent.IPv4, c.some(), c.LocalPods(intent.IPv4)), metav1.UpdateOptions{})
		return err
	case dice < 7: // it goes, sometimes for long and sometimes without its slice
		if c.rand.IntN(2) == 0 {
			if err := slices.Delete(ctx, name+"-4", metav1.DeleteOptions{}); err != nil {
				return err
			}
		}
		return services.Delete(ctx, name, metav1.DeleteOptions{})
	case dice < 9: // it comes
		return c.make(ctx, name)
	default: // clients stay, or no more
		s, err := services.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
			s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
		} else {
			s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		}
		_, err = services.Update(ctx, s, metav1.UpdateOptions{})
		return err
	}
}

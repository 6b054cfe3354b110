package served

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/utils/clock"
)

var need = Need{Controller: "servicecidr", Version: networkingv1.SchemeGroupVersion, Resources: []string{"ipaddresses", "servicecidrs"}}

// oldServer is an API server before Kubernetes 1.33 until it is upgraded.
type oldServer struct {
	discovery.DiscoveryInterface
	asked    atomic.Int32
	upgraded atomic.Bool
}

func (s *oldServer) ServerResourcesForGroupVersion(string) (*metav1.APIResourceList, error) {
	s.asked.Add(1)
	list := &metav1.APIResourceList{APIResources: []metav1.APIResource{{Name: "ingresses"}}}
	if s.upgraded.Load() {
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: "servicecidrs"}, metav1.APIResource{Name: "ipaddresses"})
	}
	return list, nil
}

func TestAServerWithoutServiceCIDRsIsAskedNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &oldServer{}
		served := make(chan bool, 1)
		go func() { served <- Wait(t.Context(), server, clock.RealClock{}, need) }()
		time.Sleep(time.Hour)
		if n := server.asked.Load(); n < 2 || n > 20 {
			t.Errorf("asked %d times in an hour", n)
		}
		server.upgraded.Store(true)
		begin := time.Now()
		if !<-served || time.Since(begin) > 10*time.Minute {
			t.Errorf("noticed %s after the upgrade", time.Since(begin))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if Wait(ctx, &oldServer{}, clock.RealClock{}, need) {
			t.Error("it says that they are served when it is stopped")
		}
	})
}

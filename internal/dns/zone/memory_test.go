package zone

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"portal/internal/intent"
)

// fill gives a cluster Services with a cluster IP and two endpoints each, and headless ones with a hundred.
func fill(c *intent.Cluster, services, headless int) {
	c.SetNamespace(&intent.Namespace{Name: "bench"})
	port, target := []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}}, []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: 8080}}
	slice := func(k intent.Key, ends []intent.Endpoint) {
		c.SetSlice(&intent.Slice{Key: intent.Key{Namespace: "bench", Name: k.Name + "-1"}, Service: k.Name, Family: intent.IPv4, Ports: target, Endpoints: ends})
	}
	for i := range services {
		k := intent.Key{Namespace: "bench", Name: fmt.Sprintf("svc-%05d", i)}
		c.SetService(&intent.Service{Key: k, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}, Ports: port})
		slice(k, []intent.Endpoint{
			{Addr: netip.AddrFrom4([4]byte{10, 128, byte(i >> 8), byte(i)}), Condition: intent.Ready},
			{Addr: netip.AddrFrom4([4]byte{10, 160, byte(i >> 8), byte(i)}), Condition: intent.Ready},
		})
	}
	for i := range headless {
		k := intent.Key{Namespace: "bench", Name: fmt.Sprintf("set-%05d", i)}
		c.SetService(&intent.Service{Key: k, Headless: true, Ports: port})
		var ends []intent.Endpoint
		for j := range 100 {
			ends = append(ends, intent.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 192 + byte(i>>8), byte(i), byte(j + 1)}), Hostname: fmt.Sprintf("pod-%d", j), Condition: intent.Ready})
		}
		slice(k, ends)
	}
}

func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// A cluster of 10,000 Services must fit beside others on a small node: what is known of it, and what
// the zones add, is bounded.
func TestMemory(t *testing.T) {
	for _, c := range []struct{ services, headless, each, stated, limit int }{
		{services: 10000, each: 10000, stated: 600, limit: 260},
		{headless: 300, each: 30000, stated: 60, limit: 64},
	} {
		before := heap()
		cluster := intent.NewPackedCluster()
		fill(cluster, c.services, c.headless)
		feed := cluster.Follow()
		changes := feed.Take()
		stated := heap() - before
		z, err := New(cluster, Options{Zones: []string{"cluster.local"}, TTL: 30, Pods: PodsInsecure})
		if err != nil {
			t.Fatal(err)
		}
		z.Update(changes)
		changes = nil
		taken := heap() - before - stated
		t.Logf("%d Services, %d headless: intent %d bytes each, zones %d", c.services, c.headless, stated/c.each, taken/c.each)
		if stated/c.each > c.stated {
			t.Errorf("intent takes %d bytes each, want at most %d", stated/c.each, c.stated)
		}
		if taken/c.each > c.limit {
			t.Errorf("the zones take %d bytes each, want at most %d", taken/c.each, c.limit)
		}
		runtime.KeepAlive(z)
		runtime.KeepAlive(feed)
	}
}

package main

import (
	"testing"

	"portal/internal/apiserver"
)

// How much garbage starts a collection follows the load and what collecting costs, and comes back.
func TestCollector(t *testing.T) {
	t.Setenv("GOGC", "100") // the test's own process stays as it is
	const large, small = 2 * costlyHeap, costlyHeap / 4
	for _, c := range []struct {
		name  string
		steps func(*collector)
		want  int
	}{
		{"at first", func(*collector) {}, garbageOfServer},
		{"costly", func(c *collector) { c.costs(0.6, large) }, garbageOfFlood},
		{"costly, and little in use", func(c *collector) { c.costs(0.6, small) }, garbageOfServer},
		{"much in use, and nothing to do", func(c *collector) { c.costs(0.01, large) }, garbageOfServer},
		{"costs less with more garbage, and would not with less", func(c *collector) { c.costs(0.6, large); c.costs(0.15, large) }, garbageOfFlood},
		{"the work is done", func(c *collector) { c.costs(0.6, large); c.costs(0.15, large); c.costs(0.01, large) }, garbageOfServer},
		{"what was in use is gone", func(c *collector) { c.costs(0.6, large); c.costs(0.6, small) }, garbageOfServer},
		{"many connections", func(c *collector) { c.loaded(apiserver.Load{Connections: manyConnections}); c.costs(0.6, large) }, garbageOfMany},
		{"half of them have gone", func(c *collector) {
			c.loaded(apiserver.Load{Connections: manyConnections})
			c.loaded(apiserver.Load{Connections: manyConnections / 2})
		}, garbageOfMany},
		{"most of them have gone", func(c *collector) {
			c.loaded(apiserver.Load{Connections: manyConnections})
			c.loaded(apiserver.Load{Connections: manyConnections/2 - 1})
		}, garbageOfServer},
		{"requests wait", func(c *collector) { c.loaded(apiserver.Load{Waiting: true}); c.costs(0, small) }, garbageOfFlood},
	} {
		t.Run(c.name, func(t *testing.T) {
			one := newCollector()
			if c.steps(one); one.now != c.want {
				t.Errorf("%d, not %d", one.now, c.want)
			}
		})
	}
}

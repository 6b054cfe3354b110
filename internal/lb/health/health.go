// Package health checks the endpoints of pools by connecting to them, and says in the pools which are healthy. It does not decide what
// follows from that.
package health

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"sync"
	"time"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
)

// Checker checks all pools that have checks.
type Checker struct {
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu     sync.Mutex
	checks map[key]*check
}

// key is an endpoint of a pool. Another Pod at its address has another name, and begins anew.
type key struct {
	pool    string
	address netip.AddrPort
	name    string
}

// Result is what checks found.
type Result struct {
	Healthy bool
	// Error is what the last check that failed said; empty if the last one did not fail.
	Error string
	// Checks are all, Failures those that failed.
	Checks, Failures uint64
}

// New makes a checker that checks nothing yet.
func New(log *slog.Logger) *Checker {
	c := &Checker{log: log, checks: map[key]*check{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends all checks.
func (c *Checker) Close() {
	c.cancel()
	c.tasks.Wait()
}

// Update makes these the pools to check, by name, with the configurations that they have now. What is known of endpoints that stay is
// kept, also if the way to check them changed.
func (c *Checker) Update(pools map[string]*balance.Pool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return
	}
	wanted := map[key]bool{}
	for name, pool := range pools {
		cfg := pool.Config()
		for i := range cfg.Endpoints {
			e := &cfg.Endpoints[i]
			k := key{name, e.Address, e.Name}
			was := c.checks[k]
			if cfg.HealthCheck == nil {
				if was != nil {
					was.stop() // first: it could find the endpoint unhealthy once more, and nobody would ever find otherwise
					delete(c.checks, k)
					pool.SetHealth(e.Address, true)
				}
				continue
			}
			wanted[k] = true
			t := target{check: *cfg.HealthCheck, address: e.Address}
			if t.check.Port == 0 || t.check.Port == e.Address.Port() {
				t.proxyProtocol = cfg.ProxyProtocol
			} else {
				t.address = netip.AddrPortFrom(e.Address.Addr(), t.check.Port)
			}
			if was != nil && was.pool == pool && reflect.DeepEqual(was.target, t) {
				continue
			}
			next := &check{checker: c, pool: pool, endpoint: e.Address, target: t, healthy: true}
			if was != nil {
				next.healthy, next.result = was.stop()
				pool.SetHealth(e.Address, next.healthy)
			}
			c.checks[k] = next
			next.start()
		}
	}
	for k, was := range c.checks {
		if !wanted[k] {
			was.stop()
			delete(c.checks, k)
		}
	}
}

// Unhealthy makes an endpoint count as unhealthy until its checks say something else: for what another process found out before. An
// endpoint without checks is left alone.
func (c *Checker) Unhealthy(pool string, address netip.AddrPort) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, ch := range c.checks {
		if k.pool == pool && k.address == address {
			ch.mu.Lock()
			ch.healthy, ch.row = false, 0
			ch.pool.SetHealth(address, false)
			ch.mu.Unlock()
		}
	}
}

// Results are by pool and endpoint.
func (c *Checker) Results() map[string]map[netip.AddrPort]Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]map[netip.AddrPort]Result{}
	for k, ch := range c.checks {
		if out[k.pool] == nil {
			out[k.pool] = map[netip.AddrPort]Result{}
		}
		ch.mu.Lock()
		r := ch.result
		r.Healthy = ch.healthy
		ch.mu.Unlock()
		out[k.pool][k.address] = r
	}
	return out
}

// check is that of one endpoint.
type check struct {
	checker  *Checker
	pool     *balance.Pool
	endpoint netip.AddrPort
	target   target
	cancel   context.CancelFunc
	ended    chan struct{}

	mu      sync.Mutex
	healthy bool
	row     int // results in a row that speak against what it counts as
	result  Result
}

func (c *check) start() {
	ctx, cancel := context.WithCancel(c.checker.ctx)
	c.cancel, c.ended = cancel, make(chan struct{})
	c.checker.tasks.Go(func() {
		defer close(c.ended)
		c.run(ctx)
	})
}

// stop ends the check, and returns what is known.
func (c *check) stop() (bool, Result) {
	c.cancel()
	<-c.ended
	return c.healthy, c.result
}

func (c *check) run(ctx context.Context) {
	interval := max(c.target.check.Interval, time.Millisecond)
	// Not all at the same time, nor all machines.
	timer := time.NewTimer(rand.N(interval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		begin := time.Now()
		err := c.target.probe(ctx)
		if ctx.Err() != nil {
			return
		}
		c.note(err)
		timer.Reset(max(interval-time.Since(begin), 0))
	}
}

// note counts a result, and changes what the endpoint counts as if there were enough in a row.
func (c *check) note(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.result.Checks++
	c.result.Error = ""
	if err != nil {
		c.result.Failures++
		c.result.Error = err.Error()
	}
	if (err == nil) == c.healthy {
		c.row = 0
		return
	}
	if err != nil && balance.ConnectResult(err) == balance.Abandoned {
		return // the check could not be made
	}
	c.row++
	threshold := c.target.check.Unhealthy
	if !c.healthy {
		threshold = c.target.check.Healthy
	}
	if c.row < threshold {
		return
	}
	c.row, c.healthy = 0, err == nil
	c.pool.SetHealth(c.endpoint, c.healthy)
	cfg := c.pool.Config()
	if c.healthy {
		c.checker.log.Info("endpoint is healthy again", "namespace", cfg.Owner.Namespace, "name", cfg.Owner.Name, "endpoint", c.endpoint)
	} else {
		c.checker.log.Warn("endpoint is unhealthy", "namespace", cfg.Owner.Namespace, "name", cfg.Owner.Name, "endpoint", c.endpoint, "check", c.target.String(), "err", err)
	}
}

// target is what is checked, and how.
type target struct {
	check         config.HealthCheck
	address       netip.AddrPort
	proxyProtocol int
}

package engine

import (
	"errors"
	"reflect"

	"portal/internal/lb/config"
)

// Follow has an engine that accepts nothing more learn of a configuration that another one carries out: connections end if their endpoints leave
// or their listener speaks another protocol, and have new idle and draining times. It chooses no endpoints any more, so it checks none.
func (e *Engine) Follow(c config.Config) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		return errors.New("the balancer accepts connections: it needs the configuration itself")
	}
	for name, p := range *e.pools.Load() {
		cfg := c.Pools[name]
		if cfg == nil {
			empty := *p.Config()
			empty.Endpoints = nil
			cfg = &empty
		}
		if !reflect.DeepEqual(p.Config(), cfg) {
			p.Update(cfg, c.Zone)
		}
	}
	for i := range c.Listeners {
		l := e.listeners[c.Listeners[i].Address]
		if l == nil {
			continue
		}
		if l.state.Load().generation.speaks != protocolsOf(&c.Listeners[i], *e.pools.Load()) {
			l.end(l.state.Load().generation, *e.pools.Load())
		}
		state := *l.state.Load()
		if state.idle = c.Listeners[i].IdleTimeout; state.idle <= 0 {
			state.idle = config.DefaultIdleTimeout
		}
		l.state.Store(&state)
	}
	e.checks.Update(nil)
	return nil
}

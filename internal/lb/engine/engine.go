// Package engine carries out a balancer's configuration: it accepts connections, ends TLS, reads and writes PROXY headers, chooses
// endpoints, and passes bytes in both directions. Requests are read by whoever is given as Options.Web. It knows nothing of Kubernetes,
// nor of how packets come to its listeners.
package engine

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
	"portal/internal/lb/health"
)

// Options are what an engine needs besides its configuration.
type Options struct {
	// Transparent binds addresses that no interface has. It needs CAP_NET_ADMIN, and rules that lead packets here.
	Transparent bool
	// Web serves connections of HTTP and HTTPS listeners. It calls ended once, when the connection is done: soon after that was closed or ctx is cancelled, in
	// which case a request that is under way is finished, and no other one is begun. It may return before. nil: such listeners are refused.
	Web func(ctx context.Context, c net.Conn, info *ConnInfo, ended func())
	// Record is called with each connection of a TCP or SSL listener that has ended. nil: nobody is interested.
	Record func(*Record)
	// Site makes of a listener's configuration what Web needs to serve it. It takes effect together with the configuration, and not at all if that
	// can't be carried out. nil: Web needs nothing.
	Site func(*config.Listener) any
	// Applied is called after a configuration has taken effect, with all listeners that accept. nil: nobody is interested.
	Applied func([]*config.Listener)
	// Inherited are listening sockets that another process gave away, by address. Those that the first configuration has no use for
	// are closed.
	Inherited map[netip.AddrPort]*os.File
	Log       *slog.Logger
}

// ConnInfo is what Web gets with a connection.
type ConnInfo struct {
	// Listener is its configuration as it is at present, and Site what Options.Site made of that. If the listener speaks another protocol now, they are the
	// last ones of the one before.
	Listener func() *config.Listener
	Site     func() any
	// Client and Local are the connection's ends, or what a trusted PROXY header says.
	Client, Local netip.AddrPort
	// Proxied says that they are from a PROXY header.
	Proxied bool
	// TLS is the client's, or nil.
	TLS *tls.ConnectionState
	// Pool is one of the configuration as it is at present, or nil.
	Pool func(name string) *balance.Pool
	// EndpointTLS is how to speak TLS to the pool's endpoints, without ALPN; it must be cloned before it is changed. nil: the pool's
	// protocol is not encrypted.
	EndpointTLS func(pool string) (*tls.Config, error)
}

// Engine carries out a configuration.
type Engine struct {
	options  Options
	log      *slog.Logger
	registry *prometheus.Registry
	checks   *health.Checker
	certs    certificates

	ctx    context.Context // ends when connections are to end soon
	cancel context.CancelFunc
	tasks  sync.WaitGroup // accepting and sweeping
	// waiting are goroutines that serve the first part of connections, or wait for the next one.
	waiting sync.WaitGroup
	conns   registry
	setups  setups
	loops   loops

	copied copyStats
	// acceptWarned is when it was logged last that connections can't be accepted, in ns.
	acceptWarned atomic.Int64
	pools        atomic.Pointer[map[string]*pool]

	mu        sync.Mutex // guards what follows; Apply holds it
	listeners map[netip.AddrPort]*listener
	errors    map[string]error // by listener name, or "pool NAME"
	inherited map[netip.AddrPort]*os.File
	zone      string
	sweeping  bool
	closed    bool
}

// pool is a pool and how its endpoints are spoken to.
type pool struct {
	*balance.Pool
	name string
	dial atomic.Pointer[dialing]
}

// dialing is how endpoints are spoken to; err says why they can't be.
type dialing struct {
	tls *tls.Config
	err error
}

// New makes an engine that does nothing yet.
func New(o Options) *Engine {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	e := &Engine{
		options: o, log: o.Log, listeners: map[netip.AddrPort]*listener{}, errors: map[string]error{}, inherited: maps.Clone(o.Inherited),
		registry: prometheus.NewRegistry(), checks: health.New(o.Log), setups: setups{work: make(chan func())},
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.pools.Store(&map[string]*pool{})
	e.registry.MustRegister(collector{e})
	return e
}

// Registry has the engine's metrics.
func (e *Engine) Registry() *prometheus.Registry { return e.registry }

// ErrClosed is returned by Apply after Drain or Close.
var ErrClosed = errors.New("the balancer is stopping")

// ApplyError says what of a configuration could not be carried out. The rest is.
type ApplyError struct {
	// Parts are by the name of a listener, or "pool NAME".
	Parts map[string]error
}

func (e *ApplyError) Error() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(e.Parts)) {
		out = append(out, name+": "+e.Parts[name].Error())
	}
	return strings.Join(out, "; ")
}

// Apply makes a configuration the one in force. Listeners that can't be carried out keep what they did before, if they did anything, and
// are in the ApplyError. Open connections stay: those to endpoints that are gone, and those
// of listeners that speak other protocols now, for the pool's draining time. The configuration is the
// engine's from then on: nobody may change it.
func (e *Engine) Apply(c config.Config) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	if !e.sweeping {
		e.sweeping = true
		e.tasks.Go(e.sweep)
	}
	e.errors = map[string]error{}
	// Pools that are new are there before the first route leads to them, and the old ones until the last one has gone.
	old := *e.pools.Load()
	pools := e.applyPools(c, old)
	both := maps.Clone(old)
	maps.Copy(both, pools)
	e.pools.Store(&both)
	e.certs.load(c.Certificates)
	e.applyListeners(c, pools)
	e.pools.Store(&pools)
	dropPools(old, pools, c.Zone)
	e.zone = c.Zone
	if e.options.Applied != nil {
		var all []*config.Listener
		for _, l := range e.listeners {
			all = append(all, l.state.Load().cfg)
		}
		e.options.Applied(all)
	}
	if len(e.errors) > 0 {
		return &ApplyError{Parts: maps.Clone(e.errors)}
	}
	return nil
}

// applyPools returns the pools of a configuration: those that were there before with their state.
func (e *Engine) applyPools(c config.Config, old map[string]*pool) map[string]*pool {
	pools := make(map[string]*pool, len(c.Pools))
	checked := map[string]*balance.Pool{}
	for name, cfg := range c.Pools {
		if cfg == nil {
			e.errors["pool "+name] = errors.New("it is null")
			continue
		}
		p := old[name]
		switch {
		case p == nil:
			p = &pool{Pool: balance.New(cfg, c.Zone, time.Now), name: name}
			p.dial.Store(newDialing(cfg))
		case e.zone != c.Zone || !reflect.DeepEqual(p.Config(), cfg):
			if was := p.Config(); was.Protocol != cfg.Protocol || !reflect.DeepEqual(was.TLS, cfg.TLS) {
				p.dial.Store(newDialing(cfg))
			}
			p.Update(cfg, c.Zone)
		}
		if err := p.dial.Load().err; err != nil {
			e.errors["pool "+name] = err
		}
		pools[name] = p
		checked[name] = p.Pool
	}
	e.checks.Update(checked)
	return pools
}

// dropPools has connections to the endpoints of pools that are gone end in their time.
func dropPools(old, pools map[string]*pool, zone string) {
	for name, p := range old {
		if pools[name] == nil {
			empty := *p.Config()
			empty.Endpoints = nil
			p.Update(&empty, zone)
		}
	}
}

// applyListeners starts, changes and stops listeners.
func (e *Engine) applyListeners(c config.Config, pools map[string]*pool) {
	wanted := map[netip.AddrPort]bool{}
	for i := range c.Listeners {
		cfg := &c.Listeners[i]
		if wanted[cfg.Address] {
			e.errors[cfg.Name] = fmt.Errorf("address %v: another listener has it already", cfg.Address)
			continue
		}
		wanted[cfg.Address] = true
		if err := e.applyListener(cfg, pools); err != nil {
			e.errors[cfg.Name] = err
		}
	}
	for address, l := range e.listeners {
		if !wanted[address] {
			l.stop()
			delete(e.listeners, address)
		}
	}
	for address, f := range e.inherited {
		_ = f.Close()
		delete(e.inherited, address)
	}
}

func (e *Engine) applyListener(cfg *config.Listener, pools map[string]*pool) error {
	if err := e.check(cfg, pools); err != nil {
		return err
	}
	l := e.listeners[cfg.Address]
	if l != nil {
		state, err := e.newState(l.state.Load(), cfg)
		if err == nil {
			l.set(state, pools)
		}
		return err
	}
	state, err := e.newState(nil, cfg)
	if err != nil {
		return err
	}
	socket, err := e.listen(cfg.Address)
	if err != nil {
		return err
	}
	l = newListener(e, socket, state, pools)
	e.listeners[cfg.Address] = l
	e.tasks.Go(l.accept)
	return nil
}

// check says what is wrong with a listener, naming the field.
func (e *Engine) check(cfg *config.Listener, pools map[string]*pool) error {
	if !cfg.Address.IsValid() || cfg.Address.Port() == 0 {
		return fmt.Errorf("address %q: an address and a port are needed", cfg.Address)
	}
	switch cfg.Protocol {
	case config.TCP, config.SSL:
		if pools[cfg.Pool] == nil {
			return fmt.Errorf("pool %q: there is none of this name", cfg.Pool)
		}
		if p := pools[cfg.Pool].Config().Protocol; p.Parsed() {
			return fmt.Errorf("pool %q: its protocol is %q, and bytes are passed to tcp or ssl only", cfg.Pool, p)
		}
		if v := pools[cfg.Pool].Config().ProxyProtocol; v < 0 || v > 2 {
			return fmt.Errorf("pool %q: proxyProtocol %d is not 0, 1 or 2", cfg.Pool, v)
		}
	case config.HTTP, config.HTTPS:
		if e.options.Web == nil {
			return fmt.Errorf("protocol %q: this process reads no requests", cfg.Protocol)
		}
	default:
		return fmt.Errorf("protocol %q: not one of tcp, ssl, http, https", cfg.Protocol)
	}
	if cfg.Protocol.Encrypted() && (cfg.TLS == nil || len(cfg.TLS.Certificates) == 0) {
		return fmt.Errorf("tls.certificates: protocol %q needs one", cfg.Protocol)
	}
	return nil
}

// Pool is one of the configuration, or nil.
func (e *Engine) Pool(name string) *balance.Pool {
	if p := (*e.pools.Load())[name]; p != nil {
		return p.Pool
	}
	return nil
}

// Sockets are copies of the listening sockets, to give to another process. The caller closes them.
func (e *Engine) Sockets() (map[netip.AddrPort]*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[netip.AddrPort]*os.File{}
	for address, l := range e.listeners {
		f, err := l.socket.File()
		if err != nil {
			for _, f := range out {
				_ = f.Close()
			}
			return nil, err
		}
		out[address] = f
	}
	return out, nil
}

// StopAccepting closes the listeners; their connections go on. Nothing can be applied any more.
func (e *Engine) StopAccepting() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	for _, l := range e.listeners {
		l.closeSocket()
	}
}

// Drain stops accepting, and waits for connections to end; those that are left when ctx is done are closed.
func (e *Engine) Drain(ctx context.Context) {
	e.mu.Lock()
	e.closed = true
	for _, l := range e.listeners {
		l.stop()
	}
	e.mu.Unlock()
	for e.conns.count.Load() > 0 && ctx.Err() == nil {
		select {
		case <-e.conns.changed():
		case <-ctx.Done():
		}
	}
	e.Close()
}

// Connections is how many are open.
func (e *Engine) Connections() int { return int(e.conns.count.Load()) }

// Close ends everything at once.
func (e *Engine) Close() {
	e.StopAccepting()
	e.cancel()
	e.mu.Lock()
	for _, l := range e.listeners {
		l.stop()
	}
	for address, f := range e.inherited {
		_ = f.Close()
		delete(e.inherited, address)
	}
	e.mu.Unlock()
	e.tasks.Wait()
	e.conns.closeAll()
	e.loops.close()
	e.waiting.Wait()
	e.checks.Close()
}

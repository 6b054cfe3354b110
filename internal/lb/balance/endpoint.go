package balance

import (
	"cmp"
	"net/netip"
	"sync/atomic"
	"time"

	"portal/internal/lb/config"
)

// Endpoint is one member of a pool, and what is known of it.
type Endpoint struct {
	// Address never changes.
	Address netip.AddrPort
	// Counters are for metrics; those who carry bytes add to them.
	Counters Counters

	info      atomic.Pointer[config.Endpoint]
	hash      uint64
	active    atomic.Int64
	open      atomic.Int64
	failures  atomic.Int64 // in a row
	left      atomic.Int64 // when it left the pool, in ns; 0: it is a member
	unhealthy atomic.Bool
	ejected   atomic.Bool
	usable    atomic.Bool

	// Guarded by the pool's mu.
	since        time.Time // when it became new or healthy; zero: at the pool's begin
	ejectedUntil time.Time
	ejections    int  // in a row
	marked       bool // while the table is built: it is healthy and not ejected

	current float64 // smooth round robin; guarded by the pool's smooth
}

// Counters of an endpoint only grow.
type Counters struct {
	// Begun are connections or requests that were given to it.
	Begun, ConnectFailures, Failures, Ejections atomic.Uint64
	// BytesIn came from clients, BytesOut went to them.
	BytesIn, BytesOut atomic.Uint64
}

// identity is what makes an endpoint the same one: another Pod may get its address.
type identity struct {
	address netip.AddrPort
	name    string
}

func (e *Endpoint) identity() identity { return identity{e.Address, e.info.Load().Name} }

// Config is the endpoint's part of the pool's configuration.
func (e *Endpoint) Config() *config.Endpoint { return e.info.Load() }

// Active are the connections or requests under way.
func (e *Endpoint) Active() int64 { return e.active.Load() }

// Healthy is what checks found last.
func (e *Endpoint) Healthy() bool { return !e.unhealthy.Load() }

// Ejected says whether it is out for failures in use.
func (e *Endpoint) Ejected() bool { return e.ejected.Load() }

// Usable says whether it is chosen at present.
func (e *Endpoint) Usable() bool { return e.LeftAt().IsZero() && e.usable.Load() }

// LeftAt is when the endpoint left its pool. It is zero while the endpoint is a member, and again if it comes back.
func (e *Endpoint) LeftAt() time.Time {
	if at := e.left.Load(); at != 0 {
		return time.Unix(0, at)
	}
	return time.Time{}
}

// Open counts a connection to the endpoint that outlives a request, unless there are already as many as limit; 0: no limit. Close
// takes it back. Connections that are not parsed need neither: Pick counts them.
func (e *Endpoint) Open(limit int) bool {
	if e.open.Add(1) > int64(limit) && limit > 0 {
		e.open.Add(-1)
		return false
	}
	return true
}

// Close is the end of a connection that Open counted.
func (e *Endpoint) Close() { e.open.Add(-1) }

// OpenConnections are those that Open counted.
func (e *Endpoint) OpenConnections() int64 { return e.open.Load() }

// acquire counts one use, unless there are as many as limit.
func (e *Endpoint) acquire(limit int64) bool {
	if e.active.Add(1) > limit && limit > 0 {
		e.active.Add(-1)
		return false
	}
	e.Counters.Begun.Add(1)
	return true
}

func compareEndpoints(a, b *Endpoint) int {
	return cmp.Or(cmp.Compare(a.info.Load().Name, b.info.Load().Name), a.Address.Compare(b.Address))
}

// The hashes must be the same on every machine and in every process.
const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

func hashAddress(a netip.AddrPort) uint64 {
	h := hashAddr(a.Addr())
	h = (h ^ uint64(a.Port()>>8)) * fnvPrime
	return mix((h ^ uint64(a.Port()&0xff)) * fnvPrime)
}

func hashAddr(a netip.Addr) uint64 {
	h := uint64(fnvOffset)
	for _, b := range a.As16() {
		h = (h ^ uint64(b)) * fnvPrime
	}
	return mix(h)
}

func hashString(s string) uint64 {
	h := uint64(fnvOffset)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * fnvPrime
	}
	return mix(h)
}

// mix spreads the bits of a hash: FNV's high ones depend little on the last bytes.
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

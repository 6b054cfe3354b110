package server

import (
	"container/list"
	"net/netip"
	"sync"
)

// waitlist bounds how many queries wait for upstreams. When it is full, a new query takes the place of the oldest one of the client
// that has the most: names that nobody answers can't keep others from being resolved, and a client that floods only
// displaces its own queries.
type waitlist struct {
	mu      sync.Mutex
	max     int
	total   int
	clients map[netip.Addr]*list.List // of *waiter, the oldest first
}

type waiter struct {
	client netip.Addr
	evict  func()
	at     *list.Element // nil: not in the list any more
}

func newWaitlist(size int) *waitlist {
	return &waitlist{max: size, clients: map[netip.Addr]*list.List{}}
}

// enter adds a query. If another has to go for it, its evict is called; enter reports that.
func (w *waitlist) enter(from netip.Addr, evict func()) (self *waiter, evicted bool) {
	self = &waiter{client: clientOf(from), evict: evict}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.total >= w.max {
		victim := w.busiest(self.client).Front().Value.(*waiter)
		w.remove(victim)
		victim.evict()
		evicted = true
	}
	own := w.clients[self.client]
	if own == nil {
		own = list.New()
		w.clients[self.client] = own
	}
	self.at = own.PushBack(self)
	w.total++
	return self, evicted
}

func (w *waitlist) leave(self *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.remove(self)
}

func (w *waitlist) remove(self *waiter) {
	if self.at == nil {
		return
	}
	own := w.clients[self.client]
	own.Remove(self.at)
	self.at = nil
	if w.total--; own.Len() == 0 {
		delete(w.clients, self.client)
	}
}

// busiest returns the queries of the client that has the most, or of the one given if it has more than its share.
func (w *waitlist) busiest(client netip.Addr) *list.List {
	most := w.clients[client]
	if most != nil && most.Len() > w.total/len(w.clients) {
		return most
	}
	for _, l := range w.clients {
		if most == nil || l.Len() > most.Len() {
			most = l
		}
	}
	return most
}

// clientOf is what counts as one client: an IPv4 address, or an IPv6 network of 64 bits.
func clientOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	p, _ := a.WithZone("").Prefix(64)
	return p.Addr()
}

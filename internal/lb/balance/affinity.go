package balance

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// affinityShards is how many locks the clients share.
	affinityShards = 16
	// affinityMost bounds the clients of one shard: a flood of addresses must not take all memory.
	affinityMost = 1 << 16
)

// affinity remembers clients' endpoints.
type affinity [affinityShards]struct {
	sync.Mutex
	clients map[netip.Addr]assignment
	sweep   int // how many clients there are when expired ones are removed next
}

type assignment struct {
	endpoint *Endpoint
	last     time.Time
}

// get is the client's endpoint, if it came within the time. That counts from now again.
func (a *affinity) get(client netip.Addr, now time.Time, lasts time.Duration) *Endpoint {
	s := &a[hashAddr(client)%affinityShards]
	s.Lock()
	defer s.Unlock()
	b, ok := s.clients[client]
	if !ok || now.Sub(b.last) >= lasts {
		return nil
	}
	b.last = now
	s.clients[client] = b
	return b.endpoint
}

func (a *affinity) set(client netip.Addr, e *Endpoint, now time.Time, lasts time.Duration) {
	s := &a[hashAddr(client)%affinityShards]
	s.Lock()
	defer s.Unlock()
	if s.clients == nil {
		s.clients, s.sweep = map[netip.Addr]assignment{}, 1024
	}
	s.clients[client] = assignment{e, now}
	if len(s.clients) < s.sweep {
		return
	}
	for c, b := range s.clients {
		if now.Sub(b.last) >= lasts {
			delete(s.clients, c)
		}
	}
	for c := range s.clients {
		if len(s.clients) <= affinityMost {
			break
		}
		if c != client {
			delete(s.clients, c)
		}
	}
	s.sweep = min(max(1024, 2*len(s.clients)), affinityMost+1024)
}

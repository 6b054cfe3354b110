package server

import (
	"hash/maphash"
	"net/netip"
	"sync/atomic"
	"time"

	"portal/internal/dns/wire"
)

// limiter bounds how many identical responses go to a network, so that forging source addresses gains little. Its memory is
// fixed; networks with the same hash share a bucket.
type limiter struct {
	rate    uint64 // responses a second
	seed    maphash.Seed
	slip    atomic.Uint32
	buckets []atomic.Uint64 // milliseconds of the last response in the upper half, tokens/1000 in the lower
	start   time.Time
}

type limitVerdict uint8

const (
	limitPass limitVerdict = iota
	limitDrop
	limitTruncate
)

func newLimiter(rate int) *limiter {
	if rate <= 0 {
		return nil
	}
	return &limiter{rate: uint64(rate), seed: maphash.MakeSeed(), buckets: make([]atomic.Uint64, 1<<14), start: time.Now().Add(-time.Hour)}
}

// check takes a token from the bucket of the client's network and the kind of response: all denials are of one kind.
func (l *limiter) check(from netip.Addr, q *wire.Query, out []byte, now time.Time) limitVerdict {
	key := [24]byte{}
	if from.Is4() {
		a := from.As4()
		copy(key[:3], a[:3])
	} else {
		a := from.As16()
		copy(key[:7], a[:7])
	}
	rcode := out[3] & 15
	key[16] = rcode
	h := maphash.Bytes(l.seed, key[:])
	if rcode == wire.NoError {
		h ^= maphash.Bytes(l.seed, q.Name()) + uint64(q.QType)
	}
	b := &l.buckets[h%uint64(len(l.buckets))]
	ms := uint32(now.Sub(l.start).Milliseconds()) // starts over after 50 days
	for {
		old := b.Load()
		elapsed := ms - uint32(old>>32)
		if -elapsed < 1<<16 {
			elapsed = 0 // another goroutine has stored a later time
		}
		tokens := min(old&0xFFFFFFFF+uint64(elapsed)*l.rate, l.rate*1000)
		if old == 0 {
			tokens = l.rate * 1000
		}
		allowed := tokens >= 1000
		if allowed {
			tokens -= 1000
		}
		if !b.CompareAndSwap(old, uint64(ms)<<32|tokens) {
			continue
		}
		switch {
		case allowed:
			return limitPass
		case l.slip.Add(1)%2 == 0:
			return limitTruncate
		}
		return limitDrop
	}
}

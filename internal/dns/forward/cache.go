package forward

import (
	"encoding/binary"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/dns/wire"
)

const shards = 64

// entry is a response as it was given, with what is needed to give it again.
type entry struct {
	msg    []byte   // without OPT
	ttls   []uint16 // where its TTLs are
	life   uint32   // seconds
	stored time.Time
	denial bool
	hits   atomic.Uint32
	asked  atomic.Bool // a fresh one is on its way
}

func (e *entry) expires() time.Time { return e.stored.Add(time.Duration(e.life) * time.Second) }

// cache holds responses by question. Its size is bounded in entries and in bytes.
type cache struct {
	seed     maphash.Seed
	shards   [shards]shard
	entries  int // in each shard
	bytes    int
	evicted  atomic.Uint64
	stale    time.Duration
	prefetch bool
}

type shard struct {
	sync.RWMutex
	m     map[string]*entry
	bytes int
	_     [32]byte // shards are used by different threads
}

func newCache(entries, bytes int, stale time.Duration) *cache {
	c := &cache{seed: maphash.MakeSeed(), entries: max(1, entries/shards), bytes: max(64<<10, bytes/shards), stale: stale, prefetch: true}
	for i := range c.shards {
		c.shards[i].m = map[string]*entry{}
	}
	return c
}

// key is the question in the form that entries are filed under.
func key(b []byte, q *wire.Query) []byte {
	flags := byte(0)
	if q.DO {
		flags |= 1
	}
	if q.Flags&0x10 != 0 { // CD
		flags |= 2
	}
	return append(append(b, q.Name()...), byte(q.QType>>8), byte(q.QType), flags)
}

func (c *cache) shard(k []byte) *shard { return &c.shards[maphash.Bytes(c.seed, k)%shards] }

func (c *cache) get(k []byte) *entry {
	s := c.shard(k)
	s.RLock()
	e := s.m[string(k)]
	s.RUnlock()
	return e
}

func (c *cache) put(k string, e *entry) {
	s := c.shard([]byte(k))
	s.Lock()
	defer s.Unlock()
	if old := s.m[k]; old != nil {
		s.bytes -= size(k, old)
	}
	s.m[k] = e
	s.bytes += size(k, e)
	for len(s.m) > c.entries || s.bytes > c.bytes && len(s.m) > 1 {
		c.evict(s, k)
	}
}

func size(k string, e *entry) int { return 200 + len(k) + len(e.msg) + 2*len(e.ttls) }

// evict removes the one of a few, picked as the map gives them, that is nearest to its end.
func (c *cache) evict(s *shard, keep string) {
	var victim string
	var ends time.Time
	n := 0
	for k, e := range s.m {
		if k == keep {
			continue
		}
		if victim == "" || e.expires().Before(ends) {
			victim, ends = k, e.expires()
		}
		if n++; n == 8 {
			break
		}
	}
	s.bytes -= size(victim, s.m[victim])
	delete(s.m, victim)
	c.evicted.Add(1)
}

// count returns the number of positive and negative entries.
func (c *cache) count() (success, denial int) {
	for i := range c.shards {
		s := &c.shards[i]
		s.RLock()
		for _, e := range s.m {
			if e.denial {
				denial++
			} else {
				success++
			}
		}
		s.RUnlock()
	}
	return success, denial
}

// newEntry makes an entry of an upstream's response; nil for one that must not be kept.
func newEntry(msg []byte, now time.Time, o *Options) *entry {
	rcode := msg[3] & 15
	if msg[2]&2 != 0 || rcode != wire.NoError && rcode != wire.NXDomain {
		return nil
	}
	e := &entry{stored: now}
	an, ns, ar := count16(msg, 6), count16(msg, 8), count16(msg, 10)
	at := wire.SkipName(msg, wire.HeaderLen) + 4
	life := ^uint32(0)
	negative := uint32(0)
	end := at
	for i := range an + ns + ar {
		fixed := wire.SkipName(msg, end)
		if fixed < 0 || fixed+10 > len(msg) {
			return nil
		}
		typ, ttl := count16(msg, fixed), binary.BigEndian.Uint32(msg[fixed+4:])
		length := count16(msg, fixed+8)
		next := fixed + 10 + length
		if next > len(msg) {
			return nil
		}
		if typ == wire.TypeOPT {
			if next != len(msg) || i != an+ns+ar-1 {
				return nil // in an unusual place: rare enough to be asked for each time
			}
			msg = msg[:end]
			ar--
			break
		}
		e.ttls = append(e.ttls, uint16(fixed+4))
		life = min(life, ttl)
		if typ == wire.TypeSOA && i >= an && i < an+ns && length >= 4 {
			negative = min(ttl, binary.BigEndian.Uint32(msg[next-4:]))
		}
		end = next
	}
	e.denial = rcode == wire.NXDomain || an == 0
	limit := uint32(o.MaxTTL / time.Second)
	if e.denial {
		life, limit = min(life, negative), uint32(o.MaxNegativeTTL/time.Second)
	}
	e.life = min(max(life, uint32(o.MinTTL/time.Second)), limit)
	if life == ^uint32(0) || life == 0 && o.MinTTL == 0 {
		return nil // nothing says how long it holds
	}
	e.msg = append([]byte(nil), msg...)
	binary.BigEndian.PutUint16(e.msg[10:], uint16(ar))
	return e
}

func count16(b []byte, at int) int { return int(binary.BigEndian.Uint16(b[at:])) }

// write gives an entry again, as the answer to a question: its case, its ID, the time that is left.
func (e *entry) write(dst []byte, q *wire.Query, limit int, now time.Time) []byte {
	opt := 0
	if q.EDNS {
		opt = wire.OPTLen
	}
	if len(e.msg)+opt > limit {
		dst = q.Begin(dst)
		ar := 0
		if q.EDNS {
			dst, ar = q.AppendOPT(dst, 0, wire.Advertised), 1
		}
		q.Header(dst, e.msg[3]&15, false, true, true, 1, 0, 0, ar)
		return dst
	}
	dst = append(dst[:0], e.msg...)
	copy(dst[wire.HeaderLen:], q.Asked())
	age := uint32(max(0, now.Sub(e.stored)/time.Second))
	for _, at := range e.ttls {
		left := min(binary.BigEndian.Uint32(dst[at:]), max(e.life, 1))
		if left > age {
			left -= age
		} else {
			left = staleTTL
		}
		binary.BigEndian.PutUint32(dst[at:], left)
	}
	ar := count16(dst, 10)
	if q.EDNS {
		dst = q.AppendOPT(dst, 0, wire.Advertised)
		ar++
	}
	q.Header(dst, e.msg[3]&15, false, true, false, 1, count16(dst, 6), count16(dst, 8), ar)
	return dst
}

// staleTTL is how long a client may keep what has outlived its own time.
const staleTTL = 5

package forward

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
)

const shards = 64

// entry is an upstream's response, prepared for repeated use.
type entry struct {
	msg       []byte   // without OPT
	ttls      []uint16 // where its TTLs are, unless they stay as they came
	life      uint32   // seconds; the TTL of all records
	stored    time.Time
	denial    bool
	truncated bool // the upstream's TC bit
	cacheable bool
	hits      atomic.Uint32
	asked     atomic.Bool // a refresh is under way
}

func (e *entry) expires() time.Time { return e.stored.Add(time.Duration(e.life) * time.Second) }

// cache holds responses by question. Its size is bounded in entries and in bytes.
type cache struct {
	seed    maphash.Seed
	shards  [shards]shard
	entries int // in each shard
	bytes   int
	evicted atomic.Uint64
}

type shard struct {
	sync.RWMutex
	m     map[string]*entry
	bytes int
	_     [32]byte // shards are used by different threads
}

func newCache(entries, bytes int) *cache {
	c := &cache{seed: maphash.MakeSeed(), entries: max(1, entries/shards), bytes: max(64<<10, bytes/shards)}
	for i := range c.shards {
		c.shards[i].m = map[string]*entry{}
	}
	return c
}

// key is what a query's entry is stored under.
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

// evict removes, of a few entries in the map's random order, the one that expires first.
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

// newEntry prepares a response. It is packed anew: without OPT, and with names as pointers to the question, so that they
// take on the case in which each client asks.
func newEntry(m *dns.Msg, now time.Time, o *Options) (*entry, error) {
	m.Extra = slices.DeleteFunc(m.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
	m.Compress = true
	if m.Rcode > 15 {
		m.Rcode = dns.RcodeServerFailure // an extended code has no place without its OPT
	}
	msg, err := m.Pack()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	e := &entry{msg: msg, stored: now, life: 1, truncated: m.Truncated}
	if o.Entries == 0 || e.truncated || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		return e, nil
	}
	life, denial, known := lifetime(m)
	least, most := o.MinTTL, o.MaxTTL
	if denial {
		least, most = o.MinNegativeTTL, o.MaxNegativeTTL
	}
	e.denial = denial
	life = min(max(life, uint32(least/time.Second)), uint32(most/time.Second))
	if !known || life == 0 {
		return e, nil
	}
	e.life, e.ttls, e.cacheable = life, ttlOffsets(msg), true
	return e, nil
}

// lifetime is how long a response is valid: the least TTL of its records, and of a denial no longer than its SOA record says (RFC 2308);
// without one, that is not known. A denial may come after the CNAMEs that lead to the name.
func lifetime(m *dns.Msg) (seconds uint32, denial, known bool) {
	seconds = ^uint32(0)
	for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, rr := range section {
			ttl := rr.Header().Ttl
			if ttl > 1<<31-1 {
				ttl = 0 // RFC 2181
			}
			seconds, known = min(seconds, ttl), true
		}
	}
	var soa *dns.SOA
	for _, rr := range m.Ns {
		if s, ok := rr.(*dns.SOA); ok {
			soa = s
		}
	}
	onlyAliases := !slices.ContainsFunc(m.Answer, func(rr dns.RR) bool {
		t := rr.Header().Rrtype
		return t == m.Question[0].Qtype || m.Question[0].Qtype == dns.TypeANY || t != dns.TypeCNAME && t != dns.TypeDNAME && t != dns.TypeRRSIG
	})
	denial = m.Rcode == dns.RcodeNameError || len(m.Answer) == 0 || onlyAliases && soa != nil
	if denial && soa != nil {
		seconds = min(seconds, soa.Minttl)
	}
	return seconds, denial, known && (!denial || soa != nil)
}

// ttlOffsets returns where the TTLs of a packed message are.
func ttlOffsets(msg []byte) (out []uint16) {
	at := wire.SkipName(msg, wire.HeaderLen) + 4
	for range count16(msg, 6) + count16(msg, 8) + count16(msg, 10) {
		at = wire.SkipName(msg, at)
		out = append(out, uint16(at+4))
		at += 10 + count16(msg, at+8)
	}
	return out
}

func count16(b []byte, at int) int { return int(binary.BigEndian.Uint16(b[at:])) }

// write writes an entry as the response to a query: with its ID and case, and the time that it remains valid as TTLs.
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
	left := uint32(staleTTL)
	if age := uint32(max(0, now.Sub(e.stored)/time.Second)); age < e.life {
		left = e.life - age
	}
	for _, at := range e.ttls {
		binary.BigEndian.PutUint32(dst[at:], left)
	}
	ar := count16(dst, 10)
	if q.EDNS {
		dst = q.AppendOPT(dst, 0, wire.Advertised)
		ar++
	}
	q.Header(dst, e.msg[3]&15, false, true, e.truncated, 1, count16(dst, 6), count16(dst, 8), ar)
	return dst
}

// staleTTL is the TTL, in seconds, of records served after they expired.
const staleTTL = 5

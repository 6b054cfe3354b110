package forward

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/dns/wire"
)

// Transport is how an upstream is spoken to.
type Transport uint8

const (
	UDP Transport = iota // with TCP for answers that do not fit
	TCP
	TLS
)

func (t Transport) String() string { return [...]string{"udp", "tcp", "tls"}[t] }

// Upstream is a server to ask.
type Upstream struct {
	Addr       netip.AddrPort
	Transport  Transport
	ServerName string // that a TLS certificate must carry; empty: the address
	RootCAs    *tls.Config
}

func (u Upstream) String() string {
	if u.Transport == UDP {
		return u.Addr.String()
	}
	return u.Transport.String() + "://" + u.Addr.String()
}

// ParseUpstream reads [udp|tcp|tls://]address[:port][#name], or a file in the form of resolv.conf, whose servers it
// returns.
func ParseUpstream(s string) ([]Upstream, error) {
	if strings.HasPrefix(s, "/") {
		return readResolvConf(s)
	}
	u := Upstream{}
	rest, port := s, uint16(53)
	for prefix, t := range map[string]Transport{"udp://": UDP, "dns://": UDP, "tcp://": TCP, "tls://": TLS} {
		if strings.HasPrefix(s, prefix) {
			u.Transport, rest = t, s[len(prefix):]
		}
	}
	if u.Transport == TLS {
		port = 853
	}
	rest, u.ServerName, _ = strings.Cut(rest, "#")
	if ap, err := netip.ParseAddrPort(rest); err == nil {
		u.Addr = ap
		return []Upstream{u}, nil
	}
	a, err := netip.ParseAddr(strings.Trim(rest, "[]"))
	if err != nil {
		return nil, fmt.Errorf("%q is no upstream: want [udp|tcp|tls://]ADDRESS[:PORT][#NAME], or a file like /etc/resolv.conf", s)
	}
	u.Addr = netip.AddrPortFrom(a, port)
	return []Upstream{u}, nil
}

func readResolvConf(path string) ([]Upstream, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out []Upstream
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil {
			out = append(out, Upstream{Addr: netip.AddrPortFrom(a, 53)})
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s names no server", path)
	}
	return out, nil
}

// upstream is a server with what is known of its health.
type upstream struct {
	Upstream
	fails   atomic.Int32
	probing atomic.Bool

	mu   sync.Mutex
	idle []net.Conn // TCP and TLS
}

const (
	maxFails = 2
	maxIdle  = 8
	attempt  = 2 * time.Second
)

func (u *upstream) healthy() bool { return u.fails.Load() < maxFails }

// healthy says whether any upstream is.
func (f *Forwarder) healthy() bool {
	for _, u := range f.upstreams {
		if u.healthy() {
			return true
		}
	}
	return false
}

// ask asks one upstream after the other, beginning with the healthy, until one answers.
func (f *Forwarder) ask(question []byte, do, cd bool) ([]byte, error) {
	ctx, cancel := context.WithTimeout(f.ctx, f.o.Timeout)
	defer cancel()
	n := len(f.upstreams)
	first := int(f.turn.Add(1))
	last := errors.New("no upstream")
	var refusal []byte
	for _, healthy := range []bool{true, false} {
		for i := range n {
			u := f.upstreams[(first+i)%n]
			if u.healthy() != healthy {
				continue
			}
			msg, err := f.exchange(ctx, u, question, do, cd)
			if err == nil {
				// A server that cannot or will not answer leaves the question to the others.
				if rcode := msg[3] & 15; rcode != wire.ServFail && rcode != wire.Refused {
					return msg, nil
				}
				refusal = msg
				continue
			}
			last = fmt.Errorf("%s: %w", u, err)
			if ctx.Err() != nil {
				break
			}
		}
	}
	if refusal != nil {
		return refusal, nil
	}
	return nil, last
}

func (f *Forwarder) exchange(ctx context.Context, u *upstream, question []byte, do, cd bool) ([]byte, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	query := newQuery(question, do, cd)
	msg, err := u.exchange(ctx, query)
	if err != nil {
		u.fails.Add(1)
		f.failures.WithLabelValues("forward", u.String()).Inc()
		return nil, err
	}
	u.fails.Store(0)
	rcode := "other"
	if r := int(msg[3] & 15); r < len(rcodeNames) {
		rcode = rcodeNames[r]
	}
	f.duration.WithLabelValues("forward", u.String(), rcode).Observe(time.Since(began).Seconds())
	return msg, nil
}

// newQuery makes a query of a question: with an ID that cannot be guessed.
func newQuery(question []byte, do, cd bool) []byte {
	q := make([]byte, len(question), len(question)+wire.OPTLen)
	copy(q, question)
	rand.Read(q[:2])
	binary.BigEndian.PutUint16(q[2:], 1<<8)
	if cd {
		q[3] |= 0x10
	}
	copy(q[4:], []byte{0, 1, 0, 0, 0, 0, 0, 1})
	flags := byte(0)
	if do {
		flags = 0x80
	}
	return append(q, 0, 0, wire.TypeOPT, wire.Advertised>>8, wire.Advertised&0xFF, 0, 0, flags, 0, 0, 0)
}

// answers says whether a message is the answer to a question: same ID, same question.
func answers(msg, query []byte) bool {
	if len(msg) < wire.HeaderLen || msg[2]&0x80 == 0 || msg[0] != query[0] || msg[1] != query[1] || count16(msg, 4) != 1 {
		return false
	}
	end := wire.SkipName(query, wire.HeaderLen) + 4
	if len(msg) < end {
		return false
	}
	for i := wire.HeaderLen; i < end; i++ {
		a, b := msg[i], query[i]
		if a != b && (a|0x20 != b|0x20 || a|0x20 < 'a' || a|0x20 > 'z') {
			return false
		}
	}
	return true
}

func (u *upstream) exchange(ctx context.Context, query []byte) ([]byte, error) {
	if u.Transport != UDP {
		return u.exchangeStream(ctx, query)
	}
	msg, err := u.exchangeUDP(ctx, query)
	if err == nil && msg[2]&2 != 0 {
		if whole, err := u.exchangeStream(ctx, query); err == nil {
			return whole, nil
		}
	}
	return msg, err
}

// exchangeUDP uses a socket of its own: a port that nobody can guess is half of what keeps forged answers out.
func (u *upstream) exchangeUDP(ctx context.Context, query []byte) ([]byte, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", u.Addr.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	c.SetDeadline(deadline)
	if _, err := c.Write(query); err != nil {
		return nil, err
	}
	buf := udpBuffers.Get().(*[4096]byte)
	defer udpBuffers.Put(buf)
	for {
		n, err := c.Read(buf[:])
		if err != nil {
			return nil, err
		}
		if answers(buf[:n], query) {
			return slices.Clone(buf[:n]), nil
		}
	}
}

var udpBuffers = sync.Pool{New: func() any { return new([4096]byte) }}

func (u *upstream) exchangeStream(ctx context.Context, query []byte) ([]byte, error) {
	if c := u.takeIdle(); c != nil {
		if msg, err := u.converse(ctx, c, query); err == nil {
			return msg, nil // else the server had closed it: again with a new one
		}
	}
	c, err := u.dial(ctx)
	if err != nil {
		return nil, err
	}
	return u.converse(ctx, c, query)
}

func (u *upstream) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	if u.Transport != TLS {
		return d.DialContext(ctx, "tcp", u.Addr.String())
	}
	config := &tls.Config{}
	if u.RootCAs != nil {
		config = u.RootCAs.Clone()
	}
	config.ServerName = u.ServerName
	if config.ServerName == "" {
		config.ServerName = u.Addr.Addr().String()
	}
	return (&tls.Dialer{NetDialer: &d, Config: config}).DialContext(ctx, "tcp", u.Addr.String())
}

func (u *upstream) converse(ctx context.Context, c net.Conn, query []byte) ([]byte, error) {
	deadline, _ := ctx.Deadline()
	c.SetDeadline(deadline)
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	msg, err := func() ([]byte, error) {
		if _, err := c.Write(framed); err != nil {
			return nil, err
		}
		var head [2]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return nil, err
		}
		msg := make([]byte, binary.BigEndian.Uint16(head[:]))
		if _, err := io.ReadFull(c, msg); err != nil {
			return nil, err
		}
		if !answers(msg, query) {
			return nil, errors.New("the answer is to another question")
		}
		return msg, nil
	}()
	if err != nil {
		c.Close()
		return nil, err
	}
	u.putIdle(c)
	return msg, nil
}

func (u *upstream) takeIdle() net.Conn {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n := len(u.idle); n > 0 {
		c := u.idle[n-1]
		u.idle = u.idle[:n-1]
		return c
	}
	return nil
}

func (u *upstream) putIdle(c net.Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.idle) >= maxIdle {
		c.Close()
		return
	}
	u.idle = append(u.idle, c)
}

func (u *upstream) closeIdle() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, c := range u.idle {
		c.Close()
	}
	u.idle = nil
}

// probe asks failed upstreams for the root's servers, to see whether they are back.
func (f *Forwarder) probe() {
	sick := 0
	for _, u := range f.upstreams {
		if u.healthy() {
			continue
		}
		sick++
		if !u.probing.CompareAndSwap(false, true) {
			continue
		}
		f.running.Go(func() {
			defer u.probing.Store(false)
			ctx, cancel := context.WithTimeout(f.ctx, attempt)
			defer cancel()
			question := append(make([]byte, wire.HeaderLen), 0, 0, wire.TypeNS, 0, wire.ClassIN)
			if _, err := u.exchange(ctx, newQuery(question, false, false)); err == nil {
				u.fails.Store(0)
			}
		})
	}
	if sick > 0 && sick == len(f.upstreams) {
		f.broken.Inc()
	}
}

package forward

import (
	"bytes"
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
	"syscall"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
	"portal/internal/shortage"
)

// Transport is the protocol of an upstream.
type Transport uint8

const (
	UDP Transport = iota // with TCP for responses that do not fit
	TCP
	TLS
)

func (t Transport) String() string { return [...]string{"udp", "tcp", "tls"}[t] }

// Upstream is a server to forward queries to.
type Upstream struct {
	Addr       netip.AddrPort
	Transport  Transport
	ServerName string // that the TLS certificate must be for; empty: the address
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

// SearchPath reads the search path of a file like resolv.conf: what its last line about that says.
func SearchPath(path string) (out []string) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil // as for resolvers: a file that is missing is empty
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 0 && (f[0] == "search" || f[0] == "domain") {
			out = slices.DeleteFunc(f[1:], func(name string) bool {
				packed, err := wire.PackName(name)
				return err != nil || packed == "\x00"
			})
		}
	}
	return out
}

// upstream is a server and its state.
type upstream struct {
	Upstream
	// fails counts failed health checks in a row. A query that fails starts the checks and does not count itself: a server that
	// cannot resolve one name is not down.
	fails    atomic.Int32
	checking atomic.Bool
	// foldsCase: the server does not repeat the case of names, so it can't be verified.
	foldsCase atomic.Bool
	// returns: what it is asked comes back to this server.
	returns atomic.Bool

	mu   sync.Mutex
	idle []idleConn // TCP and TLS, the one used last at the end
}

const (
	maxFails      = 2
	attempt       = 2 * time.Second
	resendAfter   = 700 * time.Millisecond // over UDP, once: datagrams get lost
	checkTimeout  = time.Second
	checkInterval = 500 * time.Millisecond
	// shortageInterval is how often a query is tried for which there is no descriptor.
	shortageInterval = 50 * time.Millisecond
)

var (
	errMalformed    = errors.New("malformed response")
	errAllUnhealthy = errors.New("all upstreams are unhealthy")
)

func (u *upstream) healthy() bool { return u.fails.Load() < maxFails && !u.returns.Load() }

// healthy reports whether any upstream is.
func (f *Forwarder) healthy() bool {
	return slices.ContainsFunc(f.upstreams, (*upstream).healthy)
}

// candidates are the upstreams to try, in order: the healthy ones, or all if none is, but for those that lead back here.
func (f *Forwarder) candidates() (list []*upstream, healthy bool) {
	first := 0
	if !f.o.Sequential {
		first = int(f.turn.Add(1))
	}
	var all []*upstream
	for i := range f.upstreams {
		u := f.upstreams[(first+i)%len(f.upstreams)]
		if !u.returns.Load() {
			all = append(all, u)
		}
		if u.healthy() {
			list = append(list, u)
		}
	}
	if len(list) == 0 {
		return all, false
	}
	return list, true
}

// ask queries one upstream after the other until one gives a usable response.
func (f *Forwarder) ask(ctx context.Context, question []byte, do, cd bool) (*dns.Msg, error) {
	list, healthy := f.candidates()
	if len(list) == 0 {
		return nil, errLoop
	}
	if !healthy {
		f.metrics.broken.Inc()
		// The health checks notice a server that is back; until then only a few queries wait for one.
		select {
		case f.lastTries <- struct{}{}:
			defer func() { <-f.lastTries }()
		default:
			return nil, errAllUnhealthy
		}
	}
	var failed []error
	var refusal *dns.Msg
	for _, u := range list {
		m, err := f.exchange(ctx, u, question, do, cd)
		for shortage.Is(err) && ctx.Err() == nil { // others need descriptors, too: there will be one soon, or too late
			select {
			case <-ctx.Done():
			case <-time.After(shortageInterval):
				m, err = f.exchange(ctx, u, question, do, cd)
			}
		}
		switch {
		case ctx.Err() != nil && err != nil:
			return nil, fmt.Errorf("%s: %w", u, err)
		case err != nil:
			failed = append(failed, fmt.Errorf("%s: %w", u, err))
		case m.Rcode == dns.RcodeServerFailure || m.Rcode == dns.RcodeRefused:
			refusal = m // another one may know
		default:
			return m, nil
		}
	}
	if refusal != nil {
		return refusal, nil
	}
	return nil, errors.Join(failed...)
}

// exchange sends a query to one upstream and parses its response.
func (f *Forwarder) exchange(ctx context.Context, u *upstream, question []byte, do, cd bool) (*dns.Msg, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	msg, err := u.exchange(ctx, newQuery(question, do, cd, u.Transport == UDP && !u.foldsCase.Load()))
	if err != nil {
		// That nobody waits any more, or that there is no descriptor, is not the server's fault.
		if !errors.Is(ctx.Err(), context.Canceled) && !shortage.Is(err) {
			f.check(u)
		}
		return nil, err
	}
	m, err := parse(msg)
	if err != nil {
		return nil, err
	}
	rcode := "other"
	if m.Rcode < len(rcodeNames) {
		rcode = rcodeNames[m.Rcode]
	}
	f.metrics.duration.WithLabelValues("forward", u.String(), rcode).Observe(time.Since(began).Seconds())
	return m, nil
}

// parse unpacks a response. The library accepts a message that ends before all records that the header counts; this does not.
func parse(msg []byte) (*dns.Msg, error) {
	m := new(dns.Msg)
	if err := m.Unpack(msg); err != nil {
		return nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	if m.Opcode != dns.OpcodeQuery || len(m.Answer) != count16(msg, 6) || len(m.Ns) != count16(msg, 8) || len(m.Extra) != count16(msg, 10) {
		return nil, fmt.Errorf("%w: not the records that its header counts", errMalformed)
	}
	return m, nil
}

// newQuery makes a query with an ID that can't be guessed, and if mixed with random upper and lower case (draft-vixie-dnsext-dns0x20):
// a forged response must match both.
func newQuery(question []byte, do, cd, mixed bool) []byte {
	q := make([]byte, len(question), len(question)+wire.OPTLen)
	copy(q, question)
	var random [2 + (wire.MaxName+7)/8]byte
	rand.Read(random[:])
	copy(q, random[:2])
	if mixed {
		for at := wire.HeaderLen; q[at] != 0; at += 1 + int(q[at]) {
			for i := at + 1; i <= at+int(q[at]); i++ {
				if bit := i - wire.HeaderLen; q[i] >= 'a' && q[i] <= 'z' && random[2+bit/8]>>(bit%8)&1 != 0 {
					q[i] -= 'a' - 'A'
				}
			}
		}
	}
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

// answers reports whether a message is the response to a query, with the same ID and question, and whether it repeats the
// case of the name.
func answers(msg, query []byte) (ok, sameCase bool) {
	end := wire.SkipName(query, wire.HeaderLen) + 4
	if len(msg) < end || msg[2]&0x80 == 0 || msg[0] != query[0] || msg[1] != query[1] || count16(msg, 4) != 1 {
		return false, false
	}
	got, want := msg[wire.HeaderLen:end], query[wire.HeaderLen:end]
	name := len(want) - 4
	return bytes.EqualFold(got[:name], want[:name]) && bytes.Equal(got[name:], want[name:]), bytes.Equal(got, want)
}

// exchange sends a query and returns the response as it came.
func (u *upstream) exchange(ctx context.Context, query []byte) ([]byte, error) {
	if u.Transport != UDP {
		return u.exchangeStream(ctx, query)
	}
	msg, verified, err := u.exchangeUDP(ctx, query)
	if err != nil || verified && msg[2]&2 == 0 {
		return msg, err
	}
	// Cut off, or with another case than the query: TCP settles both.
	whole, err := u.exchangeStream(ctx, query)
	if err != nil {
		whole = msg // what there is, with its TC bit
	}
	if !verified {
		_, same := answers(whole, query)
		u.foldsCase.Store(!same)
	}
	return whole, nil
}

// exchangeUDP uses a new socket each time: an unpredictable port helps to keep forged responses out. A response that does not
// fit the buffer is marked as truncated.
func (u *upstream) exchangeUDP(ctx context.Context, query []byte) (msg []byte, sameCase bool, err error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(u.Addr))
	if err != nil {
		return nil, false, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := c.Write(query); err != nil {
		return nil, false, err
	}
	again := time.AfterFunc(resendAfter, func() { _, _ = c.Write(query) })
	defer again.Stop()
	buf := udpBuffers.Get().(*[4096]byte)
	defer udpBuffers.Put(buf)
	for {
		n, _, flags, _, err := c.ReadMsgUDPAddrPort(buf[:], nil)
		if err != nil {
			return nil, false, err
		}
		ok, same := answers(buf[:n], query)
		if !ok {
			continue
		}
		if flags&syscall.MSG_TRUNC != 0 {
			buf[2] |= 2
		}
		return slices.Clone(buf[:n]), same, nil
	}
}

var udpBuffers = sync.Pool{New: func() any { return new([4096]byte) }}

func (u *upstream) exchangeStream(ctx context.Context, query []byte) ([]byte, error) {
	if c := u.takeIdle(); c != nil {
		part, cancel := halfway(ctx)
		msg, err := u.converse(part, c, query)
		cancel()
		if err == nil {
			return msg, nil
		}
		// The server has closed it, or a firewall on the way has forgotten it: a new one has the other half of the time.
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
	c.SetDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
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
		if ok, _ := answers(msg, query); !ok {
			return nil, fmt.Errorf("%w: it is for another query", errMalformed)
		}
		return msg, nil
	}()
	if !stop() || err != nil {
		c.Close()
	} else {
		u.putIdle(c)
	}
	return msg, err
}

// check runs health checks of an upstream until it passes one: it is asked for the root's name servers, and any response
// will do.
func (f *Forwarder) check(u *upstream) {
	if !u.checking.CompareAndSwap(false, true) {
		return
	}
	f.running.Go(func() {
		defer u.checking.Store(false)
		question := append(make([]byte, wire.HeaderLen), 0, 0, wire.TypeNS, 0, wire.ClassIN)
		for f.ctx.Err() == nil {
			ctx, cancel := context.WithTimeout(f.ctx, checkTimeout)
			_, err := u.exchange(ctx, newQuery(question, false, false, false))
			cancel()
			if err == nil {
				u.fails.Store(0)
				return
			}
			if !shortage.Is(err) {
				u.fails.Add(1)
				f.metrics.failures.WithLabelValues("forward", u.String()).Inc()
			}
			select {
			case <-f.ctx.Done():
			case <-time.After(checkInterval):
			}
		}
	})
}

package top

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Meter counts connections by Service and endpoint. It is for one goroutine.
type Meter struct {
	plan  *plan.Snapshot
	local map[netip.Addr]bool
	rows  map[rowKey]*row
	// known remembers where flows belong until Services change.
	known map[flowKey]*row
	// oneIn is how many events each stands for.
	oneIn uint64
	// unanswered are connections whose time until the answer is being taken, by the kernel's name for them.
	unanswered map[uint32]unanswered
}

// unanswered is when a connection began, and where it belongs.
type unanswered struct {
	row *row
	at  uint64
}

// rowKey is a port of a Service and one of its endpoints; without one, whoever answers is none.
type rowKey struct {
	service  intent.Key
	port     string
	protocol intent.Protocol
	endpoint netip.AddrPort
}

type flowKey struct {
	to, from netip.AddrPort
	protocol intent.Protocol
}

// row are the counts of a rowKey since the meter was made. closed are the bytes of connections that have ended, live those of the others
// when they were last looked at.
type row struct {
	rowKey
	begun, resets, closed, live uint64
	open                        int
	bytes                       uint64 // never less than before
	latency                     Latency
}

// NewMeter returns a meter that knows no Service yet.
func NewMeter() *Meter {
	facts := &plan.Facts{Families: []intent.Family{intent.IPv4, intent.IPv6}}
	return &Meter{plan: plan.NewSnapshot(facts), rows: map[rowKey]*row{}, known: map[flowKey]*row{}, oneIn: 1, unanswered: map[uint32]unanswered{}}
}

// Set takes over what is known of a Service; nil: it is gone. What was counted stays.
func (m *Meter) Set(k intent.Key, e *intent.Entry) {
	m.plan.Set(k, plan.For(e, m.plan.Facts))
	clear(m.known)
}

// SetLocal says which addresses are the machine's own, at which node ports are.
func (m *Meter) SetLocal(addrs []netip.Addr) {
	m.local = map[netip.Addr]bool{}
	for _, a := range addrs {
		m.local[a] = true
	}
	clear(m.known)
}

// maxKnown bounds the memory for flows that are remembered: those that are no Service's are many.
const maxKnown = 1 << 16

// row finds where a connection belongs; nil: to no Service.
func (m *Meter) row(e *Entry) *row {
	k := flowKey{e.To, e.From, e.Protocol}
	if r, ok := m.known[k]; ok {
		return r
	}
	if len(m.known) >= maxKnown {
		clear(m.known)
	}
	r := m.find(e)
	m.known[k] = r
	return r
}

func (m *Meter) find(e *Entry) *row {
	to := e.To.Addr().Unmap()
	key := plan.FrontendKey{Addr: to, Family: intent.FamilyOf(to), Protocol: e.Protocol, Port: e.To.Port()}
	f := m.plan.Frontends[key]
	if f == nil {
		if !m.local[to] && !to.IsLoopback() {
			return nil
		}
		key.Addr = netip.Addr{}
		if f = m.plan.Frontends[key]; f == nil {
			return nil
		}
	}
	k := rowKey{f.ID.Service, f.ID.Port, f.ID.Protocol, netip.AddrPortFrom(e.From.Addr().Unmap(), e.From.Port())}
	// Whoever rejected or relayed it is no endpoint. One that is gone by now was one: it is not the machine itself, nor the frontend.
	if !f.LeadsTo(k.endpoint) && (k.endpoint == e.To || m.local[k.endpoint.Addr()]) {
		k.endpoint = netip.AddrPort{}
	}
	r := m.rows[k]
	if r == nil {
		r = &row{rowKey: k}
		m.rows[k] = r
	}
	return r
}

// maxUnanswered bounds the memory for connections that nobody has answered: those to nowhere stay so.
const maxUnanswered = 1 << 14

// event counts what begins, is answered or ends.
func (m *Meter) event(e *Entry, what Happened) {
	if what == Changed {
		m.answered(e)
		return
	}
	r := m.row(e)
	if r == nil {
		return
	}
	if what == Begun {
		r.begun += m.oneIn
		if e.At != 0 && !e.Answered {
			if len(m.unanswered) >= maxUnanswered {
				clear(m.unanswered)
			}
			m.unanswered[e.ID] = unanswered{r, e.At}
		}
		return
	}
	delete(m.unanswered, e.ID)
	r.closed += e.Bytes * m.oneIn
	if e.Reset() {
		r.resets += m.oneIn
	}
}

// answered takes the time until the first answer. A refusal is none.
func (m *Meter) answered(e *Entry) {
	from, waits := m.unanswered[e.ID]
	if !waits || !e.Answered {
		return
	}
	delete(m.unanswered, e.ID)
	if e.At >= from.at && !e.Reset() {
		from.row.latency.note(time.Duration(e.At - from.at))
	}
}

// dump replaces what is known of connections that are there. Those that end while it goes on are counted when their event is read.
func (m *Meter) dump(read func(func(*Entry)) error) error {
	for _, r := range m.rows {
		r.open, r.live = 0, 0
	}
	err := read(func(e *Entry) {
		if r := m.row(e); r != nil {
			r.live += e.Bytes
			if e.Open() {
				r.open++
			}
		}
	})
	for _, r := range m.rows {
		r.bytes = max(r.bytes, r.closed+r.live)
	}
	return err
}

// counts are the rows, those of a Service together.
func (m *Meter) counts() (out []row) {
	for _, r := range m.rows {
		out = append(out, *r)
	}
	slices.SortFunc(out, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.service.Namespace, b.service.Namespace), cmp.Compare(a.service.Name, b.service.Name),
			cmp.Compare(a.port, b.port), cmp.Compare(a.protocol, b.protocol), a.endpoint.Compare(b.endpoint))
	})
	return out
}

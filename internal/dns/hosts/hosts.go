// Package hosts answers for names and addresses from a hosts file, as CoreDNS' hosts plugin does.
package hosts

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"portal/internal/dns/wire"
)

// Options configure Hosts.
type Options struct {
	File      string   // empty: none
	Inline    []string // lines of a hosts file
	Zones     []string // for which it answers
	TTL       uint32
	NoReverse bool
	Reload    time.Duration // how often the file is read; 0: once
	Log       *slog.Logger
}

// Hosts is a table of names, which follows its file.
type Hosts struct {
	o     Options
	zones []string // wire form
	table atomic.Pointer[table]

	// Of load alone.
	seen    [sha256.Size]byte // what the file said last
	failure string            // why it can't be read
}

type table struct {
	addrs map[string][]netip.Addr // by name in wire form
	names map[netip.Addr][]string
}

// New reads the table. A file that does not exist yet is no error: it is read when it does.
func New(o Options) (*Hosts, error) {
	h := &Hosts{o: o}
	for _, z := range o.Zones {
		w, err := wire.PackName(z)
		if err != nil {
			return nil, err
		}
		h.zones = append(h.zones, w)
	}
	h.load()
	return h, nil
}

// Run reads the file again when it changes, until the context ends.
func (h *Hosts) Run(ctx context.Context) {
	if h.o.File == "" || h.o.Reload <= 0 {
		return
	}
	tick := time.NewTicker(h.o.Reload)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.load()
		}
	}
}

// load reads the file, and makes a table if it says something else than last time: times and sizes of files don't tell all changes. If it
// can't be read, what was read last stays.
func (h *Hosts) load() {
	var text []byte
	if h.o.File != "" {
		var err error
		text, err = os.ReadFile(h.o.File)
		h.note(err)
		if err != nil && h.table.Load() != nil {
			return
		}
	}
	sum := sha256.Sum256(text)
	if sum == h.seen && h.table.Load() != nil {
		return
	}
	h.seen = sum
	t := &table{addrs: map[string][]netip.Addr{}, names: map[netip.Addr][]string{}}
	t.read(strings.Join(h.o.Inline, "\n"))
	t.read(string(text))
	h.table.Store(t)
}

// note logs that the file can't be read, once for each reason, and that it can be again.
func (h *Hosts) note(err error) {
	failure := ""
	if err != nil {
		failure = err.Error()
	}
	if h.o.Log != nil && failure != h.failure {
		if err != nil {
			h.o.Log.Warn("hosts file not read, keeping what was read last", "file", h.o.File, "err", err)
		} else {
			h.o.Log.Info("hosts file read again", "file", h.o.File)
		}
	}
	h.failure = failure
}

func (t *table) read(text string) {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		a, err := netip.ParseAddr(fields[0])
		if err != nil {
			continue
		}
		a = a.WithZone("").Unmap()
		for _, name := range fields[1:] {
			w, err := wire.PackName(name)
			if err != nil || w == "\x00" {
				continue
			}
			if !slices.Contains(t.addrs[w], a) {
				t.addrs[w] = append(t.addrs[w], a)
			}
			if !slices.Contains(t.names[a], w) {
				t.names[a] = append(t.names[a], w)
			}
		}
	}
}

// Zone returns the length, in wire form, of the longest of its zones that a name is in; 0 for none.
func (h *Hosts) Zone(q *wire.Query) (n int) {
	for _, z := range h.zones {
		if len(z) > n && q.In(z) {
			n = len(z)
		}
	}
	return n
}

// Answer writes the response to a query into dst; false if the table does not have the name.
func (h *Hosts) Answer(dst []byte, q *wire.Query, limit int, recursive bool) ([]byte, bool) {
	t := h.table.Load()
	addrs := t.addrs[string(q.Name())]
	var names []string
	if len(addrs) == 0 && q.QType == wire.TypePTR && !h.o.NoReverse {
		if a, ok := q.ReverseAddr(); ok {
			names = t.names[a]
		}
	}
	if len(addrs)+len(names) == 0 {
		return dst, false
	}
	w := writer{dst: q.Begin(dst), room: limit, ttl: h.o.TTL}
	if q.EDNS {
		w.room -= wire.OPTLen
	}
	for _, a := range addrs {
		if q.QType == wire.TypeA && a.Is4() || q.QType == wire.TypeAAAA && a.Is6() {
			w.add(q.QType, a.AsSlice())
		}
	}
	for _, n := range names {
		w.add(wire.TypePTR, []byte(n))
	}
	ar := 0
	if q.EDNS {
		w.dst, ar = q.AppendOPT(w.dst, 0, wire.Advertised), 1
	}
	q.Header(w.dst, wire.NoError, true, recursive, w.cut, 1, w.count, 0, ar)
	return w.dst, true
}

type writer struct {
	dst   []byte
	room  int
	ttl   uint32
	count int
	cut   bool
}

func (w *writer) add(typ uint16, data []byte) {
	if w.cut = w.cut || len(w.dst)+12+len(data) > w.room; w.cut {
		return
	}
	w.dst = append(w.dst, 0xC0, wire.HeaderLen, byte(typ>>8), byte(typ), 0, wire.ClassIN)
	w.dst = binary.BigEndian.AppendUint32(w.dst, w.ttl)
	w.dst = append(binary.BigEndian.AppendUint16(w.dst, uint16(len(data))), data...)
	w.count++
}

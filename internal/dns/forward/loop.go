package forward

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"time"

	"portal/internal/dns/wire"
)

// typeHINFO is what probes ask for: hardly anybody else does.
const typeHINFO = 13

// loopInterval is how often an upstream is probed again that has not answered, or from which queries came back.
const loopInterval = time.Minute

var errLoop = errors.New("queries to all upstreams come back to this server")

// FindLoops asks each upstream for a name that nobody else knows. An upstream from which that query comes back to this server is asked
// nothing else until it no longer does.
func (f *Forwarder) FindLoops(ctx context.Context) {
	left := f.upstreams
	for {
		var again []*upstream
		for _, u := range left {
			if !f.probe(ctx, u) {
				again = append(again, u)
			}
		}
		if left = again; len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(loopInterval):
		}
	}
}

// probe reports whether an upstream has answered a query that did not come back.
func (f *Forwarder) probe(ctx context.Context, u *upstream) bool {
	zone, err := wire.PackName(f.o.Zone)
	var random [16]byte
	rand.Read(random[:])
	name := "\x10" + hex.EncodeToString(random[:8]) + "\x10" + hex.EncodeToString(random[8:]) + zone
	if err != nil || len(name) > wire.MaxName {
		return true // its zone has no room for one
	}
	f.mu.Lock()
	if f.probes == nil {
		f.probes = map[string]*upstream{}
	}
	f.probes[name] = u
	f.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	question := append(make([]byte, wire.HeaderLen), name...)
	question = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(question, typeHINFO), wire.ClassIN)
	_, err = u.exchange(ctx, newQuery(question, false, false, u.Transport == UDP && !u.foldsCase.Load()))
	f.mu.Lock()
	defer f.mu.Unlock()
	_, away := f.probes[name]
	delete(f.probes, name)
	if away && err == nil {
		u.returns.Store(false)
	}
	return away && err == nil
}

// CameBack reports whether a query that this server got is one that it has sent to an upstream to find that out; which, and whether that is
// news.
func (f *Forwarder) CameBack(q *wire.Query) (upstream string, news, ok bool) {
	if q.QType != typeHINFO {
		return "", false, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	u := f.probes[string(q.Name())]
	if u == nil {
		return "", false, false
	}
	delete(f.probes, string(q.Name()))
	return u.String(), !u.returns.Swap(true), true
}

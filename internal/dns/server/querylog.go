package server

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"time"

	"portal/internal/dns/wire"
)

// queryLog writes a line for each response.
type queryLog struct {
	mu sync.Mutex
	w  *bufio.Writer
}

func newQueryLog(w io.Writer) *queryLog {
	if w == nil {
		return nil
	}
	return &queryLog{w: bufio.NewWriterSize(w, 64<<10)}
}

func (l *queryLog) write(q *wire.Query, out []byte, from netip.Addr, p proto) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rcode := ""
	if len(out) > 3 {
		rcode = rcodeName(int(out[3] & 15))
	}
	typ := fmt.Sprintf("TYPE%d", q.QType)
	if q.QType < 256 && int(typeIndex[q.QType]) < typeOther {
		typ = types[typeIndex[q.QType]].name
	}
	name := "-"
	if len(q.Name()) > 0 {
		name = wire.UnpackName(q.Asked())
	}
	fmt.Fprintf(l.w, "%s %s %s %s %s %s %d\n", time.Now().UTC().Format(time.RFC3339Nano), from, p, typ, name, rcode, len(out))
}

func (l *queryLog) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.w.Flush()
}

package server

import (
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// minAcceptNap and maxAcceptNap are how long a listener waits after it failed to accept, above all for want of descriptors.
	minAcceptNap, maxAcceptNap = 5 * time.Millisecond, time.Second
	// acceptLogInterval is how often a listener that goes on failing says so.
	acceptLogInterval = time.Minute
)

// limitConns returns a listener that closes connections above a number: one slow client more must not cost others theirs. It
// accepts until it is closed, whatever fails.
func limitConns(l net.Listener, most int, refused prometheus.Counter, log *slog.Logger) net.Listener {
	return &limitedListener{Listener: l, most: int64(most), refused: refused, log: log, closed: make(chan struct{})}
}

type limitedListener struct {
	net.Listener
	most    int64
	open    atomic.Int64
	refused prometheus.Counter
	log     *slog.Logger
	closing sync.Once
	closed  chan struct{}
}

func (l *limitedListener) Accept() (net.Conn, error) {
	nap, said := time.Duration(0), time.Time{}
	for {
		c, err := l.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		if err != nil {
			nap = min(max(2*nap, minAcceptNap), maxAcceptNap)
			if time.Since(said) > acceptLogInterval {
				l.log.Error("could not accept a connection, retrying", "address", l.Addr().String(), "err", err)
				said = time.Now()
			}
			select {
			case <-l.closed:
			case <-time.After(nap):
			}
			continue
		}
		nap = 0
		if l.open.Add(1) <= l.most {
			return &limitedConn{Conn: c, closed: sync.OnceFunc(func() { l.open.Add(-1) })}, nil
		}
		l.open.Add(-1)
		c.Close()
		l.refused.Inc()
	}
}

func (l *limitedListener) Close() error {
	l.closing.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type limitedConn struct {
	net.Conn
	closed func()
}

func (c *limitedConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

package server

import (
	"net"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// limitConns returns a listener that closes connections above a number: one slow client more must not cost others theirs.
func limitConns(l net.Listener, most int, refused prometheus.Counter) net.Listener {
	return &limitedListener{Listener: l, most: int64(most), refused: refused}
}

type limitedListener struct {
	net.Listener
	most    int64
	open    atomic.Int64
	refused prometheus.Counter
}

func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= l.most {
			return &limitedConn{Conn: c, closed: sync.OnceFunc(func() { l.open.Add(-1) })}, nil
		}
		l.open.Add(-1)
		c.Close()
		l.refused.Inc()
	}
}

type limitedConn struct {
	net.Conn
	closed func()
}

func (c *limitedConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

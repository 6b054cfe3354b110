package apiserver

import (
	"container/list"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

const (
	// firstRequestTimeout is how long a connection may take until its TLS handshake is over and its first request has come.
	firstRequestTimeout = 10 * time.Second
	keepAlivePeriod     = 3 * time.Minute
	// reservedFiles are descriptors that connections never get: etcd's files and connections, logs, certificates.
	reservedFiles = 128
	// minConnections are accepted however small the limit on files is.
	minConnections = 16
)

// connectionLimit derives from the limit on open files how many clients may be connected at once; beside is the part of the files that is for
// other parts of the process.
func connectionLimit(beside float64) int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 1 << 16
	}
	return connectionsOf(int(min(limit.Cur, 1<<20)), beside)
}

func connectionsOf(files int, beside float64) int {
	left := files - max(reservedFiles, files/8) - int(float64(files)*beside)
	return max(left, minConnections)
}

// limitedListener bounds how many connections are open, so that descriptors are left for etcd, and closes those on which no
// request comes. At the limit a new connection replaces the oldest that is unauthenticated; if there is none, it is refused.
type limitedListener struct {
	net.Listener
	max     int
	timeout time.Duration
	// handshakes bounds those that are computed at once.
	handshakes *handshakes
	// count, if set, is called with the number of open connections when that changes.
	count func(open int)

	closed    chan struct{}
	closeOnce sync.Once

	mu   sync.Mutex
	open int
	// byAddress and unauthenticated hold the connections on which no request of a known client has come, by their addresses and
	// the oldest first.
	byAddress       map[addresses]*list.Element
	unauthenticated list.List
	logged          time.Time
}

// addresses tell connections apart: a client may use one address and port of its own for connections to several of this machine's.
type addresses struct{ client, server string }

func addressesOf(conn net.Conn) addresses {
	return addresses{conn.RemoteAddr().String(), conn.LocalAddr().String()}
}

// connectionOf are the addresses of the connection that a request came by.
func connectionOf(r *http.Request) addresses {
	of := addresses{client: r.RemoteAddr}
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		of.server = local.String()
	}
	return of
}

func limitConnections(inner net.Listener, most, cpus int, timeout time.Duration, waited func()) *limitedListener {
	return &limitedListener{
		Listener: inner, max: most, timeout: timeout, handshakes: newHandshakes(cpus, waited), closed: make(chan struct{}), byAddress: map[addresses]*list.Element{},
	}
}

// Close ends Accept. Connections stay.
func (l *limitedListener) Close() error {
	l.closeOnce.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// Accept waits for a connection within the limit.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetKeepAlivePeriod(keepAlivePeriod)
		}
		if c := l.admit(conn); c != nil {
			return c, nil
		}
	}
}

func (l *limitedListener) admit(conn net.Conn) net.Conn {
	c := &limitedConn{Conn: conn, listener: l, addresses: addressesOf(conn), greeting: greeting{handshakes: l.handshakes}}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= l.max {
		connectionsRefused.Inc()
		if time.Since(l.logged) > 10*time.Second {
			l.logged = time.Now()
			klog.InfoS("connection limit reached, closing unauthenticated connections and refusing new ones", "limit", l.max)
		}
		oldest := l.unauthenticated.Front()
		if oldest == nil {
			_ = conn.Close()
			return nil
		}
		l.drop(oldest.Value.(*limitedConn))
	}
	l.counted(1)
	l.byAddress[c.addresses] = l.unauthenticated.PushBack(c)
	c.timer = time.AfterFunc(l.timeout, func() { _ = c.Close() })
	return c
}

// counted notes one connection more or less. The caller holds mu.
func (l *limitedListener) counted(change int) {
	l.open += change
	if l.count != nil {
		l.count(l.open)
	}
}

// drop closes a connection and counts it no more. The caller holds mu.
func (l *limitedListener) drop(c *limitedConn) {
	if c.closed {
		return
	}
	c.closed = true
	l.counted(-1)
	l.known(c.addresses)
	c.timer.Stop()
	_ = c.Conn.Close()
}

// known takes a connection out of those that may be closed for others. The caller holds mu.
func (l *limitedListener) known(of addresses) {
	if element, ok := l.byAddress[of]; ok {
		l.unauthenticated.Remove(element)
		delete(l.byAddress, of)
	}
}

// sawRequest notes that a request has come on a connection: from now on the server's own limits on idle connections apply.
func (l *limitedListener) sawRequest(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		if element, ok := l.byAddress[connectionOf(r)]; ok {
			element.Value.(*limitedConn).timer.Stop()
		}
		l.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

// sawClient notes that a client is known, whose connection is not closed for another's.
func (l *limitedListener) sawClient(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if who, ok := genericrequest.UserFrom(r.Context()); ok && who.GetName() != user.Anonymous {
			l.keep(r)
		}
		next.ServeHTTP(w, r)
	})
}

// keep has a client's connection not closed for another's.
func (l *limitedListener) keep(r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.known(connectionOf(r))
}

type limitedConn struct {
	net.Conn
	listener  *limitedListener
	addresses addresses
	timer     *time.Timer
	closed    bool
	greeting  greeting
}

func (c *limitedConn) Read(data []byte) (int, error) {
	c.greeting.rest()
	n, err := c.Conn.Read(data)
	if err == nil {
		c.greeting.heard()
	}
	return n, err
}

func (c *limitedConn) Write(data []byte) (int, error) {
	c.greeting.answered()
	return c.Conn.Write(data)
}

func (c *limitedConn) Close() error {
	c.greeting.answered()
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	c.listener.drop(c)
	return nil
}

package worker

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// speak sends a word and waits until it comes back.
func speak(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "word\n"); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

func speaking(t *testing.T, at netip.AddrPort) net.Conn {
	t.Helper()
	c, err := net.DialTimeout("tcp", at.String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := speak(c); err != nil {
		t.Fatal(err)
	}
	return c
}

// twoListeners leads two addresses to an endpoint each; a draining time is short enough to wait for it.
func twoListeners(at, endpoints [2]netip.AddrPort) config.Config {
	c := config.Config{Pools: map[string]*config.Pool{}}
	for i := range at {
		name := fmt.Sprint("p", i)
		c.Listeners = append(c.Listeners, config.Listener{Name: fmt.Sprint("l", i), Address: at[i], Protocol: config.TCP, Pool: name})
		c.Pools[name] = &config.Pool{Protocol: config.TCP, Draining: 100 * time.Millisecond, Endpoints: []config.Endpoint{{Address: endpoints[i]}}}
	}
	return c
}

// TestReplacedFollows: workers that were replaced learn of every change, also through one that was replaced itself and has no connections left:
// what leads to an endpoint that has left is closed after its draining time, everything else stays, and has new idle times.
func TestReplacedFollows(t *testing.T) {
	dir := folderFor(t)
	at, endpoints := [2]netip.AddrPort{unused(t), unused(t)}, [2]netip.AddrPort{echo(t), echo(t)}
	first := ensure(t, dir, "first")
	if err := first.Apply(t.Context(), twoListeners(at, endpoints)); err != nil {
		t.Fatal(err)
	}
	oldest := stateOf(t, first).PID
	leaves, stays, idle := speaking(t, at[0]), speaking(t, at[1]), speaking(t, at[1])
	second := ensure(t, dir, "second")
	<-first.Gone()
	third := ensure(t, dir, "third")
	<-second.Gone()
	for _, c := range []net.Conn{leaves, stays} {
		if err := speak(c); err != nil {
			t.Fatal(err)
		}
	}
	next := twoListeners(at, [2]netip.AddrPort{echo(t), endpoints[1]})
	if err := third.Apply(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	_ = leaves.SetReadDeadline(time.Now().Add(patience))
	if n, err := leaves.Read(make([]byte, 1)); err == nil || n > 0 || isTimeout(err) {
		t.Errorf("its endpoint has left, and the connection has %d bytes, %v", n, err)
	}
	if err := speak(stays); err != nil {
		t.Errorf("a connection to an endpoint that stays: %v", err)
	}
	next.Listeners[1].IdleTimeout = time.Second
	if err := third.Apply(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	_ = idle.SetReadDeadline(time.Now().Add(patience))
	if _, err := idle.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("the idle time is shorter, and the connection reads %v", err)
	}
	_ = stays.Close()
	eventually(t, "the first worker ends with its last connection", func() bool { return !alive(oldest) })
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// TestReplacedFollowsProtocols: connections of a worker that was replaced end after their draining time if the listener speaks another protocol now.
func TestReplacedFollowsProtocols(t *testing.T) {
	dir := folderFor(t)
	at, endpoints := [2]netip.AddrPort{unused(t), unused(t)}, [2]netip.AddrPort{echo(t), echo(t)}
	first := ensure(t, dir, "first")
	if err := first.Apply(t.Context(), twoListeners(at, endpoints)); err != nil {
		t.Fatal(err)
	}
	changes, stays := speaking(t, at[0]), speaking(t, at[1])
	second := ensure(t, dir, "second")
	<-first.Gone()
	next := twoListeners(at, endpoints)
	next.Listeners[0].TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	if err := second.Apply(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	_ = changes.SetReadDeadline(time.Now().Add(patience))
	if n, err := changes.Read(make([]byte, 1)); err == nil || n > 0 || isTimeout(err) {
		t.Errorf("the listener has another protocol, and the connection has %d bytes, %v", n, err)
	}
	if err := speak(stays); err != nil {
		t.Errorf("a connection of a listener that stays: %v", err)
	}
}

package apiserver

import (
	"sync/atomic"
	"time"
)

// handshakeWait bounds how long a TLS handshake waits for others.
const handshakeWait = 2 * time.Second

// handshakes bounds how many TLS handshakes are computed at once, so that requests of those who are connected find a CPU while hundreds connect.
type handshakes struct {
	turns chan struct{}
	// waiting are how many wait for a turn.
	waiting atomic.Int32
	// waited is called when one has to wait.
	waited func()
}

func newHandshakes(cpus int, waited func()) *handshakes {
	return &handshakes{turns: make(chan struct{}, max(1, cpus/2)), waited: waited}
}

// take waits for a turn, and says whether there was one.
func (h *handshakes) take() bool {
	select {
	case h.turns <- struct{}{}:
		return true
	default:
	}
	h.waiting.Add(1)
	defer h.waiting.Add(-1)
	h.waited()
	timer := time.NewTimer(handshakeWait)
	defer timer.Stop()
	select {
	case h.turns <- struct{}{}:
		return true
	case <-timer.C:
		return false
	}
}

// end gives the turn to the next one; after a pause if others wait, for what the new clients ask comes on top of their handshakes.
func (h *handshakes) end(took time.Duration) {
	if h.waiting.Load() == 0 {
		<-h.turns
		return
	}
	time.AfterFunc(min(took, handshakeWait/100), func() { <-h.turns })
}

// greeting is the beginning of a connection, until the server has answered for the first time: what costs CPU is between what the client sends first and that.
type greeting struct {
	handshakes *handshakes
	begun      time.Time
	// over: the server has answered.
	over atomic.Bool
	// holds: this connection has a turn.
	holds atomic.Bool
}

// heard is called when the client has sent something.
func (g *greeting) heard() {
	if !g.over.Load() && g.handshakes.take() {
		g.begun = time.Now()
		g.holds.Store(true)
	}
}

// rest ends the turn, if there is one: whoever waits for the client, or has answered it, computes nothing.
func (g *greeting) rest() {
	if g.holds.Load() && g.holds.CompareAndSwap(true, false) {
		g.handshakes.end(time.Since(g.begun))
	}
}

// answered ends the greeting.
func (g *greeting) answered() {
	if !g.over.Load() {
		g.over.Store(true)
	}
	g.rest() // also later: a connection may be closed while it waits for its turn
}

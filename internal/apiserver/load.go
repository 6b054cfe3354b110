package apiserver

import (
	"sync"
	"time"
)

// Load is how much is asked of a server.
type Load struct {
	// Connections are those of clients that are open.
	Connections int
	// Waiting: requests with large answers have waited for others of their user, or TLS handshakes for each other, a moment ago. Small requests leave little garbage.
	Waiting bool
}

// waitingFor is for how long a request that has waited counts.
const waitingFor = 10 * time.Second

// loadMeter reports changes of the load, one at a time.
type loadMeter struct {
	report func(Load)

	mu    sync.Mutex
	load  Load
	timer *time.Timer
}

func (m *loadMeter) connections(open int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load.Connections = open
	m.report(m.load)
}

// waited notes that a request has to wait.
func (m *loadMeter) waited() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.load.Waiting {
		m.timer.Reset(waitingFor)
		return
	}
	m.load.Waiting = true
	m.timer = time.AfterFunc(waitingFor, m.idle)
	m.report(m.load)
}

// idle is called when no request has had to wait for some time.
func (m *loadMeter) idle() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load.Waiting = false
	m.report(m.load)
}

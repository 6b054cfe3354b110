package worker

import (
	"encoding/json"
	"log/slog"
	"net"
	"sync"
	"time"

	"portal/internal/descriptor"
	"portal/internal/lb/config"
)

// predecessor is a worker whose last connections have not ended yet, as the one sees it that took over.
type predecessor struct {
	mu   sync.Mutex // held while a configuration is sent
	conn *net.UnixConn
	gone chan struct{} // closed when it has ended, or is of a version that does not follow
}

// watch waits for the predecessor's end.
func (p *predecessor) watch() {
	defer close(p.gone)
	_ = p.conn.SetReadDeadline(time.Time{})
	for {
		if _, err := p.conn.Read(make([]byte, 1)); err != nil {
			return
		}
	}
}

func (p *predecessor) close() { _ = p.conn.Close() }

// tellPatience is how long a predecessor may take to receive a configuration.
const tellPatience = 5 * time.Second

// tell sends a configuration. One that can't be sent ends the relation: the predecessor goes on with what it knows.
func (p *predecessor) tell(data json.RawMessage, log *slog.Logger) {
	if p == nil {
		return
	}
	select {
	case <-p.gone:
		return
	default:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	file, err := descriptor.InMemory("portal-lb", snapshot{Config: data})
	if err == nil {
		defer file.Close()
		_ = p.conn.SetWriteDeadline(time.Now().Add(tellPatience))
		err = send(p.conn, packet{State: true}, file)
	}
	if err != nil {
		log.Info("the process that was replaced follows no more changes", "err", err)
		p.close()
	}
}

// follow takes in what the worker that took over is configured with, until either ends.
func (s *server) follow(c *net.UnixConn, stop <-chan struct{}) {
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-stop:
		case <-ended:
		}
		_ = c.Close()
	}()
	_ = c.SetDeadline(time.Time{})
	for {
		p, files, err := receive(c)
		if err != nil {
			for _, f := range files {
				_ = f.Close()
			}
			return
		}
		for _, f := range files {
			var known snapshot
			err := json.NewDecoder(f).Decode(&known)
			_ = f.Close()
			if err == nil && p.State {
				err = s.followed(known.Config)
			}
			if err != nil {
				s.log.Warn("a change was not followed", "err", err)
			}
		}
	}
}

// followed carries out what concerns connections that are here, and passes the configuration on.
func (s *server) followed(data json.RawMessage) error {
	s.behind.tell(data, s.log)
	var c config.Config
	if err := json.Unmarshal(data, &c); err != nil {
		return err
	}
	return s.engine.Follow(c)
}

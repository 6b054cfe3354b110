package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/descriptor"
	"portal/internal/lb/engine"
)

// A worker that takes over connects to the other one's handover socket and gets packets: first one with a file that holds configuration
// and state, then the listening sockets, then one that says that these were all. From then on both have the sockets; once the new one
// accepts and can be found, it says so, and the old one stops accepting. No connection is refused in between: the queue of those not
// yet accepted is the socket's, not the process's. The connection stays: the new worker sends each configuration that it gets to the old
// one, whose connections must end if their endpoints leave.

// packet is what one says beside the files that come with it.
type packet struct {
	// State: the one file has the state.
	State bool `json:"state,omitempty"`
	// Addresses are those of the listening sockets that come with the packet.
	Addresses []netip.AddrPort `json:"addresses,omitempty"`
	Last      bool             `json:"last,omitempty"`
}

// snapshot is what the new worker must know.
type snapshot struct {
	Config json.RawMessage `json:"config,omitempty"`
	State  engine.State    `json:"state"`
}

const (
	socketsInPacket = 100 // the kernel allows 253
	packetSize      = 64 << 10
	// handoverPatience is how long one waits for the other.
	handoverPatience = 30 * time.Second
)

// accepting is what the new worker says in the end.
var accepting = []byte("accepting")

// serveHandover gives everything away to whoever asks, once.
func (s *server) serveHandover(l *net.UnixListener, stop <-chan struct{}) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		err = s.handOver(c)
		if err == nil {
			s.finishAs(ending{why: "another worker has taken over", drain: s.options.HandoverDrain, followed: true})
			s.follow(c, stop)
			return
		}
		_ = c.Close()
		s.mu.Lock()
		s.handing = false
		s.mu.Unlock()
		s.log.Warn("another worker could not take over", "err", err)
	}
}

func (s *server) handOver(c *net.UnixConn) error {
	if err := c.SetDeadline(time.Now().Add(handoverPatience)); err != nil {
		return err
	}
	s.mu.Lock()
	s.handing = true
	known := snapshot{Config: s.config}
	s.mu.Unlock()
	known.State = s.engine.State()
	file, err := descriptor.InMemory("portal-lb", known) // it may hold keys
	if err != nil {
		return err
	}
	defer file.Close()
	sockets, err := s.engine.Sockets()
	if err != nil {
		return err
	}
	defer closeFiles(sockets)
	if err := send(c, packet{State: true}, file); err != nil {
		return err
	}
	var p packet
	var files []*os.File
	for address, f := range sockets {
		p.Addresses, files = append(p.Addresses, address), append(files, f)
		if len(files) == socketsInPacket {
			if err := send(c, p, files...); err != nil {
				return err
			}
			p, files = packet{}, nil
		}
	}
	p.Last = true
	if err := send(c, p, files...); err != nil {
		return err
	}
	buf := make([]byte, len(accepting)+1)
	n, err := c.Read(buf)
	if err != nil {
		return err
	}
	if string(buf[:n]) != string(accepting) {
		return errors.New("it did not say that it accepts")
	}
	s.engine.StopAccepting()
	return nil
}

// takeOver asks the worker that has the folder for everything it has. If there is none, nothing is taken.
func (d *folder) takeOver(ctx context.Context) (_ taken, err error) {
	nothing := taken{done: func() *predecessor { return nil }, giveUp: func() {}}
	dialer := net.Dialer{Timeout: handoverPatience}
	conn, err := dialer.DialContext(ctx, "unixpacket", d.name(handoverSocket))
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return nothing, nil
	case err != nil:
		return nothing, err
	}
	c := conn.(*net.UnixConn)
	t := taken{sockets: map[netip.AddrPort]*os.File{}}
	t.done = func() *predecessor {
		_, _ = c.Write(accepting)
		return &predecessor{conn: c, gone: make(chan struct{})}
	}
	t.giveUp = func() {
		_ = c.Close()
		closeFiles(t.sockets)
	}
	defer func() {
		if err != nil {
			t.giveUp()
		}
	}()
	if err := c.SetDeadline(time.Now().Add(handoverPatience)); err != nil {
		return nothing, err
	}
	for {
		p, files, err := receive(c)
		if err != nil {
			return nothing, err
		}
		want := len(p.Addresses)
		if p.State {
			want++
		}
		if len(files) != want {
			descriptor.CloseAll(files)
			return nothing, fmt.Errorf("%d files came, %d were announced: the process may have too few open files allowed", len(files), want)
		}
		if p.State {
			var known snapshot
			err := json.NewDecoder(files[0]).Decode(&known)
			_ = files[0].Close()
			if err != nil {
				return nothing, err
			}
			t.config, t.state = known.Config, known.State
			files = files[1:]
		}
		for i, address := range p.Addresses {
			t.sockets[address] = files[i]
		}
		if p.Last {
			return t, nil
		}
	}
}

func send(c *net.UnixConn, p packet, files ...*os.File) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	rights, err := descriptor.Rights(files...)
	if err != nil {
		return err
	}
	_, _, err = c.WriteMsgUnix(data, rights, nil)
	return err
}

func receive(c *net.UnixConn) (p packet, files []*os.File, err error) {
	data, rights := make([]byte, packetSize), make([]byte, unix.CmsgSpace(4*(socketsInPacket+1)))
	n, m, _, _, err := c.ReadMsgUnix(data, rights)
	if err != nil {
		return p, nil, err
	}
	files = descriptor.Received(rights[:m])
	if n == 0 {
		err = io.EOF
	} else {
		err = json.Unmarshal(data[:n], &p)
	}
	if err != nil {
		descriptor.CloseAll(files)
		return p, nil, err
	}
	return p, files, nil
}

func closeFiles(files map[netip.AddrPort]*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

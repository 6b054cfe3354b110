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

	"portal/internal/lb/engine"
)

// A worker that takes over connects to the other one's handover socket and gets packets: first one with a file that holds configuration
// and state, then the listening sockets, then one that says that these were all. From then on both have the sockets; once the new one
// accepts and can be found, it says so, and the old one stops accepting. No connection is refused in between: the queue of those not
// yet accepted is the socket's, not the process's.

// parcel is one packet.
type parcel struct {
	// Luggage: the one file is that.
	Luggage bool `json:"luggage,omitempty"`
	// Addresses are those of the listening sockets that come with the packet.
	Addresses []netip.AddrPort `json:"addresses,omitempty"`
	Last      bool             `json:"last,omitempty"`
}

// luggage is what the new worker must know.
type luggage struct {
	Config json.RawMessage `json:"config,omitempty"`
	State  engine.State    `json:"state"`
}

const (
	socketsInParcel = 100 // the kernel allows 253
	parcelSize      = 64 << 10
	// handoverPatience is how long one waits for the other.
	handoverPatience = 30 * time.Second
)

var thanks = []byte("accepting")

// serveHandover gives everything away to whoever asks, once.
func (s *server) serveHandover(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		err = s.handOver(c)
		_ = c.Close()
		if err == nil {
			s.finish("another worker has taken over", s.options.HandoverDrain)
			return
		}
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
	bag := luggage{Config: s.config}
	s.mu.Unlock()
	bag.State = s.engine.State()
	file, err := inMemory(bag)
	if err != nil {
		return err
	}
	defer file.Close()
	sockets, err := s.engine.Sockets()
	if err != nil {
		return err
	}
	defer closeFiles(sockets)
	if err := send(c, parcel{Luggage: true}, file); err != nil {
		return err
	}
	var p parcel
	var files []*os.File
	for address, f := range sockets {
		p.Addresses, files = append(p.Addresses, address), append(files, f)
		if len(files) == socketsInParcel {
			if err := send(c, p, files...); err != nil {
				return err
			}
			p, files = parcel{}, nil
		}
	}
	p.Last = true
	if err := send(c, p, files...); err != nil {
		return err
	}
	buf := make([]byte, len(thanks)+1)
	n, err := c.Read(buf)
	if err != nil {
		return err
	}
	if string(buf[:n]) != string(thanks) {
		return errors.New("it did not say that it accepts")
	}
	s.engine.StopAccepting()
	return nil
}

// takeOver asks the worker that has the folder for everything it has. If there is none, nothing is taken.
func (d *folder) takeOver(ctx context.Context) (_ taken, err error) {
	nothing := taken{done: func() {}, giveUp: func() {}}
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
	t.done = func() {
		_, _ = c.Write(thanks)
		_ = c.Close()
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
		if p.Luggage {
			want++
		}
		if len(files) != want {
			for _, f := range files {
				_ = f.Close()
			}
			return nothing, fmt.Errorf("%d files came, %d were announced: the process may have too few open files allowed", len(files), want)
		}
		if p.Luggage {
			var bag luggage
			err := json.NewDecoder(files[0]).Decode(&bag)
			_ = files[0].Close()
			if err != nil {
				return nothing, err
			}
			t.config, t.state = bag.Config, bag.State
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

func send(c *net.UnixConn, p parcel, files ...*os.File) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	var fds []int
	for _, f := range files {
		raw, err := f.SyscallConn()
		if err != nil {
			return err
		}
		// Fd would make the socket block, for both processes.
		if err := raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) }); err != nil {
			return err
		}
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(data, rights, nil)
	return err
}

func receive(c *net.UnixConn) (p parcel, files []*os.File, err error) {
	data, rights := make([]byte, parcelSize), make([]byte, unix.CmsgSpace(4*(socketsInParcel+1)))
	n, m, _, _, err := c.ReadMsgUnix(data, rights)
	if err != nil {
		return p, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:m])
	if err != nil {
		return p, nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "handover"))
		}
	}
	if n == 0 {
		return p, files, io.EOF
	}
	return p, files, json.Unmarshal(data[:n], &p)
}

// inMemory writes a value to a file that has no name. It may hold keys, so it is never on a disk.
func inMemory(v any) (*os.File, error) {
	fd, err := unix.MemfdCreate("portal-lb", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "memfd")
	if err := json.NewEncoder(f).Encode(v); err != nil {
		_ = f.Close()
		return nil, err
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, err
}

func closeFiles(files map[netip.AddrPort]*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

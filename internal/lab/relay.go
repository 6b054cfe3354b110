package lab

import (
	"context"
	"io"
	"net"
	"sync"
)

// relay accepts connections on this computer's loopback interface and leads them to an address on a machine's network: nothing
// of this computer's own network has to change.
type relay struct {
	listener net.Listener
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

func newRelay(m *Machine, address string) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &relay{listener: l, cancel: cancel}
	r.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.running.Go(func() { r.carry(ctx, c, m, address) })
		}
	})
	return r, nil
}

func (r *relay) carry(ctx context.Context, in net.Conn, m *Machine, address string) {
	defer in.Close()
	out, err := m.dial(ctx, address)
	if err != nil {
		return
	}
	defer out.Close()
	stop := context.AfterFunc(ctx, func() {
		in.Close()
		out.Close()
	})
	defer stop()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
		both.Go(func() {
			_, _ = io.Copy(way[1], way[0])
			if half, ok := way[1].(*net.TCPConn); ok {
				_ = half.CloseWrite()
			}
		})
	}
	both.Wait()
}

func (r *relay) close() {
	_ = r.listener.Close()
	r.cancel()
	r.running.Wait()
}

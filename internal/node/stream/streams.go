package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	// idleTimeout is after what silence a connection is closed, and creationTimeout how long a client may take to open its streams.
	idleTimeout     = 4 * time.Hour
	creationTimeout = remotecommand.DefaultStreamCreationTimeout
)

// session is one connection to a container.
type session struct {
	pod       Pod
	container string
	options   *remotecommand.Options
}

var (
	_ remotecommand.Executor = &session{}
	_ remotecommand.Attacher = &session{}
)

// open finds out what a client wants to connect to.
func (s *Server) open(w http.ResponseWriter, r *http.Request) *session {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return nil
	}
	pod := s.find(w, r)
	if pod == nil {
		return nil
	}
	name := r.PathValue("container")
	if err := pod.Running(name); err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return nil
	}
	return &session{pod, name, options}
}

// exec runs a command with its streams connected.
func (s *Server) exec(w http.ResponseWriter, r *http.Request) {
	command := r.URL.Query()["command"]
	if len(command) == 0 {
		http.Error(w, "command: must be given", http.StatusBadRequest)
		return
	}
	if c := s.open(w, r); c != nil {
		remotecommand.ServeExec(w, r, c, r.PathValue("pod"), c.pod.UID(), c.container, command, c.options, idleTimeout, creationTimeout, remotecommand.SupportedStreamingProtocols)
	}
}

// attach connects to a container's own streams.
func (s *Server) attach(w http.ResponseWriter, r *http.Request) {
	if c := s.open(w, r); c != nil {
		remotecommand.ServeAttach(w, r, c, r.PathValue("pod"), c.pod.UID(), c.container, c.options, idleTimeout, creationTimeout, remotecommand.SupportedStreamingProtocols)
	}
}

// streams are those that the client asked for: of some that it did not ask for there are, too.
func (c *session) streams(in io.Reader, out, errs io.Writer, tty bool, resize <-chan remotecommand.TerminalSize) (Streams, func()) {
	s := Streams{TTY: tty}
	if c.options.Stdin {
		s.In = in
	}
	if c.options.Stdout {
		s.Out = out
	}
	if c.options.Stderr && !tty {
		s.Err = errs
	}
	stop := func() {}
	if resize != nil && tty {
		sizes, ended := make(chan Size), make(chan struct{})
		s.Resize, stop = sizes, sync.OnceFunc(func() { close(ended) })
		go func() {
			defer close(sizes)
			for size := range resize {
				select {
				case sizes <- Size{Columns: size.Width, Rows: size.Height}:
				case <-ended:
					return
				}
			}
		}()
	}
	return s, stop
}

// ExecInContainer runs a command. An exit code other than 0 is an error that says so.
func (c *session) ExecInContainer(ctx context.Context, _, _, container string, command []string, in io.Reader, out, errs io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	streams, stop := c.streams(in, out, errs, tty, resize)
	defer stop()
	code, err := c.pod.Exec(ctx, container, command, streams)
	if err == nil && code != 0 {
		err = utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return err
}

// AttachContainer connects to a container.
func (c *session) AttachContainer(ctx context.Context, _, _, container string, in io.Reader, out, errs io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize) error {
	streams, stop := c.streams(in, out, errs, tty, resize)
	defer stop()
	err := c.pod.Attach(ctx, container, streams)
	if errors.Is(err, context.Canceled) {
		return nil // the client has gone
	}
	return err
}

// forward connects to ports of a Pod.
func (s *Server) forward(w http.ResponseWriter, r *http.Request) {
	options, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	pod := s.find(w, r)
	if pod == nil {
		return
	}
	portforward.ServePortForward(w, r, forwarder{pod, r.Context()}, r.PathValue("pod"), pod.UID(), options, idleTimeout, creationTimeout, portforward.SupportedProtocols)
}

type forwarder struct {
	pod Pod
	ctx context.Context
}

// PortForward copies between a client's stream and a port, until both directions have ended, or either breaks.
func (f forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	if port < 1 || port > 65535 {
		return fmt.Errorf("port %d: must be from 1 to 65535", port)
	}
	conn, err := f.pod.Dial(f.ctx, uint16(port))
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(f.ctx, func() { _ = conn.Close() })()
	answered := make(chan error, 1)
	go func() {
		_, err := io.Copy(stream, conn)
		answered <- err
	}()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, stream)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
		sent <- err
	}()
	// Who has sent all may still want the answer; who has answered all listens to nobody.
	select {
	case err = <-answered:
	case err = <-sent:
		if err == nil {
			err = <-answered
		}
	}
	return err
}

package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	goruntime "runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime/shim"
)

// Streams are what somebody has connected to a process. What is nil is not wanted.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
	// TTY gives the process a terminal: then all that it says is Out.
	TTY bool
	// Resize has the terminal's sizes.
	Resize <-chan Size
}

// Size is a terminal's.
type Size struct{ Columns, Rows uint16 }

// idle is how long after the end of a process its output may be silent before it is over: something that it left running may hold it open.
const idle = 200 * time.Millisecond

// ExecStream runs a process in a container with its streams connected, until it ends or ctx does. It returns the exit code.
func (p *Pod) ExecStream(ctx context.Context, id string, args []string, streams Streams) (int, error) {
	c, err := shim.Dial(p.Dir)
	if err != nil {
		return 0, err
	}
	defer c.Release()
	defer context.AfterFunc(ctx, c.Close)()
	var pipes plumbing
	defer pipes.close()
	var files []*os.File
	if !streams.TTY {
		if files, err = pipes.lay(streams); err != nil {
			return 0, err
		}
	}
	if err := c.Send(&shim.Request{Op: shim.OpExec, ID: id, KillOnClose: true}, &shim.Exec{Args: args, TTY: streams.TTY}, files...); err != nil {
		return 0, err
	}
	answer, received, err := c.Receive()
	pipes.handOver()
	if err := failed(ctx, answer, err); err != nil {
		closeAll(received)
		return 0, err
	}
	if streams.TTY {
		if len(received) != 1 {
			closeAll(received)
			return 0, errors.New("the shim gave no terminal")
		}
		if err := pipes.terminal(received[0], streams); err != nil {
			return 0, err
		}
	}
	pipes.start(streams)
	answer, received, err = c.Receive()
	closeAll(received)
	if err := failed(ctx, answer, err); err != nil {
		return 0, err
	}
	pipes.drain()
	if answer.ExitCode == nil {
		return 0, errors.New("the shim did not say how the process ended")
	}
	return *answer.ExitCode, nil
}

func failed(ctx context.Context, answer *shim.Answer, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("the shim did not answer: %w", err)
	case answer.Error != "":
		return &StartError{answer.Error}
	}
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// plumbing connects streams to the ends of pipes.
type plumbing struct {
	given, own []*os.File // the process's ends, and ours
	in         *os.File
	outs       []outlet
	copying    sync.WaitGroup
	mu         sync.Mutex
	ended      bool
	resizing   sync.WaitGroup
	stop       chan struct{} // closed to stop resizing
}

type outlet struct {
	from *os.File
	to   io.Writer
}

// lay makes pipes for a process without a terminal, and returns its ends.
func (p *plumbing) lay(streams Streams) ([]*os.File, error) {
	null, err := shim.OpenNull()
	if err != nil {
		return nil, err
	}
	p.given = []*os.File{null}
	out := []*os.File{null, null, null}
	if streams.In != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		out[0], p.in = r, w
		p.given, p.own = append(p.given, r), append(p.own, w)
	}
	for i, to := range []io.Writer{streams.Out, streams.Err} {
		if to == nil {
			continue
		}
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		out[i+1] = w
		p.given, p.own = append(p.given, w), append(p.own, r)
		p.outs = append(p.outs, outlet{r, to})
	}
	return out, nil
}

// terminal connects a process's terminal.
func (p *plumbing) terminal(master *os.File, streams Streams) error {
	file, err := pollable(master)
	if err != nil {
		return err
	}
	// Before anything else is done with it: taking the number of a file would have it block again.
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return err
	}
	p.own = append(p.own, file)
	if streams.In != nil {
		p.in = file
	}
	out := streams.Out
	if out == nil {
		out = io.Discard // a terminal that nobody reads would hold the process up
	}
	p.outs = append(p.outs, outlet{file, out})
	p.resize(raw, streams.Resize)
	return nil
}

// pollable is a file that was received, so that reading from it can be interrupted.
func pollable(f *os.File) (*os.File, error) {
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// resize follows a terminal's size.
func (p *plumbing) resize(terminal syscall.RawConn, sizes <-chan Size) {
	if sizes == nil {
		return
	}
	stop := make(chan struct{})
	p.stop = stop
	p.resizing.Go(func() {
		for {
			select {
			case <-stop:
				return
			case s, ok := <-sizes:
				if !ok {
					return
				}
				if s.Columns > 0 && s.Rows > 0 {
					_ = terminal.Control(func(fd uintptr) {
						_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: s.Rows, Col: s.Columns})
					})
				}
			}
		}
	})
}

// handOver closes the ends that the process has now.
func (p *plumbing) handOver() {
	closeAll(p.given)
	p.given = nil
}

// start copies in both directions.
func (p *plumbing) start(streams Streams) {
	if p.in != nil {
		// It is not waited for: who types nothing would hold up the end.
		go func() {
			_, _ = io.Copy(writeOnly{p.in}, streams.In)
			if !streams.TTY {
				_ = p.in.Close()
			}
		}()
	}
	for _, o := range p.outs {
		p.copying.Go(func() { p.copy(o) })
	}
}

// writeOnly keeps io.Copy from splicing, which would block in the kernel.
type writeOnly struct{ io.Writer }

// copy hands on output until its end: that of the pipe or, once the process has ended, a silence.
func (p *plumbing) copy(o outlet) {
	buf := make([]byte, 32<<10)
	for {
		p.mu.Lock()
		if p.ended {
			_ = o.from.SetReadDeadline(time.Now().Add(idle))
		}
		p.mu.Unlock()
		n, err := o.from.Read(buf)
		if n > 0 {
			if _, err := o.to.Write(buf[:n]); err != nil {
				// Nobody listens: the process gets SIGPIPE.
				_ = o.from.Close()
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// drain waits for the rest of the output of a process that has ended.
func (p *plumbing) drain() {
	p.mu.Lock()
	p.ended = true
	for _, o := range p.outs {
		_ = o.from.SetReadDeadline(time.Now().Add(idle))
	}
	p.mu.Unlock()
	p.copying.Wait()
}

func (p *plumbing) close() {
	if p.stop != nil {
		close(p.stop)
	}
	p.resizing.Wait() // it uses a descriptor that is about to be closed
	closeAll(p.given)
	closeAll(p.own)
}

// Attach connects to a container's own streams, until it ends, or ctx does. It says whether there was a standard input to connect to.
func (p *Pod) Attach(ctx context.Context, id string, streams Streams) (stdin bool, err error) {
	c, err := shim.Dial(p.Dir)
	if err != nil {
		return false, err
	}
	defer c.Release()
	if err := c.Send(&shim.Request{Op: shim.OpAttach, ID: id, Stdin: streams.In != nil}, nil); err != nil {
		return false, err
	}
	answer, files, err := c.Receive()
	if err := failed(ctx, answer, err); err != nil {
		closeAll(files)
		return false, err
	}
	var pipes plumbing
	defer pipes.close()
	if answer.Stdin && len(files) > 0 {
		// It doesn't block, as the shim sees to: closing it ends what waits for a container that does not read. For a terminal, the shim reads
		// from the same one, so this end stays as it is.
		input := files[0]
		files = files[1:]
		pipes.own = append(pipes.own, input)
		if streams.In != nil {
			go func() {
				_, _ = io.Copy(writeOnly{input}, streams.In)
				if !answer.TTY {
					_ = input.Close()
					_ = c.Send(&shim.Request{Op: shim.OpEndInput}, nil)
				}
			}()
		}
		if raw, err := input.SyscallConn(); err == nil && answer.TTY {
			pipes.resize(raw, streams.Resize)
		}
	}
	to := []io.Writer{streams.Out, streams.Err}
	for i, f := range files {
		from, err := pollable(f)
		if err != nil {
			closeAll(files[i:])
			return answer.Stdin, err
		}
		pipes.own = append(pipes.own, from)
		writer := io.Discard
		if i < len(to) && to[i] != nil {
			writer = to[i]
		}
		pipes.outs = append(pipes.outs, outlet{from, writer})
	}
	pipes.start(Streams{})
	done := make(chan struct{})
	go func() {
		pipes.copying.Wait()
		close(done)
	}()
	select {
	case <-ctx.Done():
		closeAll(pipes.own) // nobody is left to read for
		pipes.copying.Wait()
		return answer.Stdin, ctx.Err()
	case <-done:
		if said := c.Pending(); said != nil && said.Error != "" {
			return answer.Stdin, errors.New(said.Error)
		}
		return answer.Stdin, nil
	}
}

// Dial connects to a port of the Pod, as one of its own processes would.
func (p *Pod) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	if !p.Alive() {
		return nil, errors.New("the Pod does not run")
	}
	ns, err := os.Open(p.NetworkNamespace())
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	type result struct {
		conn net.Conn
		err  error
	}
	out := make(chan result, 1)
	go func() {
		goruntime.LockOSThread() // the thread ends with this goroutine: nobody else gets it
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			out <- result{err: fmt.Errorf("enter the Pod's network: %w", err)}
			return
		}
		var r result
		for _, host := range []string{"127.0.0.1", "::1"} {
			var d net.Dialer
			conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
			if err == nil {
				out <- result{conn: conn}
				return
			}
			if r.err == nil {
				r.err = err
			}
		}
		out <- r
	}()
	r := <-out
	return r.conn, r.err
}

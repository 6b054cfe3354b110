package worker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options are those of Ensure.
type Options struct {
	// Dir is the worker's folder.
	Dir string
	// Identity is that of this binary. A worker with another one is replaced.
	Identity string
	// Program and Args start a worker; Program is empty for this binary. The process must call Serve with the same folder and identity,
	// and Ready as its option of that name.
	Program string
	Args    []string
	Env     []string // besides this process's
	// Patience is how long a worker that runs may take to say what it does, before it is killed; 0: the default.
	Patience time.Duration
	Log      *slog.Logger
}

// readyVariable has the descriptor on which a worker that was started says that it is ready.
const readyVariable = "PORTAL_LB_READY_FD"

const (
	logFile = "log"
	// logMost is how large the log may become: then it is moved to logFile with the ending .old, in the place of what is there.
	logMost = 8 << 20
	// startPatience is how long a worker may take to be ready; it may have to take over thousands of sockets.
	startPatience = 60 * time.Second
	// statePatience is how long a worker that runs may take to say what it does. One that works is not killed because its machine is slow.
	statePatience = 30 * time.Second
)

// Ensure returns the worker of the folder. It adopts one that runs, replaces one of another binary without a connection being lost,
// and starts one if there is none, or in the place of one that does not answer: that one is killed, and its connections break.
func Ensure(ctx context.Context, o Options) (*Client, error) {
	dir, err := openDir(o.Dir)
	if err != nil {
		return nil, err
	}
	c := newClient(dir)
	if o.Patience > 0 {
		c.patience = o.Patience
	}
	if err := c.ensure(ctx, o); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) ensure(ctx context.Context, o Options) error {
	unlock, err := c.dir.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	asking, cancel := context.WithTimeout(ctx, c.patience)
	state, err := c.State(asking)
	cancel()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil && state.Identity == o.Identity && !state.Handing:
		o.Log.Info("adopting the balancing process that runs", "pid", state.PID, "connections", state.Connections)
		return c.attach(ctx)
	case err == nil:
		o.Log.Info("replacing the balancing process by one of this version", "pid", state.PID, "its", state.Identity, "ours", o.Identity)
	case unanswered(err):
		pid, err := c.dir.kill()
		if err != nil {
			return fmt.Errorf("end the balancing process, which has not answered for %v: %w", c.patience, err)
		}
		o.Log.Warn("killed the balancing process, which did not answer: its connections are broken", "pid", pid, "after", c.patience)
	}
	// The connection to the one that is replaced must not be used again.
	c.http.CloseIdleConnections()
	if err := start(ctx, o); err != nil {
		return fmt.Errorf("start the balancing process: %w", err)
	}
	return c.attach(ctx)
}

// lock keeps two agents from starting a worker each.
func (d *folder) lock(ctx context.Context) (func(), error) {
	f, err := os.OpenFile(d.name("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// start starts a worker that outlives this process, and waits until it is ready.
func start(ctx context.Context, o Options) error {
	path := filepath.Join(o.Dir, logFile)
	log, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	began, _ := log.Seek(0, 2)
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	program := o.Program
	if program == "" {
		program = "/proc/self/exe" // also if the file has been replaced meanwhile
	}
	cmd := exec.Command(program, o.Args...)
	if o.Program == "" {
		cmd.Args[0] = "portal" // what ps shows: the path says nothing
	}
	cmd.Dir, cmd.Env = "/", append(append(os.Environ(), o.Env...), readyVariable+"=3")
	// What it logs must not go where only this process listens: it will be gone.
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = w.Close()
	go func() { _ = cmd.Wait() }() // so that it is no zombie if it ends before this process does
	ready := make(chan error, 1)
	go func() {
		_, err := bufio.NewReader(r).ReadString('\n')
		ready <- err
	}()
	late, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	select {
	case err = <-ready:
		if err == nil {
			return nil
		}
		return fmt.Errorf("it ended: %s", lastLine(path, began))
	case <-late.Done():
		_ = cmd.Process.Kill()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("it was not ready within %v: %s", startPatience, lastLine(path, began))
	}
}

// limitLog keeps a log from growing without end. The file is the output of a process, so it stays the same one: its content is copied, and
// it is emptied.
func limitLog(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.Size() <= logMost {
		return err
	}
	from, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(path+".old", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close(), from.Truncate(0))
}

// lastLine is what a worker logged last.
func lastLine(path string, from int64) string {
	data, err := os.ReadFile(path)
	if err != nil || int64(len(data)) <= from {
		return "it logged nothing"
	}
	text := strings.TrimSpace(string(data[from:]))
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// Ready says to the process that started this one that the worker is ready, if there is one that waits.
func Ready() {
	fd, err := strconv.Atoi(os.Getenv(readyVariable))
	if err != nil {
		return
	}
	_ = os.Unsetenv(readyVariable)
	f := os.NewFile(uintptr(fd), "ready")
	_, _ = f.WriteString("ready\n")
	_ = f.Close()
}

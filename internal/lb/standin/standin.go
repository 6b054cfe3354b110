// Package standin is a small process that answers ARP and neighbour discovery for a node's addresses while its balancer is restarted, so that
// neighbours find them all the while. It ends when the next balancer asks it to, when its time is over, or when other machines
// have taken all its addresses. It knows nothing of Kubernetes, nor whose addresses they are.
package standin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/l2"
)

// Options are those of Serve.
type Options struct {
	// Dir is the balancer's folder, which must be its user's alone. The process is found there.
	Dir string
	// Addresses are answered for on Interfaces, as l2.Options has them, until a time.
	Addresses  []netip.Addr
	Interfaces []string
	Until      time.Time
	// Ready is called when it answers.
	Ready func()
	Log   *slog.Logger
}

const (
	socketName = "standin"
	logName    = "standin.log"
	// startPatience is how long it may take until it answers, and endPatience until it has ended.
	startPatience = 10 * time.Second
	endPatience   = 5 * time.Second
)

// Serve answers until ctx ends, or there is nothing left to do.
func Serve(ctx context.Context, o Options) error {
	ctx, cancel := context.WithDeadline(ctx, o.Until)
	defer cancel()
	dir, err := openDir(o.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	path := inside(dir, socketName)
	_ = os.Remove(path) // of one that was killed; another one that runs has been asked to end by who started this one
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		return err
	}
	defer listener.Close()
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	// Who takes an address has it.
	taken := make(chan netip.Addr, 16)
	responder, err := l2.New(l2.Options{Interfaces: o.Interfaces, Log: o.Log, Contested: func(a netip.Addr) bool {
		select {
		case taken <- a:
		default: // it is said again
		}
		return false
	}})
	if err != nil {
		return err
	}
	var tasks sync.WaitGroup
	var asked net.Conn
	defer func() {
		tasks.Wait()
		if asked != nil {
			_ = asked.Close() // this is how who asked knows
		}
	}()
	defer listener.Close()
	defer cancel()
	failed := make(chan error, 1)
	tasks.Go(func() { failed <- responder.Run(ctx) })
	responder.Set(o.Addresses)
	tasks.Go(func() {
		if c, err := listener.Accept(); err == nil {
			asked = c
			cancel()
		}
	})
	o.Log.Info("standing in for a balancer", "addresses", len(o.Addresses), "until", o.Until)
	o.Ready()
	left := slices.Clone(o.Addresses)
	for len(left) > 0 {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			if ctx.Err() != nil {
				return nil
			}
			return err
		case a := <-taken:
			o.Log.Info("another machine has taken an address", "address", a)
			left = slices.DeleteFunc(left, func(x netip.Addr) bool { return x == a })
			responder.Set(left)
		}
	}
	return nil
}

// openDir opens the folder. Whoever can enter it can end the process.
func openDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if st, ok := infoOf(info); err != nil || !ok || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		_ = f.Close()
		return nil, errors.Join(err, fmt.Errorf("the folder %s must belong to the user of this process and be open to nobody else (mode 0700)", path))
	}
	return f, nil
}

func infoOf(info os.FileInfo) (*syscall.Stat_t, bool) {
	if info == nil {
		return nil, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return st, ok
}

// inside is a path to a file that is short however deep the folder is: the address of a socket holds 108 bytes.
func inside(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

// Start starts a process that answers, and returns when it does. Its arguments are those by which the program calls Serve and, as Ready, Ready.
func Start(dir, program string, args ...string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := End(context.Background(), dir); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(dir, logName), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	cmd := exec.Command(program, args...)
	cmd.Args[0] = "portal" // what ps shows: the path may say nothing
	cmd.Dir, cmd.Stderr, cmd.ExtraFiles = "/", log, []*os.File{w}
	// A terminal or a service manager that signals the group of who starts it does not mean this process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = w.Close()
	_ = r.SetReadDeadline(time.Now().Add(startPatience))
	_, err = bufio.NewReader(r).ReadString('\n')
	switch {
	case err == nil:
		return cmd.Process.Release()
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("it did not answer within %v", startPatience)
	default:
		err = errors.New("it ended")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	said, _ := os.ReadFile(filepath.Join(dir, logName))
	return fmt.Errorf("start a process that stands in: %w: %s", err, strings.TrimSpace(string(said)))
}

// Ready says to who started this process that it answers.
func Ready() {
	w := os.NewFile(3, "ready")
	_, _ = io.WriteString(w, "ready\n")
	_ = w.Close()
}

// End ends the process that stands in, if there is one, and returns when it answers no more.
func End(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	folder, err := openDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer folder.Close()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", inside(folder, socketName))
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case err != nil:
		return err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	_ = c.SetReadDeadline(deadline)
	if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("end the process that stands in: %w", err)
	}
	return nil
}

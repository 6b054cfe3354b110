package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime/shim"
	"portal/internal/rmtree"
)

// StartError is why a container could not be started, though all that it needs is there.
type StartError struct{ Message string }

func (e *StartError) Error() string { return e.Message }

// Start starts a container. The caller fills in what to run; folders and control groups are this package's.
func (p *Pod) Start(ctx context.Context, c shim.Container, l Limits) error {
	r := p.runtime
	group := filepath.Join(r.group(p.UID), c.ID)
	if err := r.Cgroups.Make(group, l); err != nil {
		return err
	}
	if !c.Privileged {
		if err := r.Cgroups.RestrictDevices(group); err != nil {
			return err
		}
	}
	c.Dir = p.ContainerDir(c.ID)
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	c.Cgroups, c.OOMFile, c.CgroupMounts = r.Cgroups.dirs(group), r.Cgroups.OOMFile(group), r.Cgroups.Mounts()
	answer, err := p.ask(ctx, &shim.Request{Op: shim.OpStart, ID: c.ID}, &c)
	if err != nil {
		return err
	}
	if answer.Error != "" {
		return &StartError{answer.Error}
	}
	return nil
}

// ask sends one request and waits for its answer.
func (p *Pod) ask(ctx context.Context, r *shim.Request, body any) (*shim.Answer, error) {
	c, err := shim.Dial(p.Dir)
	if err != nil {
		return nil, err
	}
	defer c.Release()
	defer context.AfterFunc(ctx, c.Close)()
	if err := c.Send(r, body); err != nil {
		return nil, err
	}
	answer, _, err := c.Receive()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the shim did not answer: %w", err), ctx.Err())
	}
	return answer, nil
}

// Signal signals a container's first process.
func (p *Pod) Signal(ctx context.Context, id string, sig syscall.Signal) error {
	answer, err := p.ask(ctx, &shim.Request{Op: shim.OpSignal, ID: id, Signal: int(sig)}, nil)
	if err == nil && answer.Error != "" {
		err = errors.New(answer.Error)
	}
	return err
}

// Exec runs a process in a container to its end. Output goes to the file out, if there is one. When ctx ends, so does the process.
func (p *Pod) Exec(ctx context.Context, id string, args []string, in, out, errors *os.File) (int, error) {
	c, err := shim.Dial(p.Dir)
	if err != nil {
		return 0, err
	}
	defer c.Release()
	defer context.AfterFunc(ctx, c.Close)()
	null, err := shim.OpenNull()
	if err != nil {
		return 0, err
	}
	defer null.Close()
	files := []*os.File{in, out, errors}
	for i := range files {
		if files[i] == nil {
			files[i] = null
		}
	}
	if err := c.Send(&shim.Request{Op: shim.OpExec, ID: id, KillOnClose: true}, &shim.Exec{Args: args}, files...); err != nil {
		return 0, err
	}
	for {
		answer, received, err := c.Receive()
		for _, f := range received {
			_ = f.Close()
		}
		switch {
		case ctx.Err() != nil:
			return 0, ctx.Err()
		case err != nil:
			return 0, fmt.Errorf("the shim did not answer: %w", err)
		case answer.Error != "":
			return 0, &StartError{answer.Error}
		case answer.ExitCode != nil:
			return *answer.ExitCode, nil
		}
	}
}

// Watch calls back with every container's status, and with each change, until ctx ends or the shim does.
func (p *Pod) Watch(ctx context.Context, listed func(), changed func(*shim.Status)) error {
	c, err := shim.Dial(p.Dir)
	if err != nil {
		return err
	}
	defer c.Release()
	defer context.AfterFunc(ctx, c.Close)()
	if err := c.Send(&shim.Request{Op: shim.OpWatch}, nil); err != nil {
		return err
	}
	for {
		answer, _, err := c.Receive()
		if err != nil {
			return errors.Join(err, ctx.Err())
		}
		if answer.Status != nil {
			changed(answer.Status)
		}
		if answer.Listed {
			listed()
		}
	}
}

// Statuses are what containers' folders say: also when the shim is gone. One that a shim left behind as running has ended with it.
func (p *Pod) Statuses() ([]*shim.Status, error) {
	alive := p.Alive()
	entries, err := os.ReadDir(filepath.Join(p.Dir, "containers"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []*shim.Status
	for _, e := range entries {
		path := filepath.Join(p.Dir, "containers", e.Name(), shim.StatusFile)
		data, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		s := &shim.Status{}
		if err := json.Unmarshal(data, s); err != nil {
			continue
		}
		if s.Running() && (!alive || s.Sandbox != p.Sandbox.ID) {
			s.PID, s.Finished, s.ExitCode, s.Signal = 0, time.Now().UTC(), 137, int(unix.SIGKILL)
			if st, err := os.Stat(path); err == nil && st.ModTime().After(s.Started) {
				s.Finished = st.ModTime()
			}
			if err := writeJSON(path, s); err != nil {
				return nil, err
			}
		}
		out = append(out, s)
	}
	return out, nil
}

// RemoveContainer forgets a container that has ended.
func (p *Pod) RemoveContainer(ctx context.Context, id string) error {
	answer, err := p.ask(ctx, &shim.Request{Op: shim.OpForget, ID: id}, nil)
	switch {
	case err != nil && p.Alive():
		return err
	case err == nil && answer.Error != "":
		return errors.New(answer.Error)
	}
	if err := p.runtime.Cgroups.Remove(filepath.Join(p.runtime.group(p.UID), id)); err != nil {
		return err
	}
	return rmtree.Remove(p.ContainerDir(id))
}

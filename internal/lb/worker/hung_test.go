package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hang stops a process as a debugger would, and returns when it has stopped.
func hang(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if alive(pid) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	eventually(t, "the process is stopped", func() bool {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, rest, _ := strings.Cut(string(data), ") ")
		return err == nil && strings.HasPrefix(rest, "T")
	})
}

// soon are options that give up a worker soon.
func soon(t *testing.T, dir string) Options {
	o := optionsOf(dir, "0", slog.New(slog.NewTextHandler(t.Output(), nil)))
	o.Patience = 2 * time.Second
	return o
}

func speaks(at netip.AddrPort) error {
	c, err := net.DialTimeout("tcp", at.String(), patience)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "hello"); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 5))
	return err
}

// TestHung: a worker that hangs is noticed and replaced, by an agent that is attached and by one that starts.
func TestHung(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	o := soon(t, dir)
	var attached *Client
	var pid int
	for range 2 {
		var c *Client
		eventually(t, "there is a worker", func() (ok bool) {
			var err error
			if c, err = Ensure(t.Context(), o); err != nil {
				t.Log(err)
			}
			return err == nil
		})
		t.Cleanup(c.Close)
		c.patience = 2 * patience // as long as it does not hang
		s := stateOf(t, c)
		if attached != nil {
			if s.PID == pid || alive(pid) {
				t.Errorf("the worker is process %d, and the one that hung, %d, is alive: %v", s.PID, pid, alive(pid))
			}
			select {
			case <-attached.Gone():
			case <-time.After(patience):
				t.Error("the agent of the worker that hung does not know that it is gone")
			}
		}
		if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
			t.Fatal(err)
		}
		if err := speaks(at); err != nil {
			t.Fatal(err)
		}
		if err := c.Alive(t.Context()); err != nil {
			t.Error(err)
		}
		attached, pid = c, s.PID
		hang(t, pid)
		c.patience = o.Patience
		if err := c.Alive(t.Context()); !Unanswered(t.Context(), err) {
			t.Errorf("of a worker that hangs: %v", err)
		}
	}
	// So is one that is to end.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := attached.Stop(ctx); err != nil || alive(pid) {
		t.Errorf("after it was stopped: %v; it is alive: %v", err, alive(pid))
	}
}

// TestHungNotKilled: without a worker nothing is killed, nor does a process kill itself, nor one that answers the first question and not the next.
func TestHungNotKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lb")
	d, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if pid, err := d.kill(); pid != 0 || err != nil {
		t.Errorf("without a worker: %d, %v", pid, err)
	}
	l, err := d.listen("unix", controlSocket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(d.name(d.names[controlSocket]), d.name(controlSocket)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(http.ResponseWriter, *http.Request) { <-ended })
	server := &http.Server{Handler: mux}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	defer close(ended)
	o := soon(t, dir)
	o.Patience = 100 * time.Millisecond
	if _, err := Ensure(t.Context(), o); err == nil || !strings.Contains(err.Error(), "this process itself") {
		t.Errorf("error %v, want that this process is not killed", err)
	}
	mux.HandleFunc("GET /state", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, State{Identity: "0"}) })
	o.Patience = time.Second
	eventually(t, "attaching takes too long", func() bool {
		_, err := Ensure(t.Context(), o)
		if err == nil {
			t.Fatal("it is attached")
		}
		return errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), "attach")
	})
}

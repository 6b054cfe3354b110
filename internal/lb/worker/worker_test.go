package worker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/config"
	"portal/internal/lb/engine"
)

// TestLeaving: after its agent left for good, a worker ends if no other one comes.
func TestLeaving(t *testing.T) {
	dir := folderFor(t)
	c := ensure(t, dir, "0")
	pid := stateOf(t, c).PID
	if err := c.Detach(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	c.Close()
	c = ensure(t, dir, "0")
	if s := stateOf(t, c); s.PID != pid || s.Agents != 1 {
		t.Errorf("state %+v, want the same worker", s)
	}
	if err := c.Detach(t.Context(), time.Millisecond); err != nil {
		t.Fatal(err)
	}
	c.Close()
	eventually(t, "the worker ends", func() bool { return !alive(pid) })
	if _, err := os.Stat(filepath.Join(dir, controlSocket)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket is still there: %v", err)
	}
}

func TestStop(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	c := ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", at.String()); err == nil {
		_ = conn.Close()
		t.Error("it accepts after it was stopped")
	}
	// Another one can begin at once at the same addresses.
	c = ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	// Draining: the open connection lasts.
	conn, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	speak := func() {
		t.Helper()
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = io.WriteString(conn, "x")
		if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	speak()
	pid := stateOf(t, c).PID
	if err := c.Drain(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	<-c.Gone()
	speak()
	// Meanwhile another worker begins.
	c = ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	speak()
	_ = conn.Close()
	eventually(t, "the drained worker ends", func() bool { return !alive(pid) })
	if s := stateOf(t, c); len(s.Listeners) != 1 {
		t.Errorf("state %+v", s)
	}
}

// TestFolderRemoved: a worker that nobody can find does not go on.
func TestFolderRemoved(t *testing.T) {
	dir := folderFor(t)
	c := ensure(t, dir, "0")
	pid := stateOf(t, c).PID
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the worker ends", func() bool { return !alive(pid) })
}

// TestLogIsLimited: a worker that runs for months does not fill the disk with its log.
func TestLogIsLimited(t *testing.T) {
	dir := folderFor(t)
	c := ensure(t, dir, "0")
	path := filepath.Join(dir, logFile)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(strings.Repeat("noise\n", logMost/6+1)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the log is short again", func() bool {
		info, err := os.Stat(path)
		return err == nil && info.Size() < logMost/2
	})
	if info, err := os.Stat(path + ".old"); err != nil || info.Size() <= logMost || info.Mode().Perm() != 0o600 {
		t.Errorf("what was in it: %v, %v", info, err)
	}
	// The worker goes on writing at its begin.
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), "balancing process ends") || strings.Contains(string(data), "\x00") {
		t.Errorf("%.200q, %v", data, err)
	}
}

func TestControl(t *testing.T) {
	dir, at := folderFor(t), unused(t)
	c := ensure(t, dir, "0")
	for file, mode := range map[string]os.FileMode{"": 0o700, controlSocket: 0o600, handoverSocket: 0o600, logFile: 0o600} {
		info, err := os.Stat(filepath.Join(dir, file))
		if err != nil || info.Mode().Perm() != mode {
			t.Errorf("%q: %v, %v, want mode %o", file, info.Mode(), err, mode)
		}
	}
	cfg := configOf(at, unused(t))
	cfg.Listeners = append(cfg.Listeners, config.Listener{Name: "bad", Address: unused(t), Protocol: "gopher"})
	failed, ok := errors.AsType[*engine.ApplyError](c.Apply(t.Context(), cfg))
	if !ok || len(failed.Parts) != 1 || !strings.Contains(failed.Parts["bad"].Error(), "gopher") {
		t.Errorf("error %v", failed)
	}
	text, err := c.Metrics(t.Context())
	if err != nil || !strings.Contains(string(text), "portal_lb_cluster_membership_total") || !strings.Contains(string(text), "process_resident_memory_bytes") {
		t.Errorf("metrics %.100s, %v", text, err)
	}
	for path, mentions := range map[string]string{"/drain?timeout=soon": "timeout", "/detach": "after", "/nowhere": "404"} {
		if err := c.do(t.Context(), "POST", path, nil, nil); err == nil || !strings.Contains(err.Error(), mentions) {
			t.Errorf("%s: error %v, want %q in it", path, err, mentions)
		}
	}
	if err := c.do(t.Context(), "PUT", "/config", []byte("{"), nil); err == nil {
		t.Error("half a configuration was taken")
	}
	// A folder that others can enter is refused.
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Ensure(t.Context(), optionsOf(open, "0", slog.New(slog.DiscardHandler))); err == nil || !strings.Contains(err.Error(), "0700") {
		t.Errorf("error %v, want one about the folder's mode", err)
	}
}

// TestAttachIsGivenUp: an agent that stops does not wait for a worker that does not answer.
func TestAttachIsGivenUp(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lb")
	d, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := d.listen("unix", controlSocket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(d.name(d.names[controlSocket]), d.name(controlSocket)); err != nil {
		t.Fatal(err)
	}
	asked, ended := make(chan struct{}), make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /state", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, State{Identity: "0"}) })
	mux.HandleFunc("POST /attach", func(http.ResponseWriter, *http.Request) {
		close(asked)
		<-ended
	})
	server := &http.Server{Handler: mux}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	defer close(ended)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := Ensure(ctx, optionsOf(dir, "0", slog.New(slog.DiscardHandler)))
		failed <- err
	}()
	<-asked
	cancel()
	select {
	case err := <-failed:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("it waits for ever")
	}
}

package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"portal/internal/lb/config"
	"portal/internal/lb/engine"
)

const patience = 60 * time.Second

// The test binary is also the worker and the agent: what it is, is in its environment.
const (
	asVariable       = "PORTAL_TEST_AS"
	dirVariable      = "PORTAL_TEST_DIR"
	identityVariable = "PORTAL_TEST_IDENTITY"
	configVariable   = "PORTAL_TEST_CONFIG"
	drainVariable    = "PORTAL_TEST_DRAIN"
)

func TestMain(m *testing.M) {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	var err error
	switch os.Getenv(asVariable) {
	case "":
		os.Exit(m.Run())
	case "worker":
		ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer cancel()
		drain, _ := time.ParseDuration(os.Getenv(drainVariable))
		err = Serve(ctx, ServeOptions{Dir: os.Getenv(dirVariable), Identity: os.Getenv(identityVariable), Drain: drain, Ready: Ready, Log: log})
	case "agent":
		err = runAgent(log)
	}
	if err != nil {
		log.Error("it failed", "err", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runAgent ensures a worker, configures it, says so and waits until it is killed.
func runAgent(log *slog.Logger) error {
	c, err := Ensure(context.Background(), optionsOf(os.Getenv(dirVariable), os.Getenv(identityVariable), log))
	if err != nil {
		return err
	}
	data, err := os.ReadFile(os.Getenv(configVariable))
	if err != nil {
		return err
	}
	var cfg config.Config
	if err := json.Unmarshal(data, &cfg); err != nil {
		return err
	}
	if err := c.Apply(context.Background(), cfg); err != nil {
		return err
	}
	fmt.Println("configured")
	select {}
}

func optionsOf(dir, identity string, log *slog.Logger) Options {
	return Options{Dir: dir, Identity: identity, Log: log, Env: []string{
		asVariable + "=worker", dirVariable + "=" + dir, identityVariable + "=" + identity, drainVariable + "=" + os.Getenv(drainVariable),
	}}
}

// folderFor makes a worker's folder; its worker is gone when the test ends.
func folderFor(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "lb")
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(dir, logFile))
			t.Logf("the worker's log:\n%s", log)
		}
		stopWorker(t, dir)
	})
	return dir
}

func stopWorker(t *testing.T, dir string) {
	d, err := openDir(dir)
	if err != nil {
		return
	}
	c := newClient(d)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	state, err := c.State(ctx)
	if err != nil {
		return
	}
	_ = c.do(ctx, "POST", "/stop", nil, nil)
	eventually(t, "the worker ends", func() bool { return !alive(state.PID) })
}

// alive says whether a process runs; one that has ended and was not waited for does not.
func alive(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func ensure(t *testing.T, dir, identity string) *Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := Ensure(ctx, optionsOf(dir, identity, slog.New(slog.NewTextHandler(t.Output(), nil))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func stateOf(t *testing.T, c *Client) State {
	t.Helper()
	s, err := c.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func eventually(t *testing.T, what string, true func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !true(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// echo is an endpoint.
func echo(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				// From one socket to another it would hold a pipe, which is two more files.
				_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
				_ = c.Close()
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func unused(t *testing.T) netip.AddrPort {
	t.Helper()
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		at := l.Addr().(*net.TCPAddr).AddrPort()
		_ = l.Close()
		if _, again := given.LoadOrStore(at, true); !again {
			return at
		}
	}
}

// given are the addresses that unused has returned: the kernel may choose one again.
var given sync.Map

func configOf(at, endpoint netip.AddrPort) config.Config {
	return config.Config{
		Listeners: []config.Listener{{Name: "l", Address: at, Protocol: config.TCP, Pool: "p"}},
		Pools:     map[string]*config.Pool{"p": {Protocol: config.TCP, Endpoints: []config.Endpoint{{Address: endpoint}}}},
	}
}

// load opens connections one after the other, and keeps some that speak all the time, until stop is called; that says what failed.
type load struct {
	at           netip.AddrPort
	short, words atomic.Int64
	mu           sync.Mutex
	failures     []string
	wg           sync.WaitGroup
	end          chan struct{}
}

func newLoad(at netip.AddrPort) *load {
	l := &load{at: at, end: make(chan struct{})}
	for range 4 {
		l.wg.Go(func() {
			for !l.ended() {
				l.try(1)
				l.short.Add(1)
			}
		})
	}
	for range 20 {
		l.wg.Go(func() { l.try(1 << 30) })
	}
	return l
}

func (l *load) ended() bool {
	select {
	case <-l.end:
		return true
	default:
		return false
	}
}

// try opens a connection and speaks some times, or until the end.
func (l *load) try(times int) {
	err := func() error {
		c, err := net.DialTimeout("tcp", l.at.String(), patience)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(2 * patience))
		buf := make([]byte, 5)
		for range times {
			if l.ended() {
				return nil
			}
			if _, err := io.WriteString(c, "hello"); err != nil {
				return err
			}
			if _, err := io.ReadFull(c, buf); err != nil {
				return err
			}
			l.words.Add(1)
			if times > 1 {
				time.Sleep(5 * time.Millisecond)
			}
		}
		return nil
	}()
	if err != nil {
		l.mu.Lock()
		l.failures = append(l.failures, err.Error())
		l.mu.Unlock()
	}
}

func (l *load) stop(t *testing.T) {
	t.Helper()
	close(l.end)
	l.wg.Wait()
	if n := len(l.failures); n > 0 {
		t.Errorf("%d failed, for example: %s", n, l.failures[0])
	}
	t.Logf("%d short connections and 20 long ones, %d words", l.short.Load(), l.words.Load())
}

// more waits until so many more short connections were made.
func (l *load) more(t *testing.T, n int64) {
	t.Helper()
	until := l.short.Load() + n
	eventually(t, "connections go on", func() bool { return l.short.Load() >= until })
}

// TestAgentKilled: the agent is killed again and again under load, and nobody notices.
func TestAgentKilled(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	file := filepath.Join(t.TempDir(), "config.json")
	data, err := json.Marshal(configOf(at, endpoint))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	startAgent := func() *exec.Cmd {
		agent := exec.Command("/proc/self/exe")
		agent.Env = append(os.Environ(), asVariable+"=agent", dirVariable+"="+dir, identityVariable+"=one", configVariable+"="+file)
		agent.Stderr = t.Output()
		out, err := agent.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := agent.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, len("configured"))
		if _, err := io.ReadFull(out, line); err != nil {
			t.Fatalf("the agent said %q: %v", line, err)
		}
		return agent
	}
	agent := startAgent()
	l := newLoad(at)
	pid := 0
	for range 5 {
		l.more(t, 50)
		_ = agent.Process.Kill()
		_ = agent.Wait()
		l.more(t, 50)
		agent = startAgent()
		c := ensure(t, dir, "one")
		s := stateOf(t, c)
		if pid != 0 && s.PID != pid {
			t.Errorf("another worker: %d, was %d", s.PID, pid)
		}
		pid = s.PID
		c.Close()
	}
	_ = agent.Process.Kill()
	_ = agent.Wait()
	l.more(t, 50)
	l.stop(t)
}

// TestReplace: workers are replaced under load, and nobody notices.
func TestReplace(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	c := ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	l := newLoad(at)
	pids := map[int]bool{stateOf(t, c).PID: true}
	for i := range 10 {
		l.more(t, 100)
		next := ensure(t, dir, fmt.Sprint(i+1))
		<-c.Gone()
		s := stateOf(t, next)
		if pids[s.PID] || s.Identity != fmt.Sprint(i+1) || len(s.Listeners) != 1 {
			t.Errorf("the new worker: %+v", s)
		}
		pids[s.PID] = true
		c.Close()
		c = next
		// It takes configurations: the same one changes nothing.
		if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
			t.Error(err)
		}
	}
	l.more(t, 50)
	l.stop(t)
	current := stateOf(t, c).PID
	for pid := range pids {
		if pid != current {
			eventually(t, "the old worker ends with its last connection", func() bool { return !alive(pid) })
		}
	}
}

// TestReplaceFails: if the new worker can't start, the old one goes on.
func TestReplaceFails(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	c := ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	// It takes everything, and does not come to say that it accepts.
	d, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	took, err := d.takeOver(t.Context())
	if err != nil || len(took.sockets) != 1 {
		t.Fatalf("%d sockets, %v", len(took.sockets), err)
	}
	if !stateOf(t, c).Handing {
		t.Error("the worker does not know that another one takes over")
	}
	if err := c.Apply(t.Context(), config.Config{}); err == nil {
		t.Error("a configuration was taken while another worker takes over")
	}
	took.giveUp()
	eventually(t, "the worker goes on", func() bool { return !stateOf(t, c).Handing })
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Error(err)
	}
	l := newLoad(at)
	l.more(t, 10)
	l.stop(t)

	o := optionsOf(dir, "1", slog.New(slog.DiscardHandler))
	o.Env = append(o.Env, dirVariable+"=/proc/nowhere")
	if _, err := Ensure(t.Context(), o); err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("error %v, want what the worker logged", err)
	}
	if s := stateOf(t, c); s.Identity != "0" {
		t.Errorf("state %+v", s)
	}
}

// TestKnowledgeIsHandedOver: a new worker knows who leads and who is unhealthy.
func TestKnowledgeIsHandedOver(t *testing.T) {
	dir, at, good, bad := folderFor(t), unused(t), echo(t), unused(t)
	c := ensure(t, dir, "0")
	cfg := configOf(at, good)
	p := cfg.Pools["p"]
	p.Policy.Kind = config.Leader
	p.Endpoints = []config.Endpoint{{Address: bad, Name: "a"}, {Address: good, Name: "b"}}
	p.HealthCheck = &config.HealthCheck{Protocol: config.TCP, Healthy: 2, Unhealthy: 2, Interval: 20 * time.Millisecond, Timeout: patience}
	if err := c.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first is found unhealthy", func() bool { return stateOf(t, c).Pools[0].Leader == good })
	// In the new one the first could be healthy until its own checks failed.
	p.HealthCheck.Interval = time.Hour
	if err := c.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	s := stateOf(t, ensure(t, dir, "1")).Pools[0]
	if s.Leader != good || s.Endpoints[0].Healthy || !s.Endpoints[1].Healthy {
		t.Errorf("the new worker's pool: %+v", s)
	}
}

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

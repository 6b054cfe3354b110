package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"portal/internal/lb/config"
	"portal/internal/nettest"
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

var unused = nettest.UnusedPort

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

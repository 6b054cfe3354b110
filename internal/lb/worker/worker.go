// Package worker runs the engine in a process of its own, so that its connections outlive the agent that configures it: the agent can be
// killed, restarted and upgraded, and the worker itself be replaced by one of another version, without a connection being refused
// or broken. It knows nothing of Kubernetes.
//
// A worker is found by its folder, which has two sockets: control (HTTP, see control.go) and handover (see handover.go).
package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
	"portal/internal/lb/engine"
)

// ServeOptions are those of a worker process.
type ServeOptions struct {
	// Dir is the worker's folder.
	Dir string
	// Identity tells binaries apart: see Identity.
	Identity string
	// Engine is what the engine is made with; its inherited sockets are the worker's own matter.
	Engine engine.Options
	// Collectors are for metrics besides the engine's.
	Collectors []prometheus.Collector
	// Drain is how long connections may last after the process was asked to stop, HandoverDrain after another worker has taken over.
	Drain, HandoverDrain time.Duration
	// Ready is called when the worker serves.
	Ready func()
	Log   *slog.Logger
}

// The defaults of options.
const (
	DefaultDrain         = 30 * time.Second
	DefaultHandoverDrain = time.Hour
)

const (
	controlSocket  = "control"
	handoverSocket = "handover"
	// folderInterval is how often the worker looks whether its folder is still there and its log small, folderDrain how long connections
	// last if it is not there.
	folderInterval = 2 * time.Second
	folderDrain    = 10 * time.Second
)

// server is a running worker.
type server struct {
	options ServeOptions
	log     *slog.Logger
	engine  *engine.Engine
	control *http.Server
	began   time.Time

	// end is sent why and how the process ends; only the first counts. ending is closed then.
	end    chan ending
	ending chan struct{}

	mu        sync.Mutex
	config    json.RawMessage     // the last one that was applied
	handing   bool                // another worker takes over
	agents    map[uint64]struct{} // those that are attached and have not left
	lastAgent uint64
	leave     *time.Timer // runs after the last agent has left for good

	behind *predecessor // whom this one took over from; nil: nobody, or it has ended
}

// ending is how a worker ends: it drains for some time, which may be none.
type ending struct {
	why   string
	drain time.Duration
	// followed: another worker has taken over.
	followed bool
}

func newServer(o ServeOptions) *server {
	return &server{options: o, log: o.Log, began: time.Now(), end: make(chan ending, 1), ending: make(chan struct{}), agents: map[uint64]struct{}{}}
}

// Serve runs a worker until ctx ends or it is asked to stop. If another worker has the folder, this one takes over from it.
func Serve(ctx context.Context, o ServeOptions) error {
	if o.Drain <= 0 {
		o.Drain = DefaultDrain
	}
	if o.HandoverDrain <= 0 {
		o.HandoverDrain = DefaultHandoverDrain
	}
	raiseFileLimit()
	s := newServer(o)
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stopLeaving()
	}()
	dir, err := openDir(o.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	control, err := dir.listen("unix", controlSocket)
	if err != nil {
		return err
	}
	defer control.Close()
	handover, err := dir.listen("unixpacket", handoverSocket)
	if err != nil {
		return err
	}
	defer handover.Close()
	defer dir.discard()

	took, err := dir.takeOver(ctx)
	if err != nil {
		return fmt.Errorf("take over from the worker that runs: %w", err)
	}
	published := false
	defer func() {
		if !published {
			took.giveUp()
		}
	}()
	o.Engine.Log = o.Log
	o.Engine.Inherited = took.sockets
	s.engine = engine.New(o.Engine)
	defer s.engine.Close()
	if took.config != nil {
		if err := s.apply(took.config); err != nil {
			s.log.Warn("of what the other worker did, something can't be carried out", "err", err)
		}
		s.engine.Adopt(took.state)
	}
	if err := dir.publish(); err != nil {
		return err
	}
	published = true
	var tasks sync.WaitGroup
	defer tasks.Wait()
	stop := make(chan struct{})
	defer close(stop)
	if s.behind = took.done(); s.behind != nil {
		defer s.behind.close()
		tasks.Go(s.behind.watch)
	}
	s.control = &http.Server{Handler: s.handler(), ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug)}
	defer s.control.Close()
	defer control.Close()
	defer handover.Close()
	tasks.Go(func() { _ = s.control.Serve(control) })
	tasks.Go(func() { s.serveHandover(handover, stop) })
	tasks.Go(func() { s.watchFolder(dir, stop) })
	s.log.Info("balancing process is ready", "identity", o.Identity, "tookOver", took.config != nil)
	if o.Ready != nil {
		o.Ready()
	}
	return s.wait(ctx, control, handover)
}

// wait returns when the worker has ended.
func (s *server) wait(ctx context.Context, sockets ...net.Listener) error {
	var how ending
	select {
	case <-ctx.Done():
		how = ending{why: "asked to stop", drain: s.options.Drain}
	case how = <-s.end:
	}
	s.log.Info("balancing process ends", "why", how.why, "drain", how.drain, "connections", s.engine.Connections())
	s.engine.StopAccepting()
	if how.drain <= 0 {
		s.engine.Close()
	}
	// From now on nobody finds this worker, and a new one can have its addresses.
	for _, l := range sockets {
		_ = l.Close()
	}
	close(s.ending)
	answers, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	_ = s.control.Shutdown(answers)
	cancel()
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), how.drain)
	defer cancel()
	s.engine.Drain(drain)
	if how.followed && s.behind != nil {
		// Who came before hears of changes through this process.
		select {
		case <-s.behind.gone:
		case <-drain.Done():
		}
	}
	return nil
}

// finish ends the worker; the first call counts.
func (s *server) finish(why string, drain time.Duration) { s.finishAs(ending{why: why, drain: drain}) }

func (s *server) finishAs(how ending) {
	select {
	case s.end <- how:
	default:
	}
}

// apply carries out a configuration in JSON.
func (s *server) apply(data json.RawMessage) error {
	var c config.Config
	if err := json.Unmarshal(data, &c); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	err := s.engine.Apply(c)
	if _, partly := errors.AsType[*engine.ApplyError](err); err == nil || partly {
		s.mu.Lock()
		s.config = data
		s.mu.Unlock()
		s.behind.tell(data, s.log)
	}
	return err
}

// watchFolder ends the worker when nobody can find it any more, and keeps its log small.
func (s *server) watchFolder(dir *folder, stop <-chan struct{}) {
	tick := time.NewTicker(folderInterval)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		s.mu.Lock()
		handing := s.handing
		s.mu.Unlock()
		if handing {
			continue
		}
		if !dir.ours() {
			s.finish("its folder is gone", folderDrain)
			return
		}
		if err := limitLog(dir.name(logFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
			s.log.Error("the log can't be shortened", "err", err)
		}
	}
}

// raiseFileLimit allows as many open files as the process may allow itself.
func raiseFileLimit() {
	const enough = 1 << 20
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil || limit.Max >= enough {
		return
	}
	limit.Cur, limit.Max = enough, enough
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) // Go has set Cur to Max already
}

// Identity tells binaries apart, also those that are built from changed files under the same version.
func Identity(version string) string {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &st); err != nil {
		return version
	}
	return fmt.Sprintf("%s %d:%d:%d", version, st.Dev, st.Ino, st.Mtim.Nano())
}

// taken is what a worker took over. done says to the other one that it may go, and returns it; giveUp says that it must go on.
type taken struct {
	config  json.RawMessage
	state   engine.State
	sockets map[netip.AddrPort]*os.File
	done    func() *predecessor
	giveUp  func()
}

// folder is a worker's.
type folder struct {
	file *os.File
	path string
	// names are the files' names until they are published; inodes are those of this worker's.
	names  map[string]string
	inodes map[string]uint64
}

// openDir makes the folder if it is not there. It must be the user's alone: whoever can enter it can have all connections.
func openDir(path string) (*folder, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		_ = f.Close()
		return nil, fmt.Errorf("the folder %s must belong to the user of this process and be open to nobody else (mode 0700)", path)
	}
	return &folder{file: f, path: path, names: map[string]string{}, inodes: map[string]uint64{}}, nil
}

func (d *folder) Close() error { return d.file.Close() }

// name is a path to a file that is short however deep the folder is: the address of a socket holds 108 bytes.
func (d *folder) name(file string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.file.Fd(), file)
}

// listen makes a socket under a name that is not its own yet.
func (d *folder) listen(network, name string) (*net.UnixListener, error) {
	temporary := fmt.Sprintf("%s.%d", name, os.Getpid())
	_ = os.Remove(d.name(temporary))
	l, err := net.ListenUnix(network, &net.UnixAddr{Net: network, Name: d.name(temporary)})
	if err != nil {
		return nil, fmt.Errorf("listen in %s: %w", d.path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(d.name(temporary), 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	d.names[name] = temporary
	var st unix.Stat_t
	if err := unix.Stat(d.name(temporary), &st); err == nil {
		d.inodes[name] = st.Ino
	}
	return l, nil
}

// publish gives the sockets their names, in the place of those of another worker.
func (d *folder) publish() error {
	for _, name := range []string{handoverSocket, controlSocket} {
		if err := os.Rename(d.name(d.names[name]), d.name(name)); err != nil {
			return err
		}
		delete(d.names, name)
	}
	return nil
}

// discard removes sockets of this worker, and leaves those of another one.
func (d *folder) discard() {
	for _, temporary := range d.names {
		_ = os.Remove(d.name(temporary))
	}
	if d.ours() {
		_ = os.Remove(d.name(controlSocket))
		_ = os.Remove(d.name(handoverSocket))
	}
}

// ours says whether who looks for a worker in the folder finds this one.
func (d *folder) ours() bool {
	var st unix.Stat_t
	err := unix.Stat(filepath.Join(d.path, controlSocket), &st)
	return err == nil && st.Ino == d.inodes[controlSocket]
}

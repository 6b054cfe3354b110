package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// readyFD is where a shim says that it is ready, or why it can't be.
const readyFD = 3

// shim is the process beside one Pod.
type shim struct {
	dir     string
	sandbox Sandbox
	spawns  chan func()

	mu         sync.Mutex
	containers map[string]*container
	processes  map[int]func(unix.WaitStatus) // what to do when a child ends
	watchers   map[*conn]bool
	// pause holds the PID namespace that containers share, if they do.
	pause process
	// expected are the processes that stages are about to fork, and unknown those that ended meanwhile.
	expected int
	unknown  map[int]unix.WaitStatus
	stopping sync.Once
}

// procDir is the folder in a Pod's where /proc of the PID namespace is that containers share.
const procDir = "proc"

type container struct {
	config  Container
	status  Status
	process process // its first, while it runs
	logs    sync.WaitGroup
	// stdin is what whoever attaches writes to, and output and errors what they read: a terminal is the first two.
	stdin          *os.File
	output, errors *tee
	// launched says that it executed its program. One that ends before never ran; early is how it ended in between.
	launched bool
	early    *unix.WaitStatus
	// recorded says that its end is.
	recorded bool
}

// runShim is the program portal-shim, with the Pod's folder as its argument.
func runShim(args []string) int {
	closeInherited()
	unix.Umask(0o022) // and of all that it starts, whatever the agent's is
	unix.CloseOnExec(readyFD)
	ready := os.NewFile(readyFD, "ready")
	if len(args) != 1 {
		fmt.Fprint(ready, "portal-shim is started by portal node")
		return 2
	}
	s := &shim{dir: args[0], spawns: make(chan func()), containers: map[string]*container{}, processes: map[int]func(unix.WaitStatus){}, watchers: map[*conn]bool{}, unknown: map[int]unix.WaitStatus{}}
	listener, err := s.prepare()
	if err != nil {
		fmt.Fprint(ready, err)
		return 1
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	// It ends when the agent says so, not when a terminal or a service manager ends everything that it knows.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGTERM, unix.SIGPIPE)
	go s.spawnAll()
	go func() {
		for range children {
			s.reap()
		}
	}()
	if s.sandbox.SharedPID {
		if err := s.startPause(); err != nil {
			fmt.Fprint(ready, err)
			return 1
		}
	}
	fmt.Fprint(ready, "ready")
	_ = ready.Close()
	s.accept(listener)
	return 0
}

// closeInherited closes what whoever started the agent left open: nobody wants it here. Go's own descriptors are closed on exec, those
// that were inherited are not, or they would not be here.
func closeInherited() {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= readyFD {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
}

// prepare makes what all containers share, and listens.
func (s *shim) prepare() (int, error) {
	data, err := os.ReadFile(filepath.Join(s.dir, SandboxFile))
	if err != nil {
		return -1, err
	}
	if err := json.Unmarshal(data, &s.sandbox); err != nil {
		return -1, fmt.Errorf("%s: %w", SandboxFile, err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return -1, fmt.Errorf("detach mounts: %w", err)
	}
	for _, t := range s.sandbox.Tmpfs {
		options := "mode=" + t.Mode
		if t.Size > 0 {
			options += ",size=" + strconv.FormatInt(t.Size, 10)
		}
		if err := os.MkdirAll(t.Path, 0o755); err != nil {
			return -1, err
		}
		if err := unix.Mount("tmpfs", t.Path, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, options); err != nil {
			return -1, fmt.Errorf("mount a tmpfs at %s: %w", t.Path, err)
		}
	}
	if s.sandbox.Hostname != "" {
		if err := unix.Sethostname([]byte(s.sandbox.Hostname)); err != nil {
			return -1, fmt.Errorf("set the host name: %w", err)
		}
	}
	for name, value := range s.sandbox.Sysctls {
		if err := checkSysctl(name, s.sandbox.OwnNetwork, s.sandbox.OwnIPC); err != nil {
			return -1, err
		}
		path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return -1, fmt.Errorf("set sysctl %s: %w", name, err)
		}
	}
	// What outlives its parent in a PID namespace that is shared, or is the machine's, comes here to be reaped.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return -1, err
	}
	if err := os.WriteFile(filepath.Join(s.dir, PIDFile), fmt.Appendln(nil, os.Getpid()), 0o600); err != nil {
		return -1, err
	}
	return listen(s.dir)
}

// spawnAll runs what starts processes, always on the same thread: processes end when the thread that started them does.
func (s *shim) spawnAll() {
	runtime.LockOSThread()
	for f := range s.spawns {
		f()
	}
}

// reap takes note of all children that have ended.
func (s *shim) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		// The lock is held while a process is started, so whoever ended is known.
		s.mu.Lock()
		done := s.processes[pid]
		delete(s.processes, pid)
		if done == nil && s.expected > 0 {
			s.unknown[pid] = status
		}
		s.mu.Unlock()
		if done != nil {
			done(status)
		}
	}
}

// start starts a container and returns when it runs, or why it can't.
func (s *shim) start(config *Container) error {
	c := &container{config: *config, status: Status{ID: config.ID, Sandbox: s.sandbox.ID, Meta: config.Meta, Started: time.Now().UTC()}}
	s.mu.Lock()
	if s.containers[c.config.ID] != nil {
		s.mu.Unlock()
		return fmt.Errorf("container %s exists", c.config.ID)
	}
	s.containers[c.config.ID] = c
	s.mu.Unlock()
	err := s.launch(c)
	if err != nil {
		s.mu.Lock()
		c.status.Finished, c.status.ExitCode, c.status.StartError = time.Now().UTC(), 128, short(err)
		if c.stdin != nil {
			_ = c.stdin.Close()
			c.stdin = nil
		}
		s.mu.Unlock()
	}
	s.publish(c)
	return err
}

// launch starts the container's first process.
func (s *shim) launch(c *container) error {
	log, err := openLog(c.config.Log)
	if err != nil {
		return err
	}
	outputs, files, err := outputs(2)
	if err != nil {
		log.close()
		return err
	}
	defer closeAll(files)
	input, err := OpenNull()
	if err == nil && c.config.Stdin && !c.config.Process.TTY {
		_ = input.Close()
		input, c.stdin, err = os.Pipe()
	}
	if err != nil {
		closeAll(outputs)
		log.close()
		return err
	}
	defer input.Close()
	terminal := make(chan *os.File, 1)
	job := &job{
		name: initName, order: order{Container: &c.config}, stdio: [3]*os.File{input, files[0], files[1]}, flags: unix.CLONE_NEWNS, terminal: terminal,
		done: func(status unix.WaitStatus) { go s.ended(c, status) },
	}
	switch {
	case c.config.HostPID:
	case s.sandbox.SharedPID:
		c.config.Proc = filepath.Join(s.dir, procDir)
		job.order.Join, job.process = true, s.pause.file
	default:
		job.flags |= unix.CLONE_NEWPID
	}
	// Logs are written from the first byte on, and until the last process that holds them has ended.
	c.output, c.errors = newTee(), newTee()
	pipes := []struct {
		stream string
		tee    *tee
	}{{"stdout", c.output}, {"stderr", c.errors}}
	if c.config.Process.TTY {
		pipes[0].tee = newTee() // the terminal's is the output
	}
	for i, p := range pipes {
		c.logs.Go(func() { log.copy(outputs[i], p.stream, p.tee) })
	}
	started, err := s.spawn(job)
	closeAll(files)
	select {
	case t := <-terminal:
		t = pollable(t) // here, and wherever it is sent to
		if err == nil && c.config.Stdin {
			c.stdin = t
		}
		c.logs.Go(func() { log.copy(t, "stdout", c.output) })
	default:
	}
	go func() {
		c.logs.Wait()
		log.close()
	}()
	if err != nil {
		return err
	}
	s.mu.Lock()
	c.launched, c.status.PID, c.process = true, started.pid, started
	early := c.early
	s.mu.Unlock()
	if early != nil {
		s.ended(c, *early)
	}
	return nil
}

// pollable is a terminal that was received, so that nobody who waits for it holds a thread.
func pollable(f *os.File) *os.File {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return f
	}
	_ = f.Close()
	_ = unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), "terminal")
}

// ended notes how a container ended.
func (s *shim) ended(c *container, status unix.WaitStatus) {
	s.mu.Lock()
	c.early = &status
	launched := c.launched
	s.mu.Unlock()
	if !launched {
		return
	}
	// Where the kernel does not end all that the container has started, this does.
	if c.config.HostPID || s.sandbox.SharedPID {
		killAll(c.config.Cgroups)
	}
	// What was said before the end is in the log when the end is known, unless something else holds the log open.
	waitShortly(&c.logs)
	s.mu.Lock()
	_ = c.process.file.Close()
	c.process = process{}
	if c.stdin != nil && !c.config.Process.TTY { // whoever reads a terminal closes it
		_ = c.stdin.Close()
	}
	c.stdin = nil
	c.status.PID, c.status.Finished, c.status.ExitCode = 0, time.Now().UTC(), status.ExitStatus()
	if status.Signaled() {
		c.status.Signal = int(status.Signal())
		c.status.ExitCode = 128 + c.status.Signal
	}
	c.status.OOM = oomKills(c.config.OOMFile) > 0
	c.config.Process.Env = nil // secrets have no business here any more
	s.mu.Unlock()
	s.publish(c)
	s.mu.Lock()
	c.recorded = true
	s.mu.Unlock()
}

func waitShortly(wg *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(200 * time.Millisecond):
	}
}

// oomKills reads the kernel's count of the container's processes that were killed for want of memory.
func oomKills(path string) int {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(data), "\n") {
		if text, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ := strconv.Atoi(strings.TrimSpace(text))
			return n
		}
	}
	return 0
}

// publish writes a container's status to its folder and to whoever watches.
func (s *shim) publish(c *container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := c.status
	data, err := json.Marshal(&status)
	if err == nil {
		err = writeFile(filepath.Join(c.config.Dir, StatusFile), data)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "write the status of a container:", err)
	}
	for w := range s.watchers {
		w.answer(Answer{Status: &status})
	}
}

// writeFile replaces a file at once.
func writeFile(path string, data []byte) error {
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// kill signals a container's first process. When that ends, the kernel ends all others of its PID namespace.
func (s *shim) kill(id string, sig int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	switch {
	case c == nil:
		return fmt.Errorf("no container %s", id)
	case c.status.PID == 0:
		return nil
	}
	return c.process.signal(unix.Signal(sig))
}

// killAll kills the processes of a container, in whichever PID namespace they are.
func killAll(cgroups []string) {
	if len(cgroups) == 0 {
		return
	}
	members := func() map[int]bool {
		out := map[int]bool{}
		data, _ := os.ReadFile(cgroups[0] + "/cgroup.procs")
		for _, line := range strings.Fields(string(data)) {
			if pid, err := strconv.Atoi(line); err == nil {
				out[pid] = true
			}
		}
		return out
	}
	for range 100 {
		list := members()
		if len(list) == 0 {
			return
		}
		for pid := range list {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue
			}
			if members()[pid] { // the number is still that of a member
				_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			_ = unix.Close(fd)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// forget frees what a container that has ended takes.
func (s *shim) forget(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.containers[id]; c != nil && c.status.Running() {
		return fmt.Errorf("container %s runs", id)
	}
	delete(s.containers, id)
	return nil
}

// stop kills everything and ends the process, once all ends are recorded.
func (s *shim) stop() { s.stopping.Do(s.end) }

func (s *shim) end() {
	for range 100 {
		running := false
		s.mu.Lock()
		for _, c := range s.containers {
			running = running || c.launched && !c.recorded
			if c.process.file != nil {
				_ = c.process.signal(unix.SIGKILL)
			}
		}
		s.mu.Unlock()
		if !running {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = os.Remove(filepath.Join(s.dir, SocketFile))
	os.Exit(0)
}

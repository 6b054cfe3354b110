package shim

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// job is a process to start.
type job struct {
	name  string // initName or execName
	order order
	stdio [3]*os.File
	flags uintptr // namespaces to make
	// process is the one whose namespaces the order speaks of.
	process *os.File
	// terminal gets the other end of the process's terminal, if it has one.
	terminal chan<- *os.File
	done     func(unix.WaitStatus)
}

// process is one that runs. Its descriptor is never another's, as its number may be once it has ended.
type process struct {
	pid  int
	file *os.File
}

func (p process) signal(sig unix.Signal) error {
	err := unix.PidfdSendSignal(int(p.file.Fd()), sig, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// spawn starts a process and returns when it has executed its program, or why it could not.
func (s *shim) spawn(j *job) (_ process, err error) {
	config, err := json.Marshal(j.order)
	if err != nil {
		return process{}, err
	}
	configR, configW, err := os.Pipe()
	if err != nil {
		return process{}, err
	}
	defer configR.Close()
	defer configW.Close()
	report, end, err := newReport()
	if err != nil {
		return process{}, err
	}
	defer report.close()
	files := []*os.File{j.stdio[0], j.stdio[1], j.stdio[2], configR, end}
	done := j.done
	if j.process != nil {
		files = append(files, j.process)
	}
	if j.order.Join {
		s.joining(1)
		defer s.joining(-1)
		done = report.helperEnded
	}
	stage, err := s.begin([]string{j.name}, files, j.flags, done)
	_ = end.Close()
	_ = configR.Close() // it alone reads: what it does not read, because it was killed, must not be waited for
	if err != nil {
		return process{}, err
	}
	runs := stage
	defer func() {
		if err != nil || runs != stage {
			_ = stage.file.Close()
		}
	}()
	// It waits for its configuration, so it is in its control groups before it does anything.
	err = join(j.order.Cgroups, stage.pid)
	if err == nil {
		if _, err = configW.Write(config); errors.Is(err, unix.EPIPE) {
			err = nil // how it ended says more
		}
	}
	_ = configW.Close()
	if err != nil {
		_ = stage.signal(unix.SIGKILL)
		return process{}, err
	}
	if err = report.hear(&j.order.Process, j.terminal, true, func(p process) { runs = p; s.expect(p.pid, j.done) }); err != nil {
		_ = stage.signal(unix.SIGKILL)
		if runs != stage {
			_ = runs.signal(unix.SIGKILL)
			_ = runs.file.Close()
		}
		return process{}, err
	}
	if j.order.Join && runs == stage {
		return process{}, errors.New("the process that starts it was killed")
	}
	return runs, nil
}

// begin starts this program under another name, on the thread that starts all. It sees itself to it that it ends with the shim: package
// syscall would take a process in another PID namespace, which has no parent there, for an orphan.
func (s *shim) begin(args []string, files []*os.File, flags uintptr, done func(unix.WaitStatus)) (p process, err error) {
	pidfd := -1
	attr := &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOMAXPROCS=1"}, Sys: &syscall.SysProcAttr{Setsid: true, Cloneflags: flags, PidFD: &pidfd},
	}
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	ready := make(chan struct{})
	s.spawns <- func() {
		defer close(ready)
		s.mu.Lock()
		defer s.mu.Unlock()
		if p.pid, err = syscall.ForkExec("/proc/self/exe", args, attr); err == nil {
			s.processes[p.pid] = done
		}
	}
	<-ready
	if err != nil {
		return p, fmt.Errorf("start a process: %w", err)
	}
	if pidfd < 0 {
		_ = unix.Kill(p.pid, unix.SIGKILL)
		return p, errors.New("start a process: the kernel gives no descriptors of processes (Linux 5.12 or later is needed)")
	}
	p.file = os.NewFile(uintptr(pidfd), "process")
	return p, nil
}

// joining counts the starts whose processes the shim has not begun itself. While there are any, who ended unknown is remembered.
func (s *shim) joining(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expected += n; s.expected == 0 {
		clear(s.unknown)
	}
}

// expect says what to do when a process ends that a stage forked. It may have already.
func (s *shim) expect(pid int, done func(unix.WaitStatus)) {
	s.mu.Lock()
	status, ended := s.unknown[pid]
	if ended {
		delete(s.unknown, pid)
	} else {
		s.processes[pid] = done
	}
	s.mu.Unlock()
	if ended {
		done(status)
	}
}

// report is what a stage tells the shim, in packets.
type report struct {
	mu     sync.Mutex
	fd     int
	closed bool
}

func newReport() (*report, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	return &report{fd: pair[0]}, os.NewFile(uintptr(pair[1]), "report"), nil
}

func (r *report) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	_ = unix.Close(r.fd)
}

// helperEnded ends the report of a stage that was killed: what it forked holds it open, and waits for a word.
func (r *report) helperEnded(status unix.WaitStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed && (!status.Exited() || status.ExitStatus() != 0) {
		_ = unix.Shutdown(r.fd, unix.SHUT_RDWR)
	}
}

// hear reads a stage's report to its end: nothing if all went well, perhaps with a terminal, and with a process that it forked. If that
// waits for a word, it gets it once it has been noted.
func (r *report) hear(p *Process, terminal chan<- *os.File, waits bool, forked func(process)) error {
	var problem error
	buf, rights := make([]byte, 2*maxError), make([]byte, unix.CmsgSpace(4))
	told := false
	for {
		n, oobn, _, _, err := unix.Recvmsg(r.fd, buf, rights, unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		switch {
		case err == nil || problem != nil:
		case errors.Is(err, unix.ECONNRESET):
			return errors.New("it was killed while it was started")
		default:
			return err
		}
		if n <= 0 {
			return problem
		}
		file := firstFile(rights[:oobn])
		switch {
		case buf[0] == terminalMark && file != nil && terminal != nil:
			select {
			case terminal <- file:
			default: // there is one already
				_ = file.Close()
			}
			continue
		case buf[0] == processMark && file != nil && n == 5 && !told && isProcess(file, binary.NativeEndian.Uint32(buf[1:])):
			told = true
			forked(process{int(binary.NativeEndian.Uint32(buf[1:])), file})
			if waits {
				_, _ = unix.Write(r.fd, []byte{0}) // one that is gone has said why
			}
			continue
		}
		if file != nil {
			_ = file.Close()
		}
		if f, ok := readFailure(buf[:n]); ok {
			if problem = fmt.Errorf("step %d of starting it: %w", f.index, unix.Errno(f.errno)); f.exec {
				problem = notExecuted(p, f)
			}
			continue
		}
		problem = errors.New(string(buf[:n]))
	}
}

// isProcess says whether a file stands for the living process of a number. Whoever may look into the one that reports could say anything:
// the kernel is believed, and nobody else.
func isProcess(file *os.File, pid uint32) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", file.Fd()))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "Pid:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(text))
			return err == nil && n > 1 && uint32(n) == pid
		}
	}
	return false
}

func join(cgroups []string, pid int) error {
	for _, dir := range cgroups {
		if err := os.WriteFile(dir+"/cgroup.procs", fmt.Append(nil, pid), 0); err != nil {
			return fmt.Errorf("enter the control group: %w", err)
		}
	}
	return nil
}

func firstFile(rights []byte) *os.File {
	files := receivedFiles(rights)
	for _, f := range files[min(1, len(files)):] {
		_ = f.Close()
	}
	if len(files) == 0 {
		return nil
	}
	return files[0]
}

func receivedFiles(rights []byte) (out []*os.File) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			out = append(out, os.NewFile(uintptr(fd), "received"))
		}
	}
	return out
}

// startPause starts the process that holds the PID namespace which containers share. When it ends, so do they, and the sandbox.
func (s *shim) startPause() error {
	path := filepath.Join(s.dir, procDir)
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	null, err := OpenNull()
	if err != nil {
		return err
	}
	defer null.Close()
	report, end, err := newReport()
	if err != nil {
		return err
	}
	defer report.close()
	s.joining(1)
	defer s.joining(-1)
	// Not as an argument: containers see those.
	configR, configW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer configR.Close()
	_, err = configW.WriteString(path)
	_ = configW.Close()
	if err != nil {
		return err
	}
	helper, err := s.begin([]string{pauseName}, []*os.File{null, null, null, configR, end}, 0, report.helperEnded)
	_ = end.Close()
	if err != nil {
		return err
	}
	defer helper.file.Close()
	err = report.hear(&Process{}, nil, false, func(p process) {
		s.pause = p
		s.expect(p.pid, func(unix.WaitStatus) { go s.stop() })
	})
	if err == nil && s.pause.file == nil {
		err = errors.New("it was killed")
	}
	if err != nil {
		return fmt.Errorf("start the process that holds the PID namespace: %w", err)
	}
	return nil
}

// exec starts a further process in a container.
func (s *shim) exec(id string, e *Exec, stdio [3]*os.File, terminal chan<- *os.File, done func(unix.WaitStatus)) (process, error) {
	s.mu.Lock()
	c := s.containers[id]
	var config Container
	var first *os.File
	var err error
	if c != nil && c.status.PID != 0 && c.process.file != nil {
		config = c.config
		var fd int
		if fd, err = unix.FcntlInt(c.process.file.Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			first = os.NewFile(uintptr(fd), "process")
		}
	}
	s.mu.Unlock()
	if err != nil {
		return process{}, err
	}
	if first == nil {
		return process{}, fmt.Errorf("container %s does not run", id)
	}
	defer first.Close()
	config.Process.Args, config.Process.TTY = e.Args, e.TTY
	j := &job{name: execName, order: order{Container: &config, Enter: true, Join: true}, stdio: stdio, process: first, terminal: terminal, done: done}
	return s.spawn(j)
}

// killGroup kills a process that was started in a container, and those that it started and that have not left its group.
func (s *shim) killGroup(p process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.pid > 1 && s.processes[p.pid] != nil { // so it has not been reaped, and the numbers are still its own
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	}
	_ = p.signal(unix.SIGKILL)
}

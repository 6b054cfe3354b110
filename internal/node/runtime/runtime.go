// Package runtime runs Pods' containers as processes in namespaces, through one shim process for each Pod. It keeps all it knows in a
// folder, so that another process can go on with it. It knows nothing of the API, of images or of networks: it gets folders to run
// from, and offers a network namespace to configure.
package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime/shim"
	"portal/internal/rmtree"
)

// Options are a Runtime's.
type Options struct {
	// Dir is where the Pods' folders are. It should not survive a restart of the machine, as no process does.
	Dir string
	// Logs is where logs are, in a folder for each Pod.
	Logs string
	// CgroupRoot is the path of the control groups below which those of Pods are made.
	CgroupRoot string
	// PodProcesses is the most that a Pod may have at once.
	PodProcesses int64
}

// Runtime starts and finds Pods.
type Runtime struct {
	Options
	Cgroups *Cgroups
	program *os.File
}

// shims is the control group of all shims. They are not in the agent's: a service manager that ends the agent would end them.
const shims = "shims"

// shimOOMScore is that of all shims: below that of any container.
const shimOOMScore = "-998"

// New finds out what the machine offers, and makes folders and control groups.
func New(o Options) (*Runtime, error) {
	c, err := FindCgroups(o.CgroupRoot)
	if err != nil {
		return nil, err
	}
	if err := c.Prepare(); err != nil {
		return nil, err
	}
	if err := c.make(shims); err != nil {
		return nil, err
	}
	for _, dir := range []string{o.Dir, o.Logs} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	program, err := readOnlyProgram()
	if err != nil {
		return nil, err
	}
	return &Runtime{Options: o, Cgroups: c, program: program}, nil
}

// readOnlyProgram opens this program through a mount that can't be written. Processes that run it are seen in containers for a moment,
// where /proc/PID/exe leads to it.
func readOnlyProgram() (*os.File, error) {
	path, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, "/proc/self/exe", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount %s read-only: %w (Linux 5.12 or later is needed)", path, err)
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return nil, fmt.Errorf("mount %s read-only: %w (Linux 5.12 or later is needed)", path, err)
	}
	return os.NewFile(uintptr(tree), path), nil
}

// SandboxConfig is what a Pod's containers share.
type SandboxConfig struct {
	shim.Sandbox
	HostNetwork, HostIPC bool
	Limits               Limits
	// Meta is the caller's own, and comes back from Pods.
	Meta json.RawMessage
}

const (
	metaFile = "meta.json"
	// unfinishedFile is there from a sandbox's creation until its caller has done the rest.
	unfinishedFile = "unfinished"
)

// Pod is a Pod's folder and, if it lives, its shim.
type Pod struct {
	runtime *Runtime
	UID     string
	Dir     string
	Meta    json.RawMessage
	Sandbox shim.Sandbox
	PID     int // of the shim when this was read; 0: it was gone
	// Unfinished is a sandbox whose caller ended before Finish: it may lack its network or its volumes.
	Unfinished bool
}

func (r *Runtime) dir(uid string) string { return filepath.Join(r.Dir, uid) }

func (r *Runtime) group(uid string) string { return "pod" + uid }

// Create makes a Pod's namespaces and starts its shim. What an earlier sandbox of it recorded stays. When the caller has connected it and
// made its volumes, it calls Finish.
func (r *Runtime) Create(ctx context.Context, uid string, config SandboxConfig) (*Pod, error) {
	if strings.Trim(uid, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") != "" || uid == "" {
		return nil, fmt.Errorf("the Pod's UID %q can't be a folder's name", uid)
	}
	config.OwnNetwork, config.OwnIPC = !config.HostNetwork, !config.HostIPC
	p := &Pod{runtime: r, UID: uid, Dir: r.dir(uid), Meta: config.Meta, Sandbox: config.Sandbox}
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return nil, err
	}
	// What is left of an earlier one must not be in the way, nor go on: processes in the machine's PID namespace outlive a shim that was killed.
	if err := p.Stop(ctx); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(p.Dir, unfinishedFile), nil, 0o600); err != nil {
		return nil, err
	}
	for name, v := range map[string]any{shim.SandboxFile: config.Sandbox, metaFile: config.Meta} {
		if err := writeJSON(filepath.Join(p.Dir, name), v); err != nil {
			return nil, err
		}
	}
	limits := config.Limits
	limits.Processes = r.PodProcesses
	err := r.Cgroups.Make(r.group(uid), limits)
	if err == nil {
		err = p.launch(config)
	}
	if err != nil {
		return nil, errors.Join(err, p.Stop(context.WithoutCancel(ctx)))
	}
	return p, nil
}

// Finish records that the sandbox has all that its containers need.
func (p *Pod) Finish() error { return os.Remove(filepath.Join(p.Dir, unfinishedFile)) }

// launch starts the shim in new namespaces.
func (p *Pod) launch(config SandboxConfig) error {
	flags := uintptr(unix.CLONE_NEWNS)
	if !config.HostNetwork {
		flags |= unix.CLONE_NEWNET | unix.CLONE_NEWUTS
	}
	if !config.HostIPC {
		flags |= unix.CLONE_NEWIPC
	}
	readyR, readyW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer readyR.Close()
	log, err := os.OpenFile(filepath.Join(p.Dir, shim.LogFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		_ = readyW.Close()
		return err
	}
	defer log.Close()
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		_ = readyW.Close()
		return err
	}
	defer null.Close()
	pid, err := syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", p.runtime.program.Fd()), []string{shim.ShimName, p.Dir}, &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOMAXPROCS=1"}, Files: []uintptr{null.Fd(), log.Fd(), log.Fd(), readyW.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true, Cloneflags: flags},
	})
	_ = readyW.Close()
	if err != nil {
		return fmt.Errorf("start the shim: %w", err)
	}
	// It is this process's child for as long as this process lives.
	go reap(pid)
	// When memory is scarce, its containers go before it does. Where this process may not say so, it is as others are.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(shimOOMScore), 0)
	joined := p.runtime.Cgroups.Join(shims, pid)
	if joined != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	said, err := io.ReadAll(readyR)
	if joined != nil && (len(said) == 0 || string(said) == "ready") {
		return joined
	}
	// One that has ended already can't be moved, but has said why.
	if err == nil && string(said) != "ready" {
		err = fmt.Errorf("start the shim: %s", strings.TrimSpace(string(said)))
	}
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		return err
	}
	p.PID = pid
	return nil
}

// reap waits until a child ends. It is parked meanwhile, and takes no thread: there is one for each Pod.
func reap(pid int) {
	ended := func(options int) bool {
		for {
			n, err := unix.Wait4(pid, nil, options, nil)
			if !errors.Is(err, unix.EINTR) {
				return n == pid || err != nil
			}
		}
	}
	if fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK); err == nil {
		f := os.NewFile(uintptr(fd), "pidfd")
		defer f.Close()
		over := false
		if raw, err := f.SyscallConn(); err == nil {
			_ = raw.Read(func(uintptr) bool { over = ended(unix.WNOHANG); return over })
		}
		if over {
			return
		}
	}
	ended(0) // a kernel before 5.10
}

func writeJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Lookup finds one Pod that this or an earlier process created, alive or not, or only in part; nil: there is nothing.
func (r *Runtime) Lookup(uid string) *Pod {
	if _, err := os.Stat(r.dir(uid)); err != nil {
		return nil
	}
	return r.open(uid)
}

// open reads a Pod's folder. One that was being created when the agent ended has no complete files: it can be removed all the same.
func (r *Runtime) open(uid string) *Pod {
	p := &Pod{runtime: r, UID: uid, Dir: r.dir(uid)}
	if data, err := os.ReadFile(filepath.Join(p.Dir, metaFile)); err == nil {
		p.Meta = data
	}
	if data, err := os.ReadFile(filepath.Join(p.Dir, shim.SandboxFile)); err == nil {
		_ = json.Unmarshal(data, &p.Sandbox)
	}
	if _, err := os.Stat(filepath.Join(p.Dir, unfinishedFile)); err == nil {
		p.Unfinished = true
	}
	p.PID = p.alive()
	return p
}

// Pods finds all Pods that this or an earlier process created, alive or not.
func (r *Runtime) Pods() ([]*Pod, error) {
	entries, err := os.ReadDir(r.Dir)
	if err != nil {
		return nil, err
	}
	var out []*Pod
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		out = append(out, r.open(e.Name()))
	}
	return out, nil
}

// alive is the shim's process, if there is one. Only the shim itself answers at its socket.
func (p *Pod) alive() int {
	c, err := shim.Dial(p.Dir)
	switch {
	case err == nil:
		c.Release()
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return 0
	}
	// Whatever else goes wrong says nothing about it: one that does not answer in time, or too many open files here.
	data, err := os.ReadFile(filepath.Join(p.Dir, shim.PIDFile))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0
	}
	return pid
}

// isShim says whether a process is the Pod's shim: the number may be another's by now.
func (p *Pod) isShim(pid int) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && string(line) == shim.ShimName+"\x00"+p.Dir+"\x00"
}

// Alive says whether the shim lives.
func (p *Pod) Alive() bool { return p.PID != 0 && p.alive() == p.PID }

// NetworkNamespace is the path of the Pod's, while its shim lives.
func (p *Pod) NetworkNamespace() string { return fmt.Sprintf("/proc/%d/ns/net", p.PID) }

// Inside is a path in the shim's mount namespace, where the Pod's tmpfs are.
func (p *Pod) Inside(path string) string { return fmt.Sprintf("/proc/%d/root%s", p.PID, path) }

// ContainerDir is a container's folder.
func (p *Pod) ContainerDir(id string) string { return filepath.Join(p.Dir, "containers", id) }

// LogDir is where the Pod's logs are.
func (p *Pod) LogDir() string { return filepath.Join(p.runtime.Logs, p.UID) }

// Refused is how often the Pod could not start a process because it has as many as it may.
func (p *Pod) Refused() int64 { return p.runtime.Cgroups.Refused(p.runtime.group(p.UID)) }

// end ends the shim and all processes.
func (p *Pod) end(ctx context.Context) {
	if pid := p.alive(); pid != 0 {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_, _ = p.ask(ctx, &shim.Request{Op: shim.OpStop}, nil)
		for range 200 {
			if p.alive() == 0 {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		if p.alive() == pid && p.isShim(pid) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// Stop ends all processes of the Pod, and with them its namespaces and mounts. Logs and statuses stay.
func (p *Pod) Stop(ctx context.Context) error {
	p.end(ctx)
	return p.runtime.Cgroups.Remove(p.runtime.group(p.UID))
}

// Remove stops the Pod and removes all that is left of it.
func (p *Pod) Remove(ctx context.Context) error {
	if err := p.Stop(ctx); err != nil {
		return err
	}
	return errors.Join(rmtree.Remove(p.LogDir()), rmtree.Remove(p.Dir))
}

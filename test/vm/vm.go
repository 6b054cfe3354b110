// Package vm runs commands in a virtual machine, for what the kernel of a test machine may lack: IPVS, SCTP, dummy
// devices. The guest sees the host's files read-only (virtiofs) and has /tmp and /run of its own; nothing of it stays.
// There need be no KVM: under emulation all is some ten times slower.
package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Spec says what to run.
type Spec struct {
	// Command is a shell script. The host's files are where they are on the host, but for /tmp and /run.
	Command string
	// Modules are loaded before it; nil: the package's Modules.
	Modules []string
	// Timeout is for all from start to end; zero: two minutes.
	Timeout time.Duration
	// Memory in MiB; zero: 1024.
	Memory int
}

// Result is what became of it.
type Result struct {
	Output string
	Exit   int
	Took   time.Duration
}

// Need ends the test where the machine can't be had: it fails for want of a tool, and is skipped where the user is not
// root, who alone can serve the host's files to it.
func Need(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("the virtual machine is served the host's files, which needs root")
	}
	if err := new(machine).find(); err != nil {
		t.Fatalf("no virtual machine: %v (make vm)", err)
	}
}

// Run boots the machine, runs the command and returns when the machine is off. What keeps it from running at all ends the
// test, as Need does.
func Run(t testing.TB, s Spec) Result {
	t.Helper()
	Need(t)
	for again := false; ; again = true {
		m := machine{dir: t.TempDir(), spec: s}
		if err := m.find(); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		out, err := m.run()
		text, exit := out, 0
		if err == nil {
			text, exit, err = verdict(out)
		}
		if err == nil {
			return Result{text, exit, time.Since(start)}
		}
		// Emulated processors err, too: one in some dozens of runs ends with flags that no instruction sets, and a double
		// fault. What the command has done to the kernel would do it twice.
		if !again && strings.Contains(m.console(), "Kernel panic") {
			t.Logf("the guest's kernel gave up; once more. It said:\n%s", m.console())
			continue
		}
		t.Fatalf("%v\nwhat the command said:\n%s\nwhat the kernel said:\n%s", err, out, m.console())
	}
}

// Host is where the guest has the host's files as they are. At the root it has them too, but for /tmp and /run, which
// are its own.
const Host = "/run/vm/host"

// Dir is where the kernel and what is made of it are kept.
func Dir() string {
	_, here, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(here), "../../.cache/vm")
}

type machine struct {
	dir                            string
	spec                           Spec
	kernel, qemu, busybox, virtiof string
}

// virtiofsds are the places where distributions have the server of the host's files.
var virtiofsds = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"}

func (m *machine) find() (err error) {
	m.kernel = Dir()
	if _, err := os.Stat(filepath.Join(m.kernel, "vmlinuz")); err != nil {
		return err
	}
	if m.qemu, err = exec.LookPath("qemu-system-x86_64"); err != nil {
		return err
	}
	if m.busybox, err = exec.LookPath("busybox"); err != nil {
		return err
	}
	for _, path := range virtiofsds {
		if _, err := os.Stat(path); err == nil {
			m.virtiof = path
			return nil
		}
	}
	return fmt.Errorf("virtiofsd is in none of %s", strings.Join(virtiofsds, ", "))
}

// run starts the server of files and the machine, and waits for both to end.
func (m *machine) run() (output string, err error) {
	timeout := m.spec.Timeout
	if timeout == 0 {
		timeout = 2 * time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	// What is started dies with the thread that started it, should the test be killed; so the thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := m.image(); err != nil {
		return "", err
	}
	files := m.start(ctx, m.virtiof, m.shareArgs()...)
	if err := files.Start(); err != nil {
		return "", err
	}
	defer files.Wait()
	defer files.Process.Kill()
	if err := waitFor(ctx, m.path("files")); err != nil {
		return "", fmt.Errorf("the server of files did not start: %w: %s", err, files.Stderr)
	}
	guest := m.start(ctx, m.qemu, m.machineArgs()...)
	if err = guest.Start(); err == nil {
		// Tests that run beside this one may be in more of a hurry than an emulation.
		_ = syscall.Setpriority(syscall.PRIO_PROCESS, guest.Process.Pid, 5)
		err = guest.Wait()
	}
	text, readErr := os.ReadFile(m.path("output"))
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("not done after %v", timeout)
	case err != nil:
		err = fmt.Errorf("%w: %s", err, guest.Stderr)
	}
	return string(text), errors.Join(err, readErr)
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

func (m *machine) console() string {
	b, _ := os.ReadFile(m.path("console"))
	return string(b)
}

func (m *machine) start(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = &bytes.Buffer{}
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// image makes the initramfs: the modules, and the command as a second archive behind it, as kernels allow.
func (m *machine) image() error {
	modules := m.spec.Modules
	if modules == nil {
		modules = Modules
	}
	base, err := initramfs(m.kernel, m.busybox, modules)
	if err != nil {
		return err
	}
	second := &archive{}
	second.add("command", 0o100755, []byte(m.spec.Command))
	if err := second.write(m.path("second")); err != nil {
		return err
	}
	out, err := os.Create(m.path("initramfs"))
	if err != nil {
		return err
	}
	defer out.Close()
	for _, part := range []string{base, m.path("second")} {
		in, err := os.Open(part)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, in)
		in.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// shareArgs serve the host's root. Of the two programs of this name, the newer knows other words.
func (m *machine) shareArgs() []string {
	if strings.Contains(m.virtiof, "libexec") {
		return []string{"--socket-path=" + m.path("files"), "--shared-dir=/", "--sandbox=chroot", "--cache=always"}
	}
	return []string{"--socket-path=" + m.path("files"), "-f", "-o", "source=/", "-o", "sandbox=chroot", "-o", "cache=always", "-o", "log_level=err"}
}

func (m *machine) machineArgs() []string {
	size := m.spec.Memory
	if size == 0 {
		size = 1024
	}
	return []string{
		"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", strconv.Itoa(size), "-no-reboot", "-nodefaults", "-display", "none", "-monitor", "none",
		"-kernel", filepath.Join(m.kernel, "vmlinuz"), "-initrd", m.path("initramfs"),
		"-append", "console=ttyS0 panic=-1 quiet",
		"-serial", "file:" + m.path("console"), "-serial", "file:" + m.path("output"),
		"-object", fmt.Sprintf("memory-backend-memfd,id=mem,size=%dM,share=on", size), "-numa", "node,memdev=mem",
		"-chardev", "socket,id=files,path=" + m.path("files"), "-device", "vhost-user-fs-pci,chardev=files,tag=host",
	}
}

func waitFor(ctx context.Context, path string) error {
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

var exitLine = regexp.MustCompile(`(?s)^(.*)vm-exit (\d+)\n`)

// verdict parts what the command said from its exit status.
func verdict(out string) (string, int, error) {
	out = strings.ReplaceAll(out, "\r\n", "\n")
	m := exitLine.FindStringSubmatch(out)
	if m == nil {
		return "", 0, errors.New("the machine went off before the command had ended")
	}
	exit, err := strconv.Atoi(m[2])
	return m[1], exit, err
}

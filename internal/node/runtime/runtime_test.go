package runtime

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime/shim"
)

// usual are the capabilities that containers have unless they say otherwise.
const usual = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FSETID | 1<<unix.CAP_FOWNER | 1<<unix.CAP_MKNOD | 1<<unix.CAP_NET_RAW |
	1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETFCAP | 1<<unix.CAP_SETPCAP | 1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_SYS_CHROOT | 1<<unix.CAP_KILL | 1<<unix.CAP_AUDIT_WRITE

func newRuntime(t *testing.T) *Runtime {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("namespaces need root")
	}
	dir := t.TempDir()
	root := fmt.Sprintf("portal-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	r, err := New(Options{Dir: filepath.Join(dir, "pods"), Logs: filepath.Join(dir, "logs"), CgroupRoot: root, PodProcesses: 200})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pods, err := r.Pods()
		if err != nil {
			t.Error(err)
		}
		for _, p := range pods {
			if err := p.Remove(context.Background()); err != nil {
				t.Error(err)
			}
		}
		if err := r.Cgroups.Remove(""); err != nil {
			t.Error(err)
		}
		if mounts, _ := os.ReadFile("/proc/self/mounts"); bytes.Contains(mounts, []byte(dir)) {
			t.Errorf("mounts are left:\n%s", mounts)
		}
	})
	return r
}

func create(t *testing.T, r *Runtime, uid string, mend ...func(*SandboxConfig)) *Pod {
	t.Helper()
	config := SandboxConfig{Sandbox: shim.Sandbox{ID: "s1", Hostname: "pod-" + uid}, Meta: json.RawMessage(`{"a":1}`)}
	for _, m := range mend {
		m(&config)
	}
	p, err := r.Create(t.Context(), uid, config)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// script is a container of the machine's own programs that runs a shell script.
func script(p *Pod, id, text string) shim.Container {
	return shim.Container{
		ID: id, Root: shim.Root{Lower: []string{"/"}, Hide: []string{p.runtime.Dir}},
		Log: shim.Log{Path: filepath.Join(p.LogDir(), id+".log")},
		Process: shim.Process{
			Args: []string{"sh", "-c", text}, Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, Capabilities: usual,
		},
	}
}

// wait waits for a container to end.
func wait(t *testing.T, p *Pod, id string) *shim.Status {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		list, err := p.Statuses()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if s.ID == id && !s.Running() {
				return s
			}
		}
	}
	t.Fatalf("%s does not end", id)
	return nil
}

// text is what a container has written, without the times.
func text(t *testing.T, p *Pod, id string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(p.LogDir(), id+".log"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, line := range strings.Split(strings.TrimSuffix(string(data), "\n"), "\n") {
		if f := strings.SplitN(line, " ", 4); len(f) == 4 {
			if _, err := time.Parse(time.RFC3339Nano, f[0]); err != nil {
				t.Errorf("log line %q: %v", line, err)
			}
			out = append(out, f[3])
		}
	}
	return strings.Join(out, "\n")
}

// run runs a script to its end.
func run(t *testing.T, p *Pod, c shim.Container, l Limits) (*shim.Status, string) {
	t.Helper()
	if err := p.Start(t.Context(), c, l); err != nil {
		t.Fatal(err)
	}
	s := wait(t, p, c.ID)
	return s, text(t, p, c.ID)
}

func TestRunsToItsEnd(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `echo to stdout; echo to stderr >&2; printf unfinished; exit 3`)
	c.Meta = json.RawMessage(`{"name":"c"}`)
	s, _ := run(t, p, c, Limits{})
	if s.ExitCode != 3 || s.Signal != 0 || s.OOM || s.StartError != "" || string(s.Meta) != `{"name":"c"}` || s.Sandbox != "s1" || s.Finished.Before(s.Started) {
		t.Errorf("%+v", s)
	}
	data, _ := os.ReadFile(c.Log.Path)
	for _, want := range []string{" stdout F to stdout\n", " stderr F to stderr\n", " stdout P unfinished\n"} {
		if !strings.Contains(string(data), want) {
			t.Errorf("the log lacks %q:\n%s", want, data)
		}
	}
}

// TestKilledWhileStarted: a container that is killed before it has read all about itself, for want of memory, has ended.
func TestKilledWhileStarted(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", "true")
	for i := range 200 {
		c.Process.Env = append(c.Process.Env, fmt.Sprintf("V%d=%s", i, strings.Repeat("x", 4<<10)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err := p.Start(ctx, c, Limits{Memory: 256 << 10})
	var failed *StartError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	if s := wait(t, p, "c0"); s.ExitCode == 0 {
		t.Errorf("%+v", s)
	}
}

func TestCannotStart(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	for i, c := range []struct {
		mend func(*shim.Container)
		want string
	}{
		{func(c *shim.Container) { c.Process.Args = []string{"no-such-program"} }, "executable file not found in $PATH"},
		{func(c *shim.Container) { c.Process.Args = []string{"/etc/passwd"} }, "permission denied"},
		{func(c *shim.Container) { c.Process.Args = nil }, "no command"},
		{func(c *shim.Container) { c.Process.Dir = "relative" }, "must be an absolute path"},
		{func(c *shim.Container) { c.Process.Dir = "/etc/passwd" }, "workingDir"},
		{func(c *shim.Container) { c.Process.Dir = "/proc/self/root/made" }, "workingDir"},
		{func(c *shim.Container) { c.Process.Dir = "/proc/self/cwd" }, "workingDir"},
		{func(c *shim.Container) { c.Root.Lower = []string{"/no/such/folder"} }, "mount the image's file system"},
		{func(c *shim.Container) { c.Mounts = []shim.Mount{{Source: "/no/such/folder", Target: "/x"}} }, "volume at /x"},
		{func(c *shim.Container) { c.Mounts = []shim.Mount{{Source: "/etc", Target: "/"}} }, "nothing can be mounted on /"},
	} {
		k := script(p, fmt.Sprintf("c%d", i), "true")
		c.mend(&k)
		err := p.Start(t.Context(), k, Limits{})
		var failed *StartError
		if !errors.As(err, &failed) || !strings.Contains(failed.Message, c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
		if s := wait(t, p, k.ID); s.ExitCode != 128 || s.StartError == "" {
			t.Errorf("%+v", s)
		}
	}
}

// TestWhatAContainerSees: its own processes, name, network, devices and mounts, and nothing else.
func TestWhatAContainerSees(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	for i, c := range []struct{ script, want string }{
		{`echo $$; ls -d /proc/[0-9]* | wc -l | xargs test 8 -gt && echo few`, "1\nfew"},
		{`hostname`, "pod-a"},
		{`ls /sys/class/net`, "lo"},
		{`ls /dev | tr '\n' ' '`, "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"},
		{`cat /proc/keys /proc/timer_list /proc/kcore 2>/dev/null | wc -c; ls /proc/acpi /sys/firmware 2>/dev/null | grep -v :`, "0"},
		{`echo x > /written && cat /written; test -e /etc/passwd && echo passwd`, "x\npasswd"},
		{`grep -E '^(CapInh|CapPrm|CapEff|CapBnd|CapAmb|Seccomp|NoNewPrivs):' /proc/self/status | tr -s '\t\n' '  '`,
			"CapInh: 0000000000000000 CapPrm: 00000000a80425fb CapEff: 00000000a80425fb CapBnd: 00000000a80425fb CapAmb: 0000000000000000 NoNewPrivs: 0 Seccomp: 2 "},
		{`ls -l /proc/self/fd | grep -c -- '->' | xargs test 5 -gt && echo none open`, "none open"},
		{`cat /proc/self/cgroup | grep -E 'memory|pids|0::' | cut -d: -f3 | sort -u`, "/"},
		{`grep -E '^Sig(Ign|Blk):' /proc/self/status | cut -f2 | sort -u`, "0000000000000000"},
		{`umask; pwd; id -u; cat /proc/1/oom_score_adj`, "0022\n/\n0\n0"},
		{`awk '$3=="tmpfs" || $3=="overlay" {print $4}' /proc/mounts | grep -c -v nodev`, "0"},
	} {
		_, got := run(t, p, script(p, fmt.Sprintf("c%d", i), c.script), Limits{})
		if strings.TrimSpace(got) != strings.TrimSpace(c.want) {
			t.Errorf("%s\ngot  %q\nwant %q", c.script, got, c.want)
		}
	}
	if _, err := os.Stat("/written"); err == nil {
		t.Error("a file was written to the machine's root")
	}
}

// TestSysctls: a Pod's settings are made in its own namespaces, and no others are.
func TestSysctls(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a", func(c *SandboxConfig) {
		c.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "77", "kernel.shm_rmid_forced": "1", "net.ipv4.conf.default.accept_redirects": "0"}
	})
	if _, got := run(t, p, script(p, "c0", `cat /proc/sys/net/ipv4/ip_unprivileged_port_start`), Limits{}); got != "77" {
		t.Errorf("got %q", got)
	}
	for name, config := range map[string]SandboxConfig{
		"kernel.printk_ratelimit":                {},
		"net.ipv4.ip_unprivileged_port_start":    {HostNetwork: true},
		"net.ipv4.conf.default.accept_redirects": {HostNetwork: true},
		"kernel.shm_rmid_forced":                 {HostIPC: true},
	} {
		// The value that it has anyway, so that a machine on which this succeeds is not harmed.
		value, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		if err != nil {
			t.Fatal(err)
		}
		config.Sysctls = map[string]string{name: strings.TrimSpace(string(value))}
		if _, err := r.Create(t.Context(), "b", config); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUserAndRights(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `id -u; id -g; id -G; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | cut -f2; echo x > /dev/stderr; touch /x 2>/dev/null || echo read-only; ulimit -n; pwd`)
	c.Process.UID, c.Process.GID, c.Process.Groups, c.Process.NoNewPrivileges, c.Process.Capabilities = 1000, 2000, []uint32{2000, 3000}, true, 1<<unix.CAP_NET_RAW
	c.Process.Rlimits, c.Process.Dir, c.Root.ReadOnly = []shim.Rlimit{{Resource: unix.RLIMIT_NOFILE, Soft: 99, Hard: 99}}, "/made/for/it", true
	s, got := run(t, p, c, Limits{})
	lines := strings.Split(got, "\n")
	x := slices.Index(lines, "x") // stderr is another stream: where it comes can't be told
	if want := "1000\n2000\n2000 3000\n0000000000000000\n0000000000002000\n1\nread-only\n99\n/made/for/it"; x < 0 || strings.Join(slices.Delete(lines, x, x+1), "\n") != want {
		t.Errorf("%+v: got %q, want %q and x", s, got, want)
	}
}

func TestVolumes(t *testing.T) {
	r := newRuntime(t)
	dir := t.TempDir()
	shm := filepath.Join(dir, "shm")
	p := create(t, r, "a", func(c *SandboxConfig) { c.Tmpfs = []shim.Tmpfs{{Path: shm, Size: 1 << 20, Mode: "1777"}} })
	volume := filepath.Join(dir, "volume")
	for _, d := range []string{filepath.Join(volume, "sub"), filepath.Join(dir, "image", "etc")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// What a container of the Pod, or whoever made the image, could have prepared.
	for link, target := range map[string]string{filepath.Join(volume, "out"): "/etc", filepath.Join(volume, "up"): "../..", filepath.Join(volume, "in"): "sub"} {
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	c := script(p, "c0", `cat /v/sub/f; (echo changed > /ro/f) 2>/dev/null || echo read-only; echo shared > /dev/shm/x; ls /new/deep/er; echo w > /v/written`)
	c.Shm = shm
	if err := os.WriteFile(filepath.Join(volume, "sub", "f"), []byte("content\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.Mounts = []shim.Mount{
		{Source: volume, Target: "/v"}, {Source: volume, Target: "/ro", SubPath: "sub", ReadOnly: true},
		{Source: volume, Target: "/new/deep/er", SubPath: "in"}, {Source: filepath.Join(volume, "sub", "f"), Target: "/etc/hostname"},
	}
	if _, got := run(t, p, c, Limits{}); got != "content\nread-only\nf" {
		t.Errorf("got %q", got)
	}
	if _, err := os.Stat(filepath.Join(volume, "written")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(shm, "x")); err == nil {
		t.Error("the Pod's tmpfs is seen outside of it")
	}
	if data, err := os.ReadFile(p.Inside(filepath.Join(shm, "x"))); err != nil || string(data) != "shared\n" {
		t.Errorf("%q, %v", data, err)
	}
	for i, sub := range []string{"out", "up", "up/etc", "../../etc", "/etc"} {
		k := script(p, fmt.Sprintf("e%d", i), `true`)
		k.Mounts = []shim.Mount{{Source: volume, SubPath: sub, Target: "/v"}}
		if err := p.Start(t.Context(), k, Limits{}); err == nil || !strings.Contains(err.Error(), "subPath") {
			t.Errorf("subPath %s: %v", sub, err)
		}
	}
	// A target that the image leads elsewhere stays in the container.
	if err := os.Symlink("/../../../../../etc", filepath.Join(dir, "image", "trap")); err != nil {
		t.Fatal(err)
	}
	k := script(p, "k0", `/busybox ls /etc; /busybox ls /trap`)
	k.Root.Lower, k.Process.Args[0] = []string{filepath.Join(dir, "image")}, "/sh"
	busybox(t, filepath.Join(dir, "image"))
	k.Mounts = []shim.Mount{{Source: filepath.Join(volume, "sub"), Target: "/trap"}}
	if _, got := run(t, p, k, Limits{}); got != "f\nf" {
		t.Errorf("got %q", got)
	}
}

// busybox makes an image of one program.
func busybox(t *testing.T, dir string) {
	t.Helper()
	data, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"busybox", "sh"} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAnotherAgent finds a Pod again and goes on with it; the Pod notices nothing.
func TestAnotherAgent(t *testing.T) {
	first := newRuntime(t)
	p := create(t, first, "a")
	if err := p.Start(t.Context(), script(p, "c0", `trap 'exit 7' TERM; echo trapped; while :; do sleep 0.05; done`), Limits{}); err != nil {
		t.Fatal(err)
	}
	// The first process of a container gets no signal that it does not handle.
	for end := time.Now().Add(time.Minute); text(t, p, "c0") != "trapped"; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the script does not start")
		}
	}
	second, err := New(first.Options)
	if err != nil {
		t.Fatal(err)
	}
	pods, err := second.Pods()
	if err != nil || len(pods) != 1 || pods[0].PID != p.PID || string(pods[0].Meta) != `{"a":1}` || pods[0].Sandbox.Hostname != "pod-a" {
		t.Fatalf("%+v, %v", pods, err)
	}
	q := pods[0]
	list, err := q.Statuses()
	if err != nil || len(list) != 1 || !list[0].Running() {
		t.Fatalf("%+v, %v", list, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	changes, listed := make(chan *shim.Status, 8), make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { _ = q.Watch(ctx, func() { close(listed) }, func(s *shim.Status) { changes <- s }) })
	<-listed
	if s := <-changes; !s.Running() {
		t.Errorf("%+v", s)
	}
	if err := q.Signal(t.Context(), "c0", syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case s := <-changes:
		if s.Running() || s.ExitCode != 7 {
			t.Errorf("%+v", s)
		}
	case <-time.After(time.Minute):
		t.Error("its end is not reported")
	}
	cancel()
	watching.Wait()
}

// TestRemoveContainer: what has ended can be forgotten, by the shim too; what runs can't.
func TestRemoveContainer(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	run(t, p, script(p, "ended", "true"), Limits{})
	if err := p.Start(t.Context(), script(p, "runs", "sleep 1000"), Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := p.RemoveContainer(t.Context(), "ended"); err != nil {
		t.Error(err)
	}
	if err := p.RemoveContainer(t.Context(), "runs"); err == nil {
		t.Error("a container that runs was removed")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var ids []string
	_ = p.Watch(ctx, cancel, func(s *shim.Status) { ids = append(ids, s.ID) })
	if !slices.Equal(ids, []string{"runs"}) {
		t.Errorf("the shim has %v", ids)
	}
	if list, err := p.Statuses(); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
}

// TestShimKilled: containers end with their shim, and that is known.
func TestShimKilled(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a")
	c := script(p, "c0", `sleep 1000 & sleep 1000`)
	c.Process.UID = 1000 // a change of the user clears what kills it
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	group := filepath.Join(r.Cgroups.dir("poda", "pids"), "c0", "cgroup.procs")
	for end := time.Now().Add(5 * time.Second); lines(group) < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d processes", lines(group))
		}
	}
	if err := unix.Kill(p.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(5 * time.Second); lines(group) > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d processes are left", lines(group))
		}
	}
	pods, err := r.Pods()
	if err != nil || pods[0].PID != 0 {
		t.Errorf("%+v, %v", pods, err)
	}
	if s := wait(t, pods[0], "c0"); s.ExitCode != 137 {
		t.Errorf("%+v", s)
	}
	// The next sandbox is a new one, and remembers.
	q := create(t, r, "a", func(c *SandboxConfig) { c.ID = "s2" })
	if s, _ := run(t, q, script(q, "c1", "exit 0"), Limits{}); s.Sandbox != "s2" {
		t.Errorf("%+v", s)
	}
	if list, _ := q.Statuses(); len(list) != 2 {
		t.Errorf("%+v", list)
	}
}

// TestReplacedSandbox: what outlived its shim ends with the next sandbox, and one that can't be made leaves nothing running or in the way.
func TestReplacedSandbox(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a")
	c := script(p, "c0", `setsid sleep 1000 & exec sleep 1000`)
	c.HostPID = true
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	group := filepath.Join(r.Cgroups.dir("poda", "pids"), "c0", "cgroup.procs")
	for end := time.Now().Add(20 * time.Second); lines(group) < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d processes", lines(group))
		}
	}
	if err := unix.Kill(p.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); p.alive() != 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the shim does not end")
		}
	}
	q := create(t, r, "a", func(c *SandboxConfig) { c.ID = "s2" })
	if n := lines(group); n > 0 {
		t.Errorf("%d processes of the earlier sandbox are left", n)
	}
	if err := q.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	bad := SandboxConfig{Sandbox: shim.Sandbox{ID: "s3", Sysctls: map[string]string{"kernel.shm_rmid_forced": "no number"}}}
	if _, err := r.Create(t.Context(), "a", bad); err == nil {
		t.Fatal("it was made")
	}
	for _, dir := range r.Cgroups.dirs("poda") {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
	create(t, r, "a")
}

// TestUmask: that of the agent is no concern of its containers. Their root can be entered by every user, and so can what is made for them.
func TestUmask(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	r := newRuntime(t)
	volume := filepath.Join(t.TempDir(), "volume")
	if err := errors.Join(os.Mkdir(volume, 0o700), os.Chmod(volume, 0o777)); err != nil {
		t.Fatal(err)
	}
	for dir := filepath.Dir(volume); dir != "/"; dir = filepath.Dir(dir) { // of this test
		if err := os.Chmod(dir, 0o755); err != nil || dir == os.TempDir() {
			break
		}
	}
	p := create(t, r, "a")
	c := script(p, "c0", `id -u; stat -c %a / /made/deep/er; echo x > /sub/file && stat -c %a /sub /sub/file`)
	c.Process.UID, c.Process.Capabilities = 1000, 0
	c.Process.Dir = "/made/deep/er"
	c.Mounts = []shim.Mount{{Source: volume, SubPath: "some/where", Target: "/sub"}}
	if s, got := run(t, p, c, Limits{}); got != "1000\n755\n755\n777\n644" {
		t.Errorf("%+v: %s", s, got)
	}
}

func lines(path string) int {
	data, _ := os.ReadFile(path)
	return bytes.Count(data, []byte("\n"))
}

func TestExec(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `echo y > /mine; sleep 1000`)
	c.Process.Env = append(c.Process.Env, "GREETING=hello")
	c.Process.UID = 1000
	c.Process.Capabilities = usual
	c.Mounts = []shim.Mount{{Source: t.TempDir(), Target: "/mnt"}}
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	out, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	code, err := p.Exec(t.Context(), "c0", []string{"sh", "-c", `echo $GREETING; id -u; cat /proc/1/cmdline | tr '\0' ' '; grep Seccomp: /proc/self/status; cut -d: -f3 /proc/self/cgroup | sort -u | tail -1; exit 5`}, nil, out, out)
	data, _ := os.ReadFile(out.Name())
	if err != nil || code != 5 || !strings.HasPrefix(string(data), "hello\n1000\nsh -c echo y") || !strings.Contains(string(data), "Seccomp:\t2\n") {
		t.Errorf("code %d, %v: %q", code, err, data)
	}
	if _, err := p.Exec(t.Context(), "c0", []string{"no-such-program"}, nil, nil, nil); err == nil || !strings.Contains(err.Error(), "not found in $PATH") {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := p.Exec(ctx, "c0", []string{"sleep", "1234"}, nil, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		code, err := p.Exec(t.Context(), "c0", []string{"sh", "-c", `grep -l 123[4] /proc/[0-9]*/cmdline | grep -v "/$$/"`}, nil, nil, nil)
		if err == nil && code == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the process outlives who asked for it")
		}
	}
	if _, err := p.Exec(t.Context(), "gone", []string{"true"}, nil, nil, nil); err == nil {
		t.Error("a container that does not exist ran something")
	}
}

func TestLimits(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	s, _ := run(t, p, script(p, "memory", `python3 -c 'x = bytearray(1 << 30)'`), Limits{Memory: 64 << 20})
	if !s.OOM {
		t.Errorf("%+v", s)
	}
	_, got := run(t, p, script(p, "processes", `for i in $(seq 30); do sleep 1 & done 2>&1 | tail -1`), Limits{Processes: 10})
	if !strings.Contains(got, "fork") {
		t.Errorf("got %q", got)
	}
	start := time.Now()
	s, _ = run(t, p, script(p, "cpu", `timeout 1 sh -c 'while :; do :; done'; cat /proc/self/stat > /dev/null; times`), Limits{CPU: 100})
	if _, text := s, text(t, p, "cpu"); time.Since(start) > 10*time.Second {
		t.Errorf("%s", text)
	}
}

// TestForkBomb: it fills its own limit, and ends at once with its first process.
func TestForkBomb(t *testing.T) {
	r := newRuntime(t)
	p, neighbour := create(t, r, "bomb"), create(t, r, "neighbour")
	// A shell would not do: one that can't fork ends, and if it is the first process, so does everything.
	bomb := "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(.01)"
	if err := p.Start(t.Context(), script(p, "c0", "exec python3 -c '"+bomb+"'"), Limits{CPU: 300}); err != nil {
		t.Fatal(err)
	}
	group := filepath.Join(r.Cgroups.dir("podbomb", "pids"), "pids.current")
	for end := time.Now().Add(20 * time.Second); number(group) < 200 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if n := number(group); n != 200 {
		t.Errorf("%d processes", n)
	}
	if s, got := run(t, neighbour, script(neighbour, "c0", `echo fine`), Limits{}); s.ExitCode != 0 || got != "fine" {
		t.Errorf("%+v %q", s, got)
	}
	start := time.Now()
	if err := p.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %s to end", took)
	}
}

func number(path string) int {
	data, _ := os.ReadFile(path)
	n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
	return n
}

func TestLogRotation(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `seq 1 20000; head -c 40000 /dev/zero | tr '\0' x; echo`)
	c.Log.MaxSize, c.Log.MaxFiles = 100_000, 3
	run(t, p, c, Limits{})
	files, _ := filepath.Glob(c.Log.Path + "*")
	if len(files) != 3 {
		t.Errorf("files %v", files)
	}
	last := ""
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil || st.Size() > 100_000 || st.Size() == 0 {
			t.Errorf("%s: %v, %v", f, st.Size(), err)
		}
	}
	data, _ := os.ReadFile(c.Log.Path)
	for _, line := range strings.Split(strings.TrimSpace(string(data)), "\n") {
		last += line[strings.Index(line, " stdout ")+8:][:1]
	}
	if !strings.HasSuffix(last, "PPF") {
		t.Errorf("a long line is %s", last[max(0, len(last)-10):])
	}
}

// TestSharedProcesses: containers see each other's if the Pod says so.
func TestSharedProcesses(t *testing.T) {
	p := create(t, newRuntime(t), "a", func(c *SandboxConfig) { c.SharedPID = true })
	if err := p.Start(t.Context(), script(p, "c0", `sleep 4321`), Limits{}); err != nil {
		t.Fatal(err)
	}
	_, got := run(t, p, script(p, "c1", `cat /proc/1/cmdline | tr '\0' ' '; grep -l 432[1] /proc/[0-9]*/cmdline | wc -l | xargs test 1 -le && echo seen`), Limits{})
	if got != "portal-pause seen" {
		t.Errorf("got %q", got)
	}
	if err := p.Signal(t.Context(), "c0", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if s := wait(t, p, "c0"); s.ExitCode != 137 {
		t.Errorf("%+v", s)
	}
}

// TestInherited: what whoever started the agent left open ends with the agent.
func TestInherited(t *testing.T) {
	left, err := unix.Open("/dev/null", unix.O_RDONLY, 0) // not closed on exec
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(left)
	p := create(t, newRuntime(t), "a")
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", p.PID, e.Name()))
		if e.Name() != "0" && target == "/dev/null" {
			t.Errorf("descriptor %s is %s", e.Name(), target)
		}
	}
	if err := p.Start(t.Context(), script(p, "c0", "sleep 1000"), Limits{}); err != nil {
		t.Error(err)
	}
}

// TestMemoryOfShims watches over what each Pod costs besides its own processes.
func TestMemoryOfShims(t *testing.T) {
	r := newRuntime(t)
	var total int
	const pods = 5
	for i := range pods {
		p := create(t, r, fmt.Sprintf("p%d", i))
		if err := p.Start(t.Context(), script(p, "c0", `echo x; sleep 1000`), Limits{}); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", p.PID))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(data), "\n") {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
				n, _ := strconv.Atoi(f[1])
				total += n
			}
		}
	}
	t.Logf("%d kB PSS for each shim", total/pods)
	if total/pods > 8000 && !raced {
		t.Errorf("a shim has %d kB, want 8000 at most", total/pods)
	}
}

// TestInitialisedEarly: in the programs that this package is built into, its processes take over before much else happens.
func TestInitialisedEarly(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{shim.ShimName}
	cmd.Env = []string{"GODEBUG=inittrace=1"}
	ready, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	cmd.ExtraFiles = []*os.File{ready}
	out, _ := cmd.CombinedOutput()
	bytesUsed := 0
	var names []string
	for _, line := range strings.Split(string(out), "\n") {
		if f := strings.Fields(line); len(f) > 7 && f[0] == "init" {
			n, _ := strconv.Atoi(f[7])
			bytesUsed += n
			names = append(names, f[1])
		}
	}
	if len(names) == 0 || bytesUsed > 200_000 || slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, "k8s.io/") }) {
		t.Errorf("%d bytes for %v", bytesUsed, names)
	}
}

// TestAllPodsTogether: all Pods can't have all of the machine's memory and processes.
func TestAllPodsTogether(t *testing.T) {
	r := newRuntime(t)
	total, err := totalMemory()
	if err != nil {
		t.Fatal(err)
	}
	file := "memory.limit_in_bytes"
	if r.Cgroups.unified != "" {
		file = "memory.max"
	}
	for path, most := range map[string]int64{filepath.Join(r.Cgroups.dir("", "memory"), file): total - 100<<20, filepath.Join(r.Cgroups.dir("", "pids"), "pids.max"): 4 << 20} {
		if n, err := readNumber(path); err != nil || n <= 0 || n > most {
			t.Errorf("%s: %d, %v, want %d at most", path, n, err, most)
		}
	}
	p := create(t, r, "a")
	score := fmt.Sprintf("/proc/%d/oom_score_adj", p.PID)
	if os.WriteFile(score, []byte(shimOOMScore), 0) == nil { // a machine in a container may not
		if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", create(t, r, "b").PID)); err != nil || strings.TrimSpace(string(data)) != shimOOMScore {
			t.Errorf("the shim's score is %q, %v", data, err)
		}
	}
	if s, got := run(t, p, script(p, "c0", "cat /proc/self/oom_score_adj"), Limits{}); s.ExitCode != 0 || strings.TrimSpace(got) != "0" {
		t.Errorf("the container's score is %q", got)
	}
	for total, want := range map[int64]int64{64 << 20: 32 << 20, 1 << 30: 924 << 20, 100 << 30: 95 << 30} {
		if got := forPods(total); got != want {
			t.Errorf("of %d: %d, want %d", total, got, want)
		}
	}
}

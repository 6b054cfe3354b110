//go:build peers

package test

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// machineDir tells a test that it is the first process of the machine that it made, and which folder it has there.
const machineDir = "PORTAL_TEST_MACHINE"

// hierarchy is a mounted hierarchy of control groups.
type hierarchy struct {
	mount, kind, options string // kind: cgroup or cgroup2
	own                  string // the group in it that is the machine's root
}

// enterMachine puts the shell into the machine's groups, then into a namespace where these are the roots. In version 2 a group that has
// processes gives its children no controllers, so that the machine's own processes get a group beside what they make.
const enterMachine = `set -e
for group in $MACHINE_GROUPS; do echo 0 >$group/cgroup.procs; done
exec unshare --cgroup sh -ec '
for group in $MACHINE_GROUPS; do if [ -e $group/cgroup.controllers ]; then mkdir $group/init; echo 0 >$group/init/cgroup.procs; fi; done
exec unshare --net --mount --ipc --uts --pid --fork --kill-child "$@"' sh "$@"`

// onMachine says whether the test is the first process of a machine of its own, and in which folder it keeps its files. If not, it
// runs this very test again as such, and the caller is done. The machine is a set of namespaces: when its first process ends, so do
// all others, and their mounts and network are gone. Its control groups are removed here.
func onMachine(t *testing.T) (dir string, inside bool) {
	t.Helper()
	if dir := os.Getenv(machineDir); dir != "" {
		ownMounts(t)
		return dir, true
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var groups []string
	for _, h := range hierarchies(t) {
		groups = append(groups, h.own)
		if err := os.Mkdir(h.own, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			eventually(t, time.Minute, "no control group that stays", func() string {
				if err := removeGroups(h.own); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err.Error()
				}
				return ""
			})
		})
		inherit(t, h.own)
	}
	cmd := exec.Command("sh", "-c", enterMachine, "sh", self, "-test.run", "^"+t.Name()+"$", "-test.v", "-test.timeout", "15m")
	cmd.Env = append(os.Environ(), "MACHINE_GROUPS="+strings.Join(groups, " "), machineDir+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	return "", false
}

// hierarchies are those that this machine has, each with a group below the one that the test is in.
func hierarchies(t *testing.T) (out []hierarchy) {
	t.Helper()
	in := map[string]string{} // the group that the test is in, by controllers
	for _, line := range lines(t, "/proc/self/cgroup") {
		f := strings.SplitN(line, ":", 3)
		in[f[1]] = f[2]
	}
	for _, line := range lines(t, "/proc/self/mounts") {
		f := strings.Fields(line) // device, mount, kind, options
		if f[2] != "cgroup" && f[2] != "cgroup2" {
			continue
		}
		options := slices.DeleteFunc(strings.Split(f[3], ","), func(o string) bool {
			return slices.Contains([]string{"rw", "relatime", "nosuid", "nodev", "noexec", "xattr", "clone_children"}, o) || strings.HasPrefix(o, "release_agent")
		})
		h := hierarchy{mount: f[1], kind: f[2], options: strings.Join(options, ",")}
		if f[2] == "cgroup2" {
			h.options = ""
		}
		group, known := in[h.options]
		if !known {
			continue
		}
		h.own = filepath.Join(h.mount, group, fmt.Sprintf("portal-test-machine-%d", os.Getpid()))
		out = append(out, h)
	}
	if len(out) == 0 {
		t.Fatal("no control groups are mounted: a kubelet needs them")
	}
	return out
}

// inherit copies what a new group of version 1 must have before a process can be in it.
func inherit(t *testing.T, group string) {
	t.Helper()
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		text, err := os.ReadFile(filepath.Join(filepath.Dir(group), name))
		if errors.Is(err, fs.ErrNotExist) || len(text) <= 1 {
			continue
		}
		if err := os.WriteFile(filepath.Join(group, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// ownMounts gives the machine its own processes, network devices and control groups to see, and folders of its own where programs
// keep theirs.
func ownMounts(t *testing.T) {
	t.Helper()
	mount := func(source, target, kind string, options string) {
		if err := syscall.Mount(source, target, kind, 0, options); err != nil {
			t.Fatalf("mount %s (%s %s): %v", target, kind, options, err)
		}
	}
	groups := hierarchies(t)
	mount("proc", "/proc", "proc", "")
	mount("sysfs", "/sys", "sysfs", "")
	if unified := len(groups) == 1 && groups[0].kind == "cgroup2"; unified {
		mount("cgroup", "/sys/fs/cgroup", "cgroup2", "")
	} else {
		mount("cgroup", "/sys/fs/cgroup", "tmpfs", "")
		for _, h := range groups {
			if h.kind == "cgroup2" {
				continue // without controllers: these are in version 1
			}
			if err := os.MkdirAll(h.mount, 0o755); err != nil {
				t.Fatal(err)
			}
			mount("cgroup", h.mount, "cgroup", h.options)
		}
	}
	for _, dir := range []string{"/run", "/var/lib", "/var/log"} {
		mount("tmpfs", dir, "tmpfs", "")
	}
	for _, dir := range []string{"upper", "work"} {
		if err := os.Mkdir(filepath.Join("/run", dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mount("overlay", "/etc", "overlay", "lowerdir=/etc,upperdir=/run/upper,workdir=/run/work")
}

func lines(t *testing.T, path string) (out []string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		out = append(out, s.Text())
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

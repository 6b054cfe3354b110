package runtime

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime/shim"
)

// TestEscapes: none of many known ways leads out of a container.
func TestEscapes(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a")
	c := script(p, "c0", "")
	escapes, err := os.ReadFile(filepath.Join("testdata", "escapes.py"))
	if err != nil {
		t.Fatal(err)
	}
	c.Process.Args = []string{"python3", "-c", string(escapes), r.Dir}
	s, got := run(t, p, c, Limits{})
	lines := strings.Split(got, "\n")
	last := len(lines) - 1
	for _, line := range lines[:last] {
		if !strings.HasSuffix(line, ": held") {
			t.Error(line)
		}
	}
	if want := fmt.Sprint("tried ", last); s.ExitCode != 0 || lines[last] != want || last < 70 {
		t.Errorf("it ended with %q, not %q: %+v", lines[last], want, s)
	}
}

// TestOwnProgram: while processes are started in a container, nothing in it can write to the program that starts them.
func TestOwnProgram(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	before := programSum(t)
	c := script(p, "c0", "")
	c.Process.Args = []string{"python3", "-u", "-c", `
import os
while True:
    for pid in os.listdir('/proc'):
        if not pid.isdigit() or pid == str(os.getpid()):
            continue
        for name in ('exe', 'root', 'cwd', 'mem', 'fd/3', 'fd/4', 'fd/5'):
            try:
                fd = os.open('/proc/%s/%s' % (pid, name), os.O_WRONLY if name in ('exe', 'mem') else os.O_PATH)
                comm = open('/proc/%s/comm' % pid).read().strip()
                if comm.startswith('portal') or comm == 'exe' or comm.startswith('memfd'):
                    print('opened', name, 'of', comm)
                os.close(fd)
            except OSError:
                pass
`}
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		if code, err := p.Exec(t.Context(), "c0", []string{"true"}, nil, nil, nil); err != nil || code != 0 {
			t.Fatal(code, err)
		}
	}
	if got := text(t, p, "c0"); got != "" {
		t.Errorf("it got:\n%s", got)
	}
	if !bytes.Equal(before, programSum(t)) {
		t.Error("the program was changed")
	}
}

// TestLookingIntoOthers: a container that may trace processes and shares them with others of its Pod finds nothing in them that it does not
// have itself, whatever is started meanwhile: no rights, no root, no open file of the machine's.
func TestLookingIntoOthers(t *testing.T) {
	r := newRuntime(t)
	for name, shared := range map[string]bool{"shared": true, "own": false} {
		t.Run(name, func(t *testing.T) {
			p := create(t, r, name, func(c *SandboxConfig) { c.SharedPID = shared })
			c := script(p, "c0", "")
			c.Process.Capabilities |= 1 << unix.CAP_SYS_PTRACE
			c.Process.Args = []string{"python3", "-u", "-c", looks, r.Dir}
			if err := p.Start(t.Context(), c, Limits{}); err != nil {
				t.Fatal(err)
			}
			for i := range 60 {
				if code, err := p.Exec(t.Context(), "c0", []string{"true"}, nil, nil, nil); err != nil || code != 0 {
					t.Fatal(code, err)
				}
				if i%10 == 0 {
					k := script(p, fmt.Sprintf("k%d", i), "true")
					k.Process.Capabilities |= 1 << unix.CAP_SYS_PTRACE
					if err := p.Start(t.Context(), k, Limits{}); err != nil {
						t.Fatal(err)
					}
				}
			}
			got := text(t, p, "c0")
			if !strings.Contains(got, "looking") {
				t.Fatalf("it did not look: %q", got)
			}
			for _, line := range strings.Split(got, "\n") {
				if line != "looking" {
					t.Error(line)
				}
			}
			if shared {
				pauseHasNothing(t, p)
			}
		})
	}
}

const looks = `
import os, sys
DATA = sys.argv[1]
def status(pid):
    out = {}
    for line in open('/proc/%s/status' % pid):
        k, _, v = line.partition(':')
        out[k] = v.strip()
    return out
mine = int(status('self')['CapBnd'], 16)
told, first = set(), True
def tell(text):
    if text not in told:
        told.add(text)
        print(text)
while True:
    for pid in os.listdir('/proc'):
        if not pid.isdigit() or pid == str(os.getpid()):
            continue
        try:
            tasks = ['/proc/%s/task/%s' % (pid, t) for t in os.listdir('/proc/%s/task' % pid)]
        except OSError:
            continue
        for base in tasks:
            try:
                s = status(base[len('/proc/'):])
                for kind in ('CapPrm', 'CapEff', 'CapBnd', 'CapInh'):
                    if int(s[kind], 16) & ~mine:
                        tell('%s (%s) has more rights: %s %s' % (base, s['Name'], kind, s[kind]))
                if s['Seccomp'] != '2':
                    tell('%s (%s) has no filter' % (base, s['Name']))
            except (OSError, KeyError):
                pass
            for name in ('root', 'cwd'):
                try:
                    if os.listdir('%s/%s%s' % (base, name, DATA)):
                        tell('%s/%s shows the data directory' % (base, name))
                except OSError:
                    pass
            try:
                for fd in os.listdir(base + '/fd'):
                    target = os.readlink(base + '/fd/' + fd)
                    if target.startswith('/sys/fs/cgroup') or DATA in target or fd not in ('0', '1', '2') and target == '/':
                        tell('%s has %s open' % (base, target))
            except OSError:
                pass
    if first:
        print('looking')
    first = False
`

// pauseHasNothing: the process that holds the namespace has an empty root, no rights and nothing open.
func pauseHasNothing(t *testing.T, p *Pod) {
	t.Helper()
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", p.PID, p.PID))
	if err != nil {
		t.Fatal(err)
	}
	found := false
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.PID))
	for _, f := range tasks {
		more, _ := os.ReadFile(f)
		children = append(append(children, ' '), more...)
	}
	for _, pid := range strings.Fields(string(children)) {
		line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if !strings.HasPrefix(string(line), "portal-pause\x00") {
			continue
		}
		found = true
		status, _ := os.ReadFile("/proc/" + pid + "/status")
		for _, want := range []string{
			"Uid:\t65534\t65534\t65534\t65534", "Gid:\t65534\t65534\t65534\t65534", "CapPrm:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "Threads:\t1",
		} {
			if !strings.Contains(string(status), want) {
				t.Errorf("the status of portal-pause lacks %q:\n%s", want, status)
			}
		}
		if entries, err := os.ReadDir("/proc/" + pid + "/root"); err != nil || len(entries) != 0 {
			t.Errorf("its root has %v, %v", entries, err)
		}
		if entries, err := os.ReadDir("/proc/" + pid + "/fd"); err != nil || len(entries) != 0 {
			t.Errorf("it has open %v, %v", entries, err)
		}
		if err := os.WriteFile("/proc/"+pid+"/root/x", nil, 0o600); err == nil {
			t.Error("its root can be written")
		}
	}
	if !found {
		t.Error("there is no portal-pause")
	}
}

func programSum(t *testing.T) []byte {
	t.Helper()
	path, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	return sum[:]
}

// TestOddNames: whatever characters are in arguments, variables, paths and output, they arrive as they are.
func TestOddNames(t *testing.T) {
	r := newRuntime(t)
	odd := "a b\t'\"$(x)`;&|<>*?\\ü\x01:,=%s\n."
	dir := filepath.Join(t.TempDir(), "v:o,l\\u m")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p := create(t, r, "a")
	c := script(p, "c0", `printf %s "$1" > "/v $2/one"; printf %s "$ODD" > "/v $2/two"; head -c 100000 /dev/urandom; echo`)
	c.Process.Args = append(c.Process.Args, "sh", odd, "x:y,z")
	c.Process.Env = append(c.Process.Env, "ODD="+odd)
	c.Mounts = append(c.Mounts, shim.Mount{Source: dir, Target: "/v x:y,z"})
	if s, _ := run(t, p, c, Limits{}); s.ExitCode != 0 {
		t.Errorf("%+v", s)
	}
	for _, name := range []string{"one", "two"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != odd {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	for _, uid := range []string{"", "..", "a/b", "a b", "é"} {
		if _, err := r.Create(t.Context(), uid, SandboxConfig{}); err == nil {
			t.Errorf("a Pod with the UID %q was created", uid)
		}
	}
}

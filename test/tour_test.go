package test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// TestTour does what README.md's first tour says, word for word, on a machine of its own (namespaces with an uplink), and
// compares what it prints.
func TestTour(t *testing.T) {
	rootOnly(t)
	need(t, harness.Portal(), "build")
	blocks := documented(t, "README.md", "A first tour")
	m := newMachine(t)
	up := false
	for _, block := range blocks {
		switch {
		case strings.HasPrefix(block, "sudo .cache/bin/portal up"):
			m.do(t, strings.TrimSpace(block)+" >up.log 2>&1 & echo $! >up.pid")
			m.wait(t, "up.log", "Ctrl-C stops it")
			up = true
		case strings.HasPrefix(block, "Portal is up."):
			log, _ := os.ReadFile(filepath.Join(m.dir, "up.log"))
			if !strings.Contains(string(log), block) {
				t.Errorf("README.md says that portal up prints\n%s\nit printed\n%s", block, log)
			}
			eventually(t, time.Minute, "portal status finds nothing wrong", func() string {
				if out := m.do(t, ".cache/bin/portal status 2>&1; echo status $?"); !strings.HasSuffix(strings.TrimSpace(out), "status 0") {
					return out
				}
				return ""
			})
		case strings.HasPrefix(block, "$ "):
			for _, step := range strings.Split(block[2:], "\n$ ") {
				command, want, _ := strings.Cut(step, "\n")
				if got := m.do(t, command); normal(got) != normal(want) {
					t.Errorf("$ %s\n%s\nREADME.md says\n%s", command, got, want)
				}
			}
		default:
			for line := range strings.Lines(block) {
				m.do(t, strings.TrimSpace(line))
			}
		}
	}
	if !up {
		t.Fatal("README.md's tour starts no portal up")
	}
	m.do(t, "kill -INT $(cat up.pid)")
	m.wait(t, "up.log", "Portal has stopped.")
}

// documented are the code blocks of a section of a document, without what they are indented by in a list.
func documented(t *testing.T, document, section string) (out []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(harness.Root(), document))
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(data), "\n## "+section+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	for _, block := range fenced.FindAllStringSubmatch(text, -1) {
		out = append(out, strings.TrimPrefix(strings.ReplaceAll("\n"+block[2], "\n"+block[1], "\n"), "\n"))
	}
	if !found || len(out) == 0 {
		t.Fatalf("%s has no section %q with commands", document, section)
	}
	return out
}

var fenced = regexp.MustCompile("(?ms)^( *)```\n(.*?)^ *```\n")

// What differs from run to run: addresses that were chosen, ages, revisions, the width of columns, the order of rows.
var varying = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\b10\.0\.0\.10\b`), "DNS"},
	{regexp.MustCompile(`\b10\.0\.0\.11\b`), "REDIS"},
	{regexp.MustCompile(`\b10\.0\.0\.1\b`), "API"},
	{regexp.MustCompile(`\b10\.0\.\d{1,3}\.\d{1,3}\b`), "ADDRESS"},
	{regexp.MustCompile(`\bimage-processing-[a-z0-9]+-[a-z0-9]+\b`), "BACKEND"},
	{regexp.MustCompile(`\b80:3\d{4}/`), "80:PORT/"},
	{regexp.MustCompile(`\b\d+[sm]\b`), "AGE"},
	{regexp.MustCompile(`revision \d+`), "revision N"},
	{regexp.MustCompile(`[ \t]+`), " "},
}

func normal(text string) string {
	for _, v := range varying {
		text = v.pattern.ReplaceAllString(text, v.with)
	}
	return strings.TrimSpace(text)
}

// machine is a root shell in namespaces of its own, in a folder that looks like a checkout after make build.
type machine struct {
	dir string
	in  io.Writer
	out *bufio.Reader
	// groups are its control groups, see ownGroups.
	groups []string
}

// newMachine has an uplink and a default route.
func newMachine(t *testing.T) *machine {
	t.Helper()
	m := newLonelyMachine(t)
	for _, line := range []string{
		"ip link add uplink type veth peer name far",
		"ip link set uplink up && ip link set far up",
		"ip address add 192.0.2.2/24 dev uplink && ip route add default via 192.0.2.1",
	} {
		m.do(t, line)
	}
	return m
}

// newLonelyMachine has the loopback interface and no other.
func newLonelyMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{dir: t.TempDir()}
	write := func(name, text string, mode os.FileMode) {
		path := filepath.Join(m.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	// A person types more slowly than a server starts.
	write(".curlrc", "silent\nretry = 50\nretry-connrefused\nretry-delay = 1\n", 0o600)
	write("bin/sudo", "#!/bin/sh\n[ \"$1\" = -s ] && exec bash\nexec \"$@\"\n", 0o755)
	if err := os.MkdirAll(filepath.Join(m.dir, ".cache", "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(harness.Portal(), filepath.Join(m.dir, ".cache", "bin", "portal")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash")
	cmd.Dir = m.dir
	cmd.Env = append(os.Environ(), "HOME="+m.dir, "PATH="+filepath.Join(m.dir, "bin")+":"+os.Getenv("PATH"), "KUBECONFIG=", "PORTAL_DATA_DIR=")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = writer, writer
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	writer.Close()
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
		stdout.Close()
		m.removeGroups(t)
	})
	m.in, m.out = stdin, bufio.NewReader(stdout)
	m.do(t, "mount -t tmpfs tmpfs /var/lib")
	m.do(t, "ip link set lo up")
	m.ownGroups(t, "portal/up-"+strings.TrimSpace(m.do(t, "stat -Lc %i /proc/self/ns/net")))
	return m
}

// ownGroups says which control groups are the machine's. It shares them with all others: what ends with it leaves them, as nobody is there
// to remove them, and so does a test that is killed. They go when the machine does, and what an earlier one of the same names left goes now.
func (m *machine) ownGroups(t *testing.T, names ...string) {
	t.Helper()
	m.groups = append(m.groups, names...)
	m.removeGroups(t)
}

func (m *machine) removeGroups(t *testing.T) {
	t.Helper()
	for _, name := range m.groups {
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
			groups, _ := filepath.Glob(filepath.Join(root, name))
			for _, group := range groups {
				eventually(t, 10*time.Second, group+" is gone", func() string { // its processes are about to end
					if err := removeGroups(group); err != nil && !errors.Is(err, fs.ErrNotExist) {
						return err.Error()
					}
					return ""
				})
			}
		}
	}
}

// removeGroups removes a control group and those in it, deepest first.
func removeGroups(group string) error {
	entries, err := os.ReadDir(group)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeGroups(filepath.Join(group, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(group)
}

// do types a line and returns what it printed.
func (m *machine) do(t *testing.T, line string) string {
	t.Helper()
	const mark = "-- done --"
	if _, err := fmt.Fprintf(m.in, "%s\necho '%s'\n", line, mark); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	var out strings.Builder
	for {
		got, err := m.out.ReadString('\n')
		if err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out.String())
		}
		if before, done := strings.CutSuffix(got, mark+"\n"); done {
			return out.String() + before
		}
		out.WriteString(got)
	}
}

// wait waits until a file has a text in it.
func (m *machine) wait(t *testing.T, name, text string) {
	t.Helper()
	var data []byte
	eventually(t, time.Minute, name+" has "+text, func() string {
		data, _ = os.ReadFile(filepath.Join(m.dir, name))
		if strings.Contains(string(data), text) {
			return ""
		}
		return "it has " + string(data)
	})
}

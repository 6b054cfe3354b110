package harness

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/lab"
)

// Traces are what Pods leave on a machine of a lab while they run, each in a line that says what it is. There is nothing of a Pod that
// is gone.
type Traces map[string][]string

// The kinds of Traces.
const (
	TraceProcesses  = "processes"
	TraceNamespaces = "network namespaces"
	TraceVeths      = "veths"
	TraceMounts     = "mounts"
	TraceCgroups    = "control groups"
	TraceFiles      = "files"
)

// TraceKinds are all of them.
func TraceKinds() []string {
	return []string{TraceProcesses, TraceNamespaces, TraceVeths, TraceMounts, TraceCgroups, TraceFiles}
}

// FindTraces looks at a node of a lab.
func FindTraces(l *lab.Lab, node string) (Traces, error) {
	out := Traces{}
	m := l.Node(node)
	if err := out.processes(m.PID); err != nil {
		return nil, err
	}
	if err := out.veths(m); err != nil {
		return nil, err
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", m.PID))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		out[TraceMounts] = append(out[TraceMounts], strings.TrimSpace(line))
	}
	for _, root := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		tops, _ := filepath.Glob(root + "portal-lab-" + l.Name + "/" + node)
		for _, top := range tops {
			out.walk(TraceCgroups, top, func(e fs.DirEntry) bool { return e.IsDir() })
		}
	}
	for _, dir := range []string{"pods", "logs", "volumes", "addresses"} {
		entries, _ := os.ReadDir(filepath.Join(lab.NodeDir(l.Dir, node), dir))
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), "last-") { // which address was given last
				out[TraceFiles] = append(out[TraceFiles], dir+"/"+e.Name())
			}
		}
	}
	return out, nil
}

// processes are those of the machine's PID namespace, and the network namespaces that they are in.
func (t Traces) processes(pid int) error {
	root := fmt.Sprintf("/proc/%d/root/proc", pid)
	entries, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	seen := map[uint64]bool{}
	for _, e := range entries {
		if strings.Trim(e.Name(), "0123456789") != "" {
			continue
		}
		dir := filepath.Join(root, e.Name())
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue // it has ended
		}
		t[TraceProcesses] = append(t[TraceProcesses], e.Name()+" "+strings.ReplaceAll(strings.Trim(string(line), "\x00"), "\x00", " "))
		if info, err := os.Stat(filepath.Join(dir, "ns/net")); err == nil {
			if ino := info.Sys().(*syscall.Stat_t).Ino; !seen[ino] {
				seen[ino] = true
				t[TraceNamespaces] = append(t[TraceNamespaces], fmt.Sprintf("%d of process %s", ino, e.Name()))
			}
		}
	}
	return nil
}

// veths are the machine's ends of Pods' cables.
func (t Traces) veths(m *lab.Machine) error {
	return m.Do(func() error {
		links, err := netlink.LinkList()
		for _, link := range links {
			if link.Type() == "veth" {
				t[TraceVeths] = append(t[TraceVeths], link.Attrs().Name)
			}
		}
		return err
	})
}

func (t Traces) walk(kind, top string, which func(fs.DirEntry) bool) {
	_ = filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if err == nil && which(e) {
			t[kind] = append(t[kind], path)
		}
		return nil
	})
}

// Beyond are the traces that were not there before. Processes and namespaces that were replaced, such as an agent's, don't count: of
// them it is how many more there are.
func (t Traces) Beyond(before Traces) Traces {
	out := Traces{}
	for kind, lines := range t {
		for _, line := range lines {
			if !slices.Contains(before[kind], line) {
				out[kind] = append(out[kind], line)
			}
		}
		if kind == TraceProcesses || kind == TraceNamespaces {
			more := max(0, len(lines)-len(before[kind]))
			out[kind] = out[kind][:min(more, len(out[kind]))]
		}
		if len(out[kind]) == 0 {
			delete(out, kind)
		}
	}
	return out
}

func (t Traces) String() string {
	var b strings.Builder
	for _, kind := range TraceKinds() {
		if len(t[kind]) > 0 {
			fmt.Fprintf(&b, "%d %s:\n  %s\n", len(t[kind]), kind, strings.Join(t[kind], "\n  "))
		}
	}
	return b.String()
}

// AgentPID is the process of a node's agent, as this computer sees it; 0 while there is none.
func AgentPID(m *lab.Machine) int {
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.PID, m.PID))
	for text := range strings.FieldsSeq(string(children)) {
		var pid int
		if _, err := fmt.Sscan(text, &pid); err != nil {
			continue
		}
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && strings.Contains(string(line), "\x00node\x00") && unix.Kill(pid, 0) == nil {
			return pid
		}
	}
	return 0
}

package report

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"portal/test/harness"
)

// Machine is what the figures were taken on.
type Machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Memory int64  `json:"memoryMB"`
	Kernel string `json:"kernel"`
}

func (m Machine) String() string {
	return fmt.Sprintf("%d cores (%s), %s MB, Linux %s", m.Cores, m.CPU, thousands(int(m.Memory)), m.Kernel)
}

func thisMachine() Machine {
	m := Machine{Cores: runtime.NumCPU(), CPU: field("/proc/cpuinfo", "model name"), Kernel: "unknown"}
	if m.CPU == "" {
		m.CPU = runtime.GOARCH
	}
	if kib, _, ok := strings.Cut(field("/proc/meminfo", "MemTotal"), " "); ok {
		n, _ := strconv.ParseInt(kib, 10, 64)
		m.Memory = n << 10 / 1e6
	}
	if data, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(data))
	}
	return m
}

// field is the first value of a key in a file of /proc.
func field(file, key string) string {
	data, _ := os.ReadFile(file)
	for line := range strings.Lines(string(data)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// commit is empty where there is no repository, such as in a virtual machine.
func commit() string {
	return firstLine("git", "-C", harness.Root(), "describe", "--always", "--dirty", "--exclude=*")
}

// Version records what a program says when it is asked for its version.
func (r *Report) Version(name, path string, args ...string) {
	if line := firstLine(path, args...); line != "" {
		r.Versions[name] = line
	}
}

func firstLine(path string, args ...string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line
}

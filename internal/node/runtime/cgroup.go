package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime/shim"
)

// Limits are what the processes of a control group may use together; 0: no limit.
type Limits struct {
	Memory int64 // bytes
	CPU    int64 // thousandths of a processor
	// Weight is the share of the processors when they are scarce, in thousandths of a processor that were asked for.
	Weight    int64
	Processes int64
}

// Cgroups are the machine's control groups: one hierarchy of version 2, or some of version 1.
type Cgroups struct {
	unified string            // where version 2 is mounted, if it has the controllers
	v1      map[string]string // by controller: where version 1 is mounted
	root    string            // the path of the agent's part
}

// controllers are those that are used.
var controllers = []string{"memory", "cpu", "pids"}

// FindCgroups finds out what the machine has. root is the path below which all control groups are made.
func FindCgroups(root string) (*Cgroups, error) {
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	c := &Cgroups{v1: map[string]string{}, root: strings.Trim(root, "/")}
	for _, line := range strings.Split(string(data), "\n") {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		switch f[2] {
		case "cgroup2":
			has, err := os.ReadFile(filepath.Join(f[1], "cgroup.controllers"))
			if err == nil && slices.Contains(strings.Fields(string(has)), "memory") {
				c.unified = f[1]
			}
		case "cgroup":
			for _, option := range strings.Split(f[3], ",") {
				if option == "devices" || slices.Contains(controllers, option) {
					c.v1[option] = f[1]
				}
			}
		}
	}
	if c.unified == "" {
		for _, name := range controllers {
			if c.v1[name] == "" {
				return nil, fmt.Errorf("the cgroup controller %s is not mounted, neither of version 2 nor of version 1: Pods can't be limited without it", name)
			}
		}
	}
	return c, nil
}

// Prepare makes the agent's part, and keeps all Pods together from using up the machine's processes and memory: then it is one of them that
// the kernel kills, and not what else runs on the machine.
func (c *Cgroups) Prepare() error {
	if err := c.make(""); err != nil {
		return err
	}
	if total, err := totalMemory(); err == nil {
		file := "memory.limit_in_bytes"
		if c.unified != "" {
			file = "memory.max"
		}
		if err := c.set("", "memory", file, strconv.FormatInt(forPods(total), 10)); err != nil {
			return err
		}
	}
	if most, err := readNumber("/proc/sys/kernel/pid_max"); err == nil {
		if threads, err := readNumber("/proc/sys/kernel/threads-max"); err == nil {
			most = min(most, threads)
		}
		return c.set("", "pids", "pids.max", strconv.FormatInt(most*3/4, 10))
	}
	return nil
}

// forPods is how much of the machine's memory all Pods may have together. Kubelets leave 100 MiB, which is little on a large machine.
func forPods(total int64) int64 { return max(total-max(total/20, 100<<20), total/2) }

func totalMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, err
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

func readNumber(path string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// dirs are the folders of a group, one of each hierarchy.
func (c *Cgroups) dirs(name string) []string {
	if c.unified != "" {
		return []string{filepath.Join(c.unified, c.root, name)}
	}
	var out []string
	for _, mount := range c.v1 {
		if dir := filepath.Join(mount, c.root, name); !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	slices.Sort(out)
	return out
}

func (c *Cgroups) dir(name, controller string) string {
	if c.unified != "" {
		return filepath.Join(c.unified, c.root, name)
	}
	return filepath.Join(c.v1[controller], c.root, name)
}

func (c *Cgroups) set(name, controller, file, value string) error {
	if err := os.WriteFile(filepath.Join(c.dir(name, controller), file), []byte(value), 0); err != nil {
		return fmt.Errorf("limit a control group: %w", err)
	}
	return nil
}

// make makes a group. In version 2, a group hands its controllers to those below it.
func (c *Cgroups) make(name string) error {
	for _, dir := range c.dirs(name) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a control group: %w", err)
		}
	}
	if c.unified == "" {
		return nil
	}
	parent := c.unified
	for _, part := range strings.Split(filepath.Join(c.root, name), "/") {
		if err := os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte("+memory +cpu +pids"), 0); err != nil {
			return fmt.Errorf("enable cgroup controllers: %w", err)
		}
		parent = filepath.Join(parent, part)
	}
	return nil
}

// Make makes a group with limits.
func (c *Cgroups) Make(name string, l Limits) error {
	if err := c.make(name); err != nil {
		return err
	}
	type setting struct{ controller, file, value string }
	var list []setting
	add := func(controller, file string, value int64) {
		list = append(list, setting{controller, file, strconv.FormatInt(value, 10)})
	}
	if l.Processes > 0 {
		add("pids", "pids.max", l.Processes)
	}
	const period = 100_000 // microseconds
	if c.unified != "" {
		if l.Memory > 0 {
			add("memory", "memory.max", l.Memory)
		}
		if l.CPU > 0 {
			list = append(list, setting{"cpu", "cpu.max", fmt.Sprintf("%d %d", max(l.CPU*period/1000, 1000), period)})
		}
		if l.Weight > 0 {
			// As the kernel's weights 1 to 10,000 stand for the shares 2 to 262,144 of version 1.
			add("cpu", "cpu.weight", 1+(shares(l.Weight)-2)*9999/262142)
		}
	} else {
		if l.Memory > 0 {
			add("memory", "memory.limit_in_bytes", l.Memory)
		}
		if l.CPU > 0 {
			add("cpu", "cpu.cfs_period_us", period)
			add("cpu", "cpu.cfs_quota_us", max(l.CPU*period/1000, 1000))
		}
		if l.Weight > 0 {
			add("cpu", "cpu.shares", shares(l.Weight))
		}
	}
	for _, s := range list {
		if err := c.set(name, s.controller, s.file, s.value); err != nil {
			return err
		}
	}
	return nil
}

func shares(milli int64) int64 { return min(max(milli*1024/1000, 2), 262144) }

// allowedDevices are those that a container's /dev has, and terminals.
var allowedDevices = []string{"c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:0 rwm", "c 5:2 rwm", "c 136:* rwm", "c *:* m", "b *:* m"}

// RestrictDevices denies all devices but the harmless ones, where the machine has the controller. Without it, a container's mounts
// alone keep it from them.
func (c *Cgroups) RestrictDevices(name string) error {
	if c.unified != "" || c.v1["devices"] == "" {
		return nil
	}
	if err := c.set(name, "devices", "devices.deny", "a"); err != nil {
		return err
	}
	for _, d := range allowedDevices {
		if err := c.set(name, "devices", "devices.allow", d); err != nil {
			return err
		}
	}
	return nil
}

// Join moves a process into a group.
func (c *Cgroups) Join(name string, pid int) error {
	for _, dir := range c.dirs(name) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
			return fmt.Errorf("enter a control group: %w", err)
		}
	}
	return nil
}

// Refused is how often processes of a group, or of those below it, could not start another one for a limit. The kernel counts in the group
// that was limited, or in the one of the process, depending on its version.
func (c *Cgroups) Refused(name string) (n int64) {
	_ = filepath.WalkDir(c.dir(name, "pids"), func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		data, _ := os.ReadFile(filepath.Join(path, "pids.events"))
		for line := range strings.Lines(string(data)) {
			if text, ok := strings.CutPrefix(line, "max "); ok {
				count, _ := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
				n += count
			}
		}
		return nil
	})
	return n
}

// OOMFile is where the kernel counts the processes of a group that it killed for want of memory.
func (c *Cgroups) OOMFile(name string) string {
	if c.unified != "" {
		return filepath.Join(c.dir(name, "memory"), "memory.events")
	}
	return filepath.Join(c.dir(name, "memory"), "memory.oom_control")
}

// Mounts are what a container sees of its control groups.
func (c *Cgroups) Mounts() []shim.CgroupMount {
	if c.unified != "" {
		return []shim.CgroupMount{{Type: "cgroup2"}}
	}
	var out []shim.CgroupMount
	for _, name := range controllers {
		out = append(out, shim.CgroupMount{Type: "cgroup", Name: name})
	}
	return out
}

// Remove kills all processes of a group and those below it, and removes the groups.
func (c *Cgroups) Remove(name string) error {
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		c.kill(name)
		err = nil
		for _, dir := range c.dirs(name) {
			if e := removeTree(dir); e != nil && !errors.Is(e, os.ErrNotExist) {
				err = e
			}
		}
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("remove a control group: %w", err)
}

// Exist says whether the agent's part is there.
func (c *Cgroups) Exist() bool {
	return slices.ContainsFunc(c.dirs(""), func(dir string) bool {
		_, err := os.Stat(dir)
		return err == nil
	})
}

// RemoveEmpty removes the agent's part, in which no process is, and the groups that it is in if nothing else is in them.
func (c *Cgroups) RemoveEmpty() error {
	var errs []error
	for _, dir := range c.dirs("") {
		err := removeTree(dir)
		for range strings.Count(c.root, "/") {
			dir = filepath.Dir(dir)
			_ = unix.Rmdir(dir)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove a control group: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (c *Cgroups) kill(name string) {
	if c.unified != "" {
		_ = c.set(name, "", "cgroup.kill", "1")
		return
	}
	_ = filepath.WalkDir(c.dir(name, "pids"), func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		data, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for _, text := range strings.Fields(string(data)) {
			if pid, err := strconv.Atoi(text); err == nil && pid > 1 {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		return nil
	})
}

// removeTree removes a group and those below it. Only folders can be removed.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return unix.Rmdir(dir)
}

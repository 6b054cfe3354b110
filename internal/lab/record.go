package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lab/machine"
	"portal/internal/rmtree"
)

// recordsDir has a file for each lab, which is locked while the lab runs: so other processes find it, and what is left of one
// that was killed.
const recordsDir = "/run/portal/labs"

// marker is a file in the folder of a lab: what has it may be removed.
const marker = "lab.name"

// Running is a lab as other processes see it.
type Running struct {
	Name string `json:"name"`
	Dir  string `json:"dir"`
	// PID is the process that runs it.
	PID int `json:"pid"`
	// Machines are their first processes, by name.
	Machines map[string]int `json:"machines,omitempty"`
}

// record is the file of a lab that this process runs.
type record struct {
	file  *os.File
	about Running
}

func recordPath(name string) string { return filepath.Join(recordsDir, name+".json") }

// claim takes a name and a folder for a new lab. What an earlier one of the name left is removed.
func claim(name, dir string) (*record, error) {
	if err := os.MkdirAll(recordsDir, 0o700); err != nil {
		return nil, err
	}
	f, old, err := lock(name)
	if err != nil {
		return nil, err
	}
	if f == nil {
		return nil, fmt.Errorf("a lab of the name %s runs already (pid %d): choose another --name, or end it with `portal lab delete %s`", name, old.PID, name)
	}
	r := &record{file: f, about: Running{Name: name, Dir: dir, PID: os.Getpid()}}
	if err := old.sweep(); err != nil {
		_ = f.Close()
		return nil, err
	}
	if err := r.takeDir(); err != nil {
		_ = os.Remove(recordPath(name))
		_ = f.Close()
		return nil, err
	}
	return r, r.write(nil)
}

// takeDir makes the folder. One with other files in it is somebody else's.
func (r *record) takeDir() error {
	dir := r.about.Dir
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		if owner, err := os.ReadFile(filepath.Join(dir, marker)); err != nil || strings.TrimSpace(string(owner)) != r.about.Name {
			return fmt.Errorf("--data-dir %s: it is not empty, and not that of the lab %s: choose a new folder, which is removed when the lab ends", dir, r.about.Name)
		}
		if err := (&r.about).removeDir(); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, marker), []byte(r.about.Name+"\n"), 0o600)
}

// lock opens and locks the file of a lab, and reads what is in it. There is no file if another process has it.
func lock(name string) (*os.File, *Running, error) {
	path := recordPath(name)
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, nil, err
		}
		about := &Running{Name: name}
		held := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		data, err := os.ReadFile(path)
		if err == nil && len(data) > 0 {
			err = json.Unmarshal(data, about)
		}
		if errors.Is(held, unix.EWOULDBLOCK) {
			_ = f.Close()
			return nil, about, nil
		}
		if held != nil {
			_ = f.Close()
			return nil, nil, held
		}
		// Whoever had it may have removed it in between.
		mine, err1 := f.Stat()
		there, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			if err != nil {
				about = &Running{Name: name} // it was being written
			}
			return f, about, nil
		}
		_ = f.Close()
	}
}

func (r *record) write(machines map[string]int) error {
	r.about.Machines = machines
	data, err := json.MarshalIndent(r.about, "", "  ")
	if err != nil {
		return err
	}
	if err := r.file.Truncate(0); err != nil {
		return err
	}
	_, err = r.file.WriteAt(append(data, '\n'), 0)
	return err
}

func (r *record) running() *Running { return &r.about }

// erase removes what the lab has made, and gives its name back.
func (r *record) erase() error {
	err := r.about.sweep()
	return errors.Join(err, os.Remove(recordPath(r.about.Name)), r.file.Close())
}

// Find reads about a lab that runs.
func Find(name string) (*Running, error) {
	if err := ValidName(name); err != nil {
		return nil, err
	}
	if _, err := os.Stat(recordPath(name)); err != nil {
		return nil, fmt.Errorf("there is no lab of the name %s here%s", name, others())
	}
	f, about, err := lock(name)
	if err != nil {
		return nil, err
	}
	if f != nil {
		_ = f.Close()
		return nil, fmt.Errorf("the lab %s does not run any more: `portal lab delete %s` removes what is left of it", name, name)
	}
	return about, nil
}

// Names are those of the labs that there are, running or not.
func Names() (out []string) {
	files, _ := filepath.Glob(filepath.Join(recordsDir, "*.json"))
	for _, f := range files {
		out = append(out, strings.TrimSuffix(filepath.Base(f), ".json"))
	}
	return out
}

func others() string {
	names := Names()
	if len(names) == 0 {
		return ": start one with `portal lab`"
	}
	return ": there is " + strings.Join(names, ", ")
}

// Machine finds one of the lab's.
func (r *Running) Machine(name string) (*Machine, error) {
	pid, ok := r.Machines[name]
	if !ok {
		return nil, fmt.Errorf("the lab %s has no machine %s, but %s", r.Name, name, strings.Join(slices.Sorted(maps.Keys(r.Machines)), ", "))
	}
	if !r.is(pid, name) {
		return nil, fmt.Errorf("the machine %s has ended", name)
	}
	return &Machine{Name: name, PID: pid}, nil
}

// is says whether a process is a machine's: the number may be another's by now.
func (r *Running) is(pid int, name string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.HasPrefix(string(line), machine.Name+"\x00"+r.Name+"\x00"+name+"\x00")
}

// Cut unplugs a machine from the network; Heal plugs it in again.
func (r *Running) Cut(name string) error { return r.plug(name, true) }

// Heal undoes Cut.
func (r *Running) Heal(name string) error { return r.plug(name, false) }

func (r *Running) plug(name string, off bool) error {
	router, m, err := r.link(name)
	if err != nil {
		return err
	}
	return cut(router, m.Name, off)
}

// Link sets the quality of a machine's link.
func (r *Running) Link(name string, q Quality) error {
	router, m, err := r.link(name)
	if err != nil {
		return err
	}
	return setQuality(router, m, q)
}

// link is a machine and what it is plugged into.
func (r *Running) link(name string) (router, m *Machine, err error) {
	if name == routerName {
		return nil, nil, errors.New("the router has a link to each of the others: name one of them")
	}
	if m, err = r.Machine(name); err != nil {
		return nil, nil, err
	}
	router, err = r.Machine(routerName)
	return router, m, err
}

// endPatience is how long a lab that is told to end may take.
const endPatience = 30 * time.Second

// Delete ends a lab, and removes what is left of one that was killed.
func Delete(name string) error {
	if err := ValidName(name); err != nil {
		return err
	}
	_, err := os.Stat(recordPath(name))
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("there is no lab of the name %s here%s", name, others())
	}
	told := false
	for end := time.Now().Add(endPatience); ; time.Sleep(100 * time.Millisecond) {
		f, about, err := lock(name)
		if err != nil {
			return err
		}
		if f != nil {
			err := errors.Join(about.sweep(), os.Remove(recordPath(name)))
			return errors.Join(err, f.Close())
		}
		if !told && about.PID > 0 {
			told = true
			if err := unix.Kill(about.PID, unix.SIGTERM); err != nil {
				return fmt.Errorf("end the lab %s (pid %d): %w", name, about.PID, err)
			}
		}
		if time.Now().After(end) {
			return fmt.Errorf("the lab %s (pid %d) did not end within %v", name, about.PID, endPatience)
		}
	}
}

// sweep removes processes, control groups and files.
func (r *Running) sweep() error {
	for name, pid := range r.Machines {
		if r.is(pid, name) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	err := removeCgroups(cgroupRoot(r.Name))
	if r.Dir != "" {
		err = errors.Join(err, r.removeDir())
	}
	return err
}

// removeDir removes the lab's folder, if it is one.
func (r *Running) removeDir() error {
	if owner, err := os.ReadFile(filepath.Join(r.Dir, marker)); err != nil || strings.TrimSpace(string(owner)) != r.Name {
		return nil
	}
	var err error
	for range 50 { // processes that are about to end may still write
		if err = rmtree.Remove(r.Dir); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return err
}

func cgroupRoot(name string) string { return "portal-lab-" + name }

// removeCgroups removes control groups in all hierarchies, innermost first. Processes in them are about to end.
func removeCgroups(root string) error {
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for _, line := range strings.Split(string(data), "\n") {
		f := strings.Fields(line)
		if len(f) < 3 || f[2] != "cgroup" && f[2] != "cgroup2" {
			continue
		}
		top := filepath.Join(f[1], root)
		var err error
		for range 100 {
			if err = removeGroups(top); err == nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if err != nil {
			return fmt.Errorf("remove the control groups of the lab: %w", err)
		}
	}
	return nil
}

func removeGroups(top string) error {
	var dirs []string
	err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err == nil && e.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	for _, dir := range slices.Backward(dirs) {
		if e := unix.Rmdir(dir); e != nil && !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, fmt.Errorf("%s: %w", dir, e))
		}
	}
	return err
}

package report

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"portal/test/harness"
)

// Usage is what a process and its children use. Memory is in MB (10^6 bytes).
type Usage struct {
	// PSS is proportional set size: pages that several processes map count in shares. It includes pages of the binary.
	PSS float64
	// Anonymous is memory that is not backed by a file: heap, stacks. It is what the machine must have for the process
	// alone, whatever else runs and whoever else reads the same binary.
	Anonymous float64
	// CPU includes that of children that have ended and were waited for, such as the nft commands of kube-proxy.
	CPU time.Duration
}

// Read takes a process' usage.
func Read(pid int) (Usage, error) {
	var u Usage
	for i, p := range tree(pid) {
		own, err := ReadOwn(p)
		if err != nil {
			if i == 0 {
				return u, err
			}
			continue // a child that has ended meanwhile
		}
		u.PSS, u.Anonymous, u.CPU = u.PSS+own.PSS, u.Anonymous+own.Anonymous, u.CPU+own.CPU
	}
	return u, nil
}

// ReadOwn is Read without the process' children.
func ReadOwn(pid int) (u Usage, err error) {
	if u.PSS, u.Anonymous, err = rollup(pid); err == nil {
		u.CPU, err = cpuTime(pid)
	}
	return u, err
}

// tree is a process and those below it.
func tree(pid int) []int {
	out := []int{pid}
	for i := 0; i < len(out); i++ {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", out[i]))
		for _, list := range lists {
			data, _ := os.ReadFile(list)
			for text := range strings.FieldsSeq(string(data)) {
				if child, err := strconv.Atoi(text); err == nil && !slices.Contains(out, child) {
					out = append(out, child)
				}
			}
		}
	}
	return out
}

func rollup(pid int) (pss, anonymous float64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, 0, err
	}
	found := false
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "Pss:":
			pss, found = megabytes(f[1]), true
		case "Anonymous:":
			anonymous = megabytes(f[1])
		}
	}
	if !found {
		return 0, 0, fmt.Errorf("/proc/%d/smaps_rollup: has no Pss (the process has ended)", pid)
	}
	return pss, anonymous, nil
}

func megabytes(kib string) float64 {
	n, _ := strconv.ParseFloat(kib, 64)
	return n * 1024 / 1e6
}

// tick is the unit of processor time in /proc: 100 a second on every Linux that Go runs on.
const tick = 10 * time.Millisecond

// cpuTime is a process' own time and that of children that it has waited for. The kernel scales user and system time so
// that their sum is what the scheduler has counted, so short bursts are in it.
func cpuTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may contain spaces; the fields behind it do not.
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(f) < 15 {
		return 0, fmt.Errorf("/proc/%d/stat: has only %d fields", pid, len(f))
	}
	var out time.Duration
	for _, text := range f[11:15] { // utime, stime, cutime, cstime
		ticks, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		out += time.Duration(ticks) * tick
	}
	return out, nil
}

// sampleEvery is how often a Sampler looks. What a process has for less than that may be missed, of every subject alike.
const sampleEvery = 20 * time.Millisecond

// pssEvery is how often it takes PSS, for which the kernel walks all pages; it is also taken when anonymous memory has
// grown.
const pssEvery = 500 * time.Millisecond

// Sampler follows a process and remembers the most memory that it and its children had together. It looks at them from
// outside, because the kernel keeps a peak of resident memory only, and none of several processes.
type Sampler struct {
	pid     int
	done    chan struct{}
	end     sync.Once
	stopped sync.WaitGroup
	mu      sync.Mutex
	peak    Usage
}

// Follow starts sampling a process, best when it has just been started. Stop must be called.
func Follow(pid int) *Sampler {
	s := &Sampler{pid: pid, done: make(chan struct{})}
	s.stopped.Go(s.run)
	return s
}

func (s *Sampler) run() {
	ticker := time.NewTicker(sampleEvery)
	defer ticker.Stop()
	var last time.Time // when PSS was taken
	var was float64    // anonymous memory then
	for {
		anonymous, ok := anonymousOf(s.pid)
		if !ok {
			return // it has ended
		}
		s.raise(Usage{Anonymous: anonymous})
		if anonymous > 1.05*was || time.Since(last) > pssEvery {
			if _, err := s.Read(); err != nil {
				return
			}
			last, was = time.Now(), anonymous
		}
		select {
		case <-s.done:
			return
		case <-ticker.C:
		}
	}
}

// anonymousOf reads the anonymous memory of a process and its children from counters, which costs next to nothing.
func anonymousOf(pid int) (sum float64, ok bool) {
	for i, p := range tree(pid) {
		kib, _, found := strings.Cut(field(fmt.Sprintf("/proc/%d/status", p), "RssAnon"), " ")
		if !found && i == 0 {
			return 0, false
		}
		sum += megabytes(kib)
	}
	return sum, true
}

// Read takes the usage now.
func (s *Sampler) Read() (Usage, error) {
	u, err := Read(s.pid)
	if err == nil {
		s.raise(u)
	}
	return u, err
}

func (s *Sampler) raise(u Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peak = Usage{max(s.peak.PSS, u.PSS), max(s.peak.Anonymous, u.Anonymous), max(s.peak.CPU, u.CPU)}
}

// Peak is the most seen so far.
func (s *Sampler) Peak() Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peak
}

// Stop ends sampling.
func (s *Sampler) Stop() {
	s.end.Do(func() { close(s.done) })
	s.stopped.Wait()
}

// Subject is a process that is measured.
type Subject struct {
	*harness.Process
	*Sampler
}

// Start runs a program with its output in dir/name.log, and follows it.
func Start(dir, name, path string, args ...string) (*Subject, error) {
	p, err := harness.Start(dir, name, path, args...)
	if err != nil {
		return nil, err
	}
	return &Subject{p, Follow(p.Pid())}, nil
}

// Stop asks the process to end, and kills it if it does not.
func (s *Subject) Stop() {
	s.Sampler.Stop()
	_ = s.Process.Stop(30 * time.Second)
}

// Kill ends the process at once.
func (s *Subject) Kill() {
	s.Sampler.Stop()
	s.Process.Kill()
}

// The names of the figures of memory, the same in all benchmarks.
const (
	AnonymousSteady = "anonymous memory"
	AnonymousPeak   = "anonymous memory, peak"
	PSSSteady       = "PSS"
	PSSPeak         = "PSS, peak"
)

// Memory adds the four figures of memory of a subject.
func (a At) Memory(subject string, steady, peak Usage) {
	a.Lower(subject, AnonymousSteady, steady.Anonymous, "MB")
	a.Lower(subject, AnonymousPeak, peak.Anonymous, "MB")
	a.Lower(subject, PSSSteady, steady.PSS, "MB")
	a.Lower(subject, PSSPeak, peak.PSS, "MB")
	a.r.Note("Memory is that of the process and its children together, read from outside, its peak every %s: "+
		"anonymous memory (heap and stacks) and PSS, which adds the pages of the binary, which no other process "+
		"shares while a subject is measured.", sampleEvery)
}

// Private copies a binary into a folder, so that its pages are not shared with another process of the same program, and
// returns the copy's path. The copy is read once, so that every start finds it in the page cache.
func Private(binary, dir string) (string, error) {
	in, err := os.Open(binary)
	if err != nil {
		return "", fmt.Errorf("%w (`make build peers` builds it)", err)
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(dir, filepath.Base(binary)), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o755)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(out, in)
	// What was just written is in the page cache in large folios, and a process that touches a byte of one maps all of it.
	// A binary that was read from the disk is not; so the cache is dropped and the file read.
	err = errors.Join(err, out.Sync(), unix.Fadvise(int(out.Fd()), 0, 0, unix.FADV_DONTNEED))
	if _, e := out.Seek(0, io.SeekStart); e == nil {
		_, e = io.Copy(io.Discard, out)
		err = errors.Join(err, e)
	}
	return out.Name(), errors.Join(err, out.Close())
}

package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// noHeapProfile takes no more samples of what is allocated: each walks through tables of the binary that would otherwise not
// be in memory.
func noHeapProfile() { runtime.MemProfileRate = 0 }

// trimMemory gives back, once the first lists are in, what only starting took: the garbage of the lists, and those pages
// of this binary that only its initialisation touched. Portal is one binary for many tasks, and most of it is not this.
func trimMemory(ctx context.Context, ready func() bool) {
	for !ready() {
		if !wait(ctx, 200*time.Millisecond) {
			return
		}
	}
	trim()
}

// trimEvery is how often a process looks at how much memory it holds.
const trimEvery = 10 * time.Second

// keepTrimmed gives back what bursts leave behind: a process that allocates little would not do so before the
// next collection of garbage, which may be minutes away.
func keepTrimmed(ctx context.Context) {
	least := resident()
	for wait(ctx, trimEvery) {
		if resident() > least+least/8 {
			trim()
			least = resident()
		}
	}
}

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func trim() {
	debug.FreeOSMemory()
	if f, err := os.Open("/proc/self/smaps"); err == nil {
		defer f.Close()
		for _, m := range cleanMappings(bufio.NewScanner(f)) {
			// Clean pages of a file come back from the page cache when they are needed again: a few at a time, not by the
			// two megabytes that a kernel maps where the cache holds them in one piece.
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, m.start, m.length, unix.MADV_NOHUGEPAGE)
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, m.start, m.length, unix.MADV_DONTNEED)
		}
	}
}

// resident is how many pages of memory the process holds.
func resident() (pages int) {
	raw, _ := os.ReadFile("/proc/self/statm")
	_, _ = fmt.Sscanf(string(raw), "%d %d", new(int), &pages)
	return pages
}

type mapping struct{ start, length uintptr }

// cleanMappings finds the read-only mappings of the running binary none of whose pages is a copy of its own. (Pages count
// as dirty as long as the file itself, just installed, is on its way to the disk: that does not matter.)
func cleanMappings(s *bufio.Scanner) []mapping {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	var out []mapping
	var current mapping
	candidate := false
	for s.Scan() {
		line := s.Text()
		var start, end uintptr
		var perms string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &start, &end, &perms); n == 3 {
			current = mapping{start, end - start}
			candidate = strings.HasSuffix(line, " "+self) && (perms == "r-xp" || perms == "r--p")
			continue
		}
		if candidate && strings.HasPrefix(line, "Anonymous:") {
			if strings.Fields(line)[1] == "0" {
				out = append(out, current)
			}
			candidate = false
		}
	}
	return out
}

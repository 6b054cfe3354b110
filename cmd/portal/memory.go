package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
)

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

const (
	// lookEvery is how often a process looks at how much memory it holds, trimEvery how often it collects garbage for it.
	lookEvery = 400 * time.Millisecond
	trimEvery = 10 * time.Second
	// quiet is how much of the processor a process may have taken since the last look for it to have had nothing to do.
	quiet = time.Millisecond
)

// keepTrimmed gives back what bursts leave behind: a process that allocates little would not do so before the
// next collection of garbage, which may be minutes away, and the kernel maps sixteen pages of a binary where one is needed.
// Pages of the binary wait for the end of a burst: in its midst they would come back at once.
func keepTrimmed(ctx context.Context) {
	least, leastOfFiles := resident()
	busy, trimmed := processorTime(), time.Now()
	for wait(ctx, lookEvery) {
		all, ofFiles := resident()
		before := busy
		busy = processorTime()
		switch {
		case time.Since(trimmed) > trimEvery && all > least+least/8:
			trim()
			trimmed = time.Now()
			least, leastOfFiles = resident()
		case busy-before < quiet && ofFiles > leastOfFiles+leastOfFiles/4:
			dropCleanPages()
			_, leastOfFiles = resident()
		}
	}
}

// processorTime is how much of it the process has taken.
func processorTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // fails for no process that asks for itself
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
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
	dropCleanPages()
}

// dropCleanPages gives back the pages of this binary: they come back from the page cache when they are needed again, a few
// at a time, not by the two megabytes that a kernel maps where the cache holds them in one piece.
func dropCleanPages() {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer f.Close()
	for _, m := range cleanMappings(bufio.NewScanner(f)) {
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, m.start, m.length, unix.MADV_NOHUGEPAGE)
		_, _, _ = unix.Syscall(unix.SYS_MADVISE, m.start, m.length, unix.MADV_DONTNEED)
	}
}

// resident is how many pages of memory the process holds, and how many of those are files'.
func resident() (all, ofFiles int) {
	raw, _ := os.ReadFile("/proc/self/statm")
	_, _ = fmt.Sscanf(string(raw), "%d %d %d", new(int), &all, &ofFiles)
	return all, ofFiles
}

type mapping struct{ start, length uintptr }

// cleanMappings finds the read-only mappings of the running binary none of whose pages is a copy of its own. (Pages count
// as dirty as long as the file itself, just installed, is on its way to the disk: that does not matter.)
func cleanMappings(s *bufio.Scanner) []mapping {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	name := []byte(" " + self)
	var out []mapping
	var current mapping
	candidate := false
	for s.Scan() {
		line := s.Bytes()
		switch {
		case bytes.HasSuffix(line, name):
			var start, end uintptr
			var perms string
			n, _ := fmt.Sscanf(string(line), "%x-%x %s", &start, &end, &perms)
			current = mapping{start, end - start}
			candidate = n == 3 && (perms == "r-xp" || perms == "r--p")
		case candidate && bytes.HasPrefix(line, []byte("Anonymous:")):
			if string(bytes.Fields(line)[1]) == "0" {
				out = append(out, current)
			}
			candidate = false
		}
	}
	return out
}

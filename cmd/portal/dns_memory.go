package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// trimMemory gives back, once the first lists are in, what only starting took: the garbage of the lists, and those pages
// of this binary that only its initialisation touched. Portal is one binary for many tasks, and most of it is not DNS.
func trimMemory(ctx context.Context, ready func() bool) {
	for !ready() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
	}
	debug.FreeOSMemory()
	if f, err := os.Open("/proc/self/smaps"); err == nil {
		defer f.Close()
		for _, m := range cleanMappings(bufio.NewScanner(f)) {
			// Clean pages of a file come back from the page cache when they are needed again.
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, m.start, m.length, unix.MADV_DONTNEED)
		}
	}
}

type mapping struct{ start, length uintptr }

// cleanMappings finds the read-only mappings of the running binary none of whose pages has been written to.
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
		if candidate && strings.HasPrefix(line, "Private_Dirty:") {
			if strings.Fields(line)[1] == "0" {
				out = append(out, current)
			}
			candidate = false
		}
	}
	return out
}

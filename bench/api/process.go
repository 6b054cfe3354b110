package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// process is what the kernel says that a process has used.
type process struct {
	CPU time.Duration
	// Resident is its memory now, Peak the most it ever had; Private is the part of Resident that is not pages of files,
	// such as the program itself. All in bytes.
	Resident, Peak, Private int64
}

// usage is that of a server, of the etcd beside it, and of this program, which plays the clients.
type usage struct{ Server, Etcd, Clients process }

// tick is the unit of processor time in /proc: 100 a second on every Linux that Go runs on.
const tick = 10 * time.Millisecond

func readProcess(pid int) (process, error) {
	var p process
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, err
	}
	// The name, in parentheses, may hold spaces; what follows it does not.
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return p, fmt.Errorf("/proc/%d/stat: has only %d fields", pid, len(fields))
	}
	for _, text := range fields[11:13] { // utime, stime
		ticks, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return p, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		p.CPU += time.Duration(ticks) * tick
	}
	status, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return p, err
	}
	defer status.Close()
	lines := bufio.NewScanner(status)
	for lines.Scan() {
		var kib int64
		switch {
		case scanKiB(lines.Text(), "VmRSS:", &kib):
			p.Resident = kib << 10
		case scanKiB(lines.Text(), "VmHWM:", &kib):
			p.Peak = kib << 10
		case scanKiB(lines.Text(), "RssAnon:", &kib):
			p.Private = kib << 10
		}
	}
	return p, lines.Err()
}

func scanKiB(line, key string, into *int64) bool {
	rest, ok := strings.CutPrefix(line, key)
	if !ok {
		return false
	}
	_, err := fmt.Sscanf(strings.TrimSpace(rest), "%d kB", into)
	return err == nil
}

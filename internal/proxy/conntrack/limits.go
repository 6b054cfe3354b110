package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Limits are settings of the kernel's tracking of flows. Zero leaves one as it is.
type Limits struct {
	MaxPerCore, Min              int
	TCPEstablished, TCPCloseWait time.Duration
	TCPLiberal                   bool
	UDP, UDPStream               time.Duration
}

const sysctls = "/proc/sys/net/netfilter"

// Apply sets the limits in the kernel. It goes on after an error: in a container some can't be written, and Services work
// without them.
func (l *Limits) Apply() []error { return l.apply(sysctls, runtime.NumCPU()) }

func (l *Limits) apply(dir string, processors int) (errs []error) {
	write := func(name string, value int, raiseOnly bool) {
		if value == 0 {
			return
		}
		if err := writeSysctl(filepath.Join(dir, name), value, raiseOnly); err != nil {
			errs = append(errs, err)
		}
	}
	if l.MaxPerCore > 0 {
		// A table that somebody made larger stays so.
		write("nf_conntrack_max", max(l.MaxPerCore*processors, l.Min), true)
	}
	seconds := func(d time.Duration) int { return int(d / time.Second) }
	write("nf_conntrack_tcp_timeout_established", seconds(l.TCPEstablished), false)
	write("nf_conntrack_tcp_timeout_close_wait", seconds(l.TCPCloseWait), false)
	write("nf_conntrack_udp_timeout", seconds(l.UDP), false)
	write("nf_conntrack_udp_timeout_stream", seconds(l.UDPStream), false)
	if l.TCPLiberal {
		write("nf_conntrack_tcp_be_liberal", 1, false)
	}
	return errs
}

func writeSysctl(path string, value int, raiseOnly bool) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("this kernel has no %s", path)
	}
	if now, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil && (now == value || raiseOnly && now > value) {
		return nil
	}
	return os.WriteFile(path, []byte(strconv.Itoa(value)), 0o644)
}

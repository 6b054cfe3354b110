package hostnet

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Problem is a setting or a missing route because of which packets to Services are lost.
type Problem struct {
	// Name is the sysctl's, or "route".
	Name    string `json:"name"`
	Message string `json:"message"`
	// Fix is a command that removes the problem.
	Fix string `json:"fix"`
	// Lost: packets are lost now. Otherwise some may be, depending on the network around.
	Lost bool `json:"lost"`

	settings []setting
}

func (p Problem) String() string { return p.Message + "; " + p.Fix }

// Configurable says whether Configure can remove the problem.
func (p Problem) Configurable() bool { return len(p.settings) > 0 }

// setting is a sysctl, by its path under /proc/sys, and the value that it should have.
type setting struct{ path, value string }

// Needs are what has to work on this machine.
type Needs struct {
	// Forward4 and Forward6: packets of the family are forwarded to other machines or to Pods.
	Forward4, Forward6 bool
	// Reach are addresses that processes on this machine connect to.
	Reach []netip.Addr
}

const procSys = "/proc/sys"

// Check returns what is in the way of the needs.
func Check(n Needs) (out []Problem) {
	if n.Forward4 && read("net/ipv4/ip_forward") == "0" {
		out = append(out, Problem{
			Name: "net.ipv4.ip_forward", Lost: true,
			Message:  "net.ipv4.ip_forward is 0: IPv4 packets to Services from Pods and from other machines are lost",
			Fix:      "sysctl -w net.ipv4.ip_forward=1",
			settings: []setting{{"net/ipv4/ip_forward", "1"}},
		})
	}
	if n.Forward6 && read("net/ipv6/conf/all/forwarding") == "0" {
		out = append(out, Problem{
			Name: "net.ipv6.conf.all.forwarding", Lost: true,
			Message: "net.ipv6.conf.all.forwarding is 0: IPv6 packets to Services from Pods and from other machines are lost",
			Fix:     "sysctl -w net.ipv6.conf.all.forwarding=1 (and net.ipv6.conf.INTERFACE.accept_ra=2 before it, where routes come from router advertisements)",
			// A kernel that forwards accepts router advertisements only where accept_ra is 2, and drops routes learned from others.
			settings: append(acceptRA(), setting{"net/ipv6/conf/all/forwarding", "1"}),
		})
	}
	if p, ok := strictFilter(); ok && n.Forward4 {
		out = append(out, p)
	}
	for _, a := range n.Reach {
		if p, ok := unreachable(a); ok {
			out = append(out, p)
		}
	}
	return out
}

// acceptRA are the interfaces that accept router advertisements as long as the machine does not forward.
func acceptRA() (out []setting) {
	interfaces, _ := filepath.Glob(procSys + "/net/ipv6/conf/*/accept_ra")
	for _, path := range interfaces {
		if path = strings.TrimPrefix(path, procSys+"/"); read(path) == "1" {
			out = append(out, setting{path, "2"})
		}
	}
	return out
}

// strictFilter looks for reverse path filters (RFC 3704) that drop packets whose answers would leave by another interface.
// With a single interface there is no other.
func strictFilter() (Problem, bool) {
	if read("net/ipv4/conf/all/rp_filter") == "2" { // the greater of all and the interface's counts
		return Problem{}, false
	}
	var strict []string
	links, _ := netlink.LinkList()
	for _, l := range links {
		attrs := l.Attrs()
		if attrs.Name == "lo" || attrs.OperState != netlink.OperUp && attrs.OperState != netlink.OperUnknown {
			continue
		}
		if addrs, _ := netlink.AddrList(l, netlink.FAMILY_V4); len(addrs) == 0 {
			continue
		}
		own := read("net/ipv4/conf/" + attrs.Name + "/rp_filter")
		if own == "1" || own == "0" && read("net/ipv4/conf/all/rp_filter") == "1" {
			strict = append(strict, attrs.Name)
		}
	}
	if len(strict) < 2 {
		return Problem{}, false
	}
	return Problem{
		Name: "net.ipv4.conf.all.rp_filter",
		Message: fmt.Sprintf("rp_filter is strict (1) on %s: packets to Services that come in by one interface and whose answers leave by another are lost",
			strings.Join(strict, ", ")),
		Fix:      "sysctl -w net.ipv4.conf.all.rp_filter=2",
		settings: []setting{{"net/ipv4/conf/all/rp_filter", "2"}},
	}, true
}

// unreachable says whether this machine has no route to an address: a process that connects to it fails before its packet
// meets any rule.
func unreachable(a netip.Addr) (Problem, bool) {
	_, err := netlink.RouteGet(a.AsSlice())
	if !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINVAL) {
		return Problem{}, false // there is one, or that can't be told
	}
	p, family := netip.PrefixFrom(a, 16).Masked(), ""
	if a.Is6() {
		p, family = netip.PrefixFrom(a, 112).Masked(), "-6 "
	}
	return Problem{
		Name: "route", Lost: true,
		Message: fmt.Sprintf("this machine has no route to the Service address %s: its own processes can't reach Services", a),
		Fix:     fmt.Sprintf("add a default route, or: ip %sroute add %s dev INTERFACE", family, p),
	}, true
}

func read(path string) string {
	b, _ := os.ReadFile(filepath.Join(procSys, path))
	return strings.TrimSpace(string(b))
}

// Configured remembers settings that were changed, with the values that they had.
type Configured struct {
	before []setting
	file   string // that has them, too; or empty
}

// Configure changes the settings that the problems are about, and remembers how they were.
func (c *Configured) Configure(problems []Problem) (changed []string, err error) {
	var errs []error
	for _, p := range problems {
		for _, s := range p.settings {
			was := read(s.path)
			if was == s.value {
				continue
			}
			if err := write(s); err != nil {
				errs = append(errs, err)
				continue
			}
			c.before = append(c.before, setting{s.path, was})
			changed = append(changed, strings.ReplaceAll(s.path, "/", ".")+"="+s.value)
		}
	}
	return changed, errors.Join(errs...)
}

// Remember keeps the values of settings that somebody else is about to change. Those that don't exist are left out.
func (c *Configured) Remember(paths ...string) {
	for _, path := range paths {
		if was := read(path); was != "" {
			c.before = append(c.before, setting{path, was})
		}
	}
}

// RememberIn is Remember, with a file that outlives this process: of one that was killed, the next one restores what was before both.
func (c *Configured) RememberIn(file string, paths ...string) error {
	here := world()
	var kept remembered
	if data, err := os.ReadFile(file); err == nil && json.Unmarshal(data, &kept) == nil && kept.World == here {
		for path, was := range kept.Before {
			c.before = append(c.before, setting{path, was})
		}
		c.file = file
		return nil
	}
	c.Remember(paths...)
	kept = remembered{World: here, Before: map[string]string{}}
	for _, s := range c.before {
		kept.Before[s.path] = s.value
	}
	data, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, data, 0o600)); err != nil {
		return err
	}
	c.file = file
	return nil
}

// remembered is what such a file has. Settings are those of one boot and one network namespace.
type remembered struct {
	World  string
	Before map[string]string
}

func world() string {
	namespace, _ := os.Readlink("/proc/thread-self/ns/net")
	return read("kernel/random/boot_id") + " " + namespace
}

// Restore gives settings back the values that they had before, the last one first.
func (c *Configured) Restore() error {
	var errs []error
	if c.file != "" {
		errs = append(errs, os.Remove(c.file))
	}
	for i := len(c.before) - 1; i >= 0; i-- {
		if s := c.before[i]; read(s.path) != s.value {
			errs = append(errs, write(s))
		}
	}
	c.before = nil
	return errors.Join(errs...)
}

func write(s setting) error {
	if err := os.WriteFile(filepath.Join(procSys, s.path), []byte(s.value), 0o644); err != nil {
		return fmt.Errorf("set %s to %s: %w", strings.ReplaceAll(s.path, "/", "."), s.value, err)
	}
	return nil
}

package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/virtual"
)

// kernel is what the mode talks to; tests have one of their own.
type kernel struct {
	director director
	device   device
	rules    rules
	sysctl   sysctl
}

// director is the kernel's table of virtual servers.
type director interface {
	// servers lists all, foreign ones too, without their endpoints.
	servers() (map[key]*server, error)
	dests(key) (map[netip.AddrPort]*dest, error)
	// addServer returns EEXIST where there is one.
	addServer(key, *server) error
	setServer(key, *server) error
	delServer(key) error
	addDest(at key, to netip.AddrPort, weight int) error
	setDest(at key, to netip.AddrPort, weight int) error
	delDest(at key, to netip.AddrPort) error
	configure(Options) error
	close()
}

// device holds the Services' cluster IPs, so that the kernel takes packets to them for its own, where IPVS finds them; and
// it is where packets with our marks are led, so that the kernel takes them for its own whatever their address.
type device interface {
	probe() error
	// ensure makes the device and the way there for packets of some families, or finds them.
	ensure([]intent.Family) error
	// routed says what is missing of the routing rules and routes that bring packets with our marks here.
	routed([]intent.Family) error
	// list are the addresses on the device; none where there is no device.
	list() (map[netip.Addr]bool, error)
	// elsewhere says whether another device has an address that ours has not.
	elsewhere(netip.Addr) (bool, error)
	add(netip.Addr) error
	del(netip.Addr) error
	remove() error
	close()
}

func openKernel() (*kernel, error) {
	k := &kernel{sysctl: procfs{}}
	var err error
	if k.device, err = openLink(); err != nil {
		return nil, err
	}
	if k.rules, err = openTable(); err != nil {
		k.device.close()
		return nil, err
	}
	switch table, err := virtual.Dial(); {
	case errors.Is(err, virtual.ErrNone):
		// Where there is no IPVS there is nothing of ours in it either.
		k.director = noIPVS{}
	case err != nil:
		k.device.close()
		k.rules.close()
		return nil, err
	default:
		k.director = &ipvs{table}
	}
	return k, nil
}

func (k *kernel) close() {
	k.director.close()
	k.device.close()
	k.rules.close()
}

// ours lists our servers with their endpoints: those with our marks, and those on addresses that we hold.
func (k *kernel) ours(held map[netip.Addr]bool) (map[key]*server, error) {
	all, err := k.director.servers()
	if err != nil {
		return nil, fmt.Errorf("list virtual servers: %w", err)
	}
	out := map[key]*server{}
	for at, s := range all {
		if !ourMark(at.mark) && !held[at.addr] {
			continue
		}
		if s.dests, err = k.director.dests(at); err != nil {
			return nil, fmt.Errorf("list the endpoints of %v: %w", at, err)
		}
		out[at] = s
	}
	return out, nil
}

// hasIPVS loads IPVS if need be, and says what to do if that fails.
func hasIPVS() error {
	err := findIPVS()
	if !errors.Is(err, virtual.ErrNone) {
		return err
	}
	if path, err := exec.LookPath("modprobe"); err == nil {
		_ = exec.Command(path, "ip_vs").Run()
	}
	if err = findIPVS(); errors.Is(err, virtual.ErrNone) {
		return fmt.Errorf("%w: load the module ip_vs (modprobe ip_vs), or choose another --proxy-mode", err)
	}
	return err
}

func findIPVS() error {
	table, err := virtual.Dial()
	if err == nil {
		table.Close()
	}
	return err
}

// noIPVS is the director of a kernel without IPVS.
type noIPVS struct{ director }

func (noIPVS) servers() (map[key]*server, error) { return nil, nil }
func (noIPVS) close()                            {}

// ipvs is the kernel's own director.
type ipvs struct{ *virtual.Table }

func (d *ipvs) close() { d.Close() }

const (
	flagPersistent = 0x1
	// flagPorts is IP_VS_SVC_F_SCHED_MH_PORT.
	flagPorts = 0x10
)

func (k key) virtual() virtual.Server {
	s := virtual.Server{Mark: k.mark, Family: unix.AF_INET}
	if k.family == intent.IPv6 {
		s.Family = unix.AF_INET6
	}
	if k.mark == 0 {
		s.Addr, s.Protocol, s.Port = k.addr, uint16(k.protocol), k.port
	}
	return s
}

func (s *server) virtual(at key) virtual.Server {
	out := at.virtual()
	out.Scheduler = s.scheduler
	if s.ports {
		out.Flags |= flagPorts
	}
	return out
}

func (d *ipvs) servers() (map[key]*server, error) {
	list, err := d.Servers()
	if err != nil {
		return nil, err
	}
	out := map[key]*server{}
	for _, s := range list {
		family := intent.IPv4
		if s.Family == unix.AF_INET6 {
			family = intent.IPv6
		}
		at := marked(s.Mark, family)
		if s.Mark == 0 {
			at.addr, at.protocol, at.port = s.Addr, intent.Protocol(s.Protocol), s.Port
		}
		out[at] = &server{scheduler: s.Scheduler, ports: s.Flags&flagPorts != 0, persistent: s.Flags&flagPersistent != 0}
	}
	return out, nil
}

func (d *ipvs) dests(at key) (map[netip.AddrPort]*dest, error) {
	list, err := d.Dests(at.virtual())
	if err != nil {
		return nil, err
	}
	out := map[netip.AddrPort]*dest{}
	for _, e := range list {
		out[e.Addr] = &dest{e.Weight, e.Active + e.Inactive, e.Active}
	}
	return out, nil
}

func (d *ipvs) addServer(at key, s *server) error { return d.AddServer(s.virtual(at)) }

func (d *ipvs) setServer(at key, s *server) error { return d.SetServer(s.virtual(at)) }

func (d *ipvs) delServer(at key) error {
	return unless(unix.ESRCH, d.DelServer(at.virtual()))
}

func (d *ipvs) addDest(at key, to netip.AddrPort, weight int) error {
	err := d.AddDest(at.virtual(), virtual.Dest{Addr: to, Weight: weight})
	if errors.Is(err, unix.EEXIST) {
		return d.setDest(at, to, weight)
	}
	return err
}

func (d *ipvs) setDest(at key, to netip.AddrPort, weight int) error {
	return d.SetDest(at.virtual(), virtual.Dest{Addr: to, Weight: weight})
}

func (d *ipvs) delDest(at key, to netip.AddrPort) error {
	return unless(unix.ENOENT, d.DelDest(at.virtual(), virtual.Dest{Addr: to}))
}

func (d *ipvs) configure(o Options) error {
	if o.TCPTimeout == 0 && o.TCPFinTimeout == 0 && o.UDPTimeout == 0 {
		return nil
	}
	return d.SetTimeouts(virtual.Timeouts{TCP: o.TCPTimeout, TCPFin: o.TCPFinTimeout, UDP: o.UDPTimeout})
}

// unless makes an error that says that it was done already nil.
func unless(fine error, err error) error {
	if errors.Is(err, fine) {
		return nil
	}
	return err
}

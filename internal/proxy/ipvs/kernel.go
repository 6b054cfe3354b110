package ipvs

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"

	driver "github.com/moby/ipvs"
	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
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
	if !hasFamily() {
		// Where there is no IPVS there is nothing of ours in it either.
		k.director = noIPVS{}
		return k, nil
	}
	// The driver logs an error where there is no modprobe, though IPVS is there and nothing is wrong.
	logrus.SetOutput(io.Discard)
	h, err := driver.New("")
	if err != nil {
		k.device.close()
		k.rules.close()
		return nil, fmt.Errorf("open a connection to IPVS: %w", err)
	}
	k.director = &ipvs{h}
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

// hasFamily says whether the kernel has IPVS, loaded.
func hasFamily() bool {
	_, err := netlink.GenlFamilyGet("IPVS")
	return err == nil
}

// hasIPVS loads IPVS if need be, and says what to do if that fails.
func hasIPVS() error {
	if hasFamily() {
		return nil
	}
	if path, err := exec.LookPath("modprobe"); err == nil {
		_ = exec.Command(path, "ip_vs").Run()
	}
	if hasFamily() {
		return nil
	}
	return errors.New("this kernel has no IPVS: load the module ip_vs (modprobe ip_vs), or choose another --proxy-mode")
}

// noIPVS is the director of a kernel without IPVS.
type noIPVS struct{ director }

func (noIPVS) servers() (map[key]*server, error) { return nil, nil }
func (noIPVS) close()                            {}

// ipvs is the kernel's own director.
type ipvs struct{ *driver.Handle }

func (d *ipvs) close() { d.Handle.Close() }

const (
	flagPersistent = 0x1
	// flagPorts is IP_VS_SVC_F_SCHED_MH_PORT.
	flagPorts = 0x10
)

func (k key) service() *driver.Service {
	s := &driver.Service{FWMark: k.mark, AddressFamily: unix.AF_INET, Netmask: 0xffffffff}
	if k.family == intent.IPv6 {
		s.AddressFamily, s.Netmask = unix.AF_INET6, 128
	}
	if k.mark == 0 {
		s.Address, s.Protocol, s.Port = k.addr.AsSlice(), uint16(k.protocol), k.port
	}
	return s
}

func (s *server) service(at key) *driver.Service {
	out := at.service()
	out.SchedName = s.scheduler
	if s.ports {
		out.Flags |= flagPorts
	}
	return out
}

func (d *ipvs) servers() (map[key]*server, error) {
	list, err := d.GetServices()
	if err != nil {
		return nil, err
	}
	out := map[key]*server{}
	for _, s := range list {
		family := intent.IPv4
		if s.AddressFamily == unix.AF_INET6 {
			family = intent.IPv6
		}
		at := marked(s.FWMark, family)
		if s.FWMark == 0 {
			at.addr, _ = netip.AddrFromSlice(s.Address)
			at.protocol, at.port = intent.Protocol(s.Protocol), s.Port
		}
		out[at] = &server{scheduler: s.SchedName, ports: s.Flags&flagPorts != 0, persistent: s.Flags&flagPersistent != 0}
	}
	return out, nil
}

func (d *ipvs) dests(at key) (map[netip.AddrPort]*dest, error) {
	list, err := d.GetDestinations(at.service())
	if err != nil {
		return nil, err
	}
	out := map[netip.AddrPort]*dest{}
	for _, e := range list {
		a, _ := netip.AddrFromSlice(e.Address)
		out[netip.AddrPortFrom(a, e.Port)] = &dest{e.Weight, e.ActiveConnections + e.InactiveConnections, e.ActiveConnections}
	}
	return out, nil
}

func destination(to netip.AddrPort, weight int) *driver.Destination {
	d := &driver.Destination{Address: to.Addr().AsSlice(), Port: to.Port(), Weight: weight, AddressFamily: unix.AF_INET}
	if to.Addr().Is6() {
		d.AddressFamily = unix.AF_INET6
	}
	return d
}

func (d *ipvs) addServer(at key, s *server) error { return d.NewService(s.service(at)) }

func (d *ipvs) setServer(at key, s *server) error { return d.UpdateService(s.service(at)) }

func (d *ipvs) delServer(at key) error {
	return unless(unix.ESRCH, d.DelService(at.service()))
}

func (d *ipvs) addDest(at key, to netip.AddrPort, weight int) error {
	err := d.NewDestination(at.service(), destination(to, weight))
	if errors.Is(err, unix.EEXIST) {
		return d.setDest(at, to, weight)
	}
	return err
}

func (d *ipvs) setDest(at key, to netip.AddrPort, weight int) error {
	return d.UpdateDestination(at.service(), destination(to, weight))
}

func (d *ipvs) delDest(at key, to netip.AddrPort) error {
	return unless(unix.ENOENT, d.DelDestination(at.service(), destination(to, 0)))
}

func (d *ipvs) configure(o Options) error {
	if o.TCPTimeout == 0 && o.TCPFinTimeout == 0 && o.UDPTimeout == 0 {
		return nil
	}
	return d.SetConfig(&driver.Config{TimeoutTCP: o.TCPTimeout, TimeoutTCPFin: o.TCPFinTimeout, TimeoutUDP: o.UDPTimeout})
}

// unless makes an error that says that it was done already nil.
func unless(fine error, err error) error {
	if errors.Is(err, fine) {
		return nil
	}
	return err
}

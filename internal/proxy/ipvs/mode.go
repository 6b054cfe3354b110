// Package ipvs is the proxy mode that programs a plan.Snapshot into the kernel's virtual server (IPVS): a server for
// each frontend, or for each pool where one address leads to several. What IPVS can't do (telling origins apart,
// rewriting sources, refusing) a small nftables table of our own does. It encodes decisions and makes none.
package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"portal/internal/intent"
	"portal/internal/proxy/backend"
)

// Options are what an administrator can choose.
type Options struct {
	// Scheduler is how IPVS chooses among endpoints; empty: rr.
	Scheduler string
	// StrictARP keeps the node from answering ARP requests for Services' addresses, and from naming them in its own.
	StrictARP bool
	// Timeouts after which IPVS forgets an idle connection; zero: the kernel's.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Mark is the bit of the connection mark that says that the source is to be rewritten. Zero: 0x4000.
	Mark uint32
}

const (
	defaultScheduler = "rr"
	defaultMark      = 0x4000
)

// Schedulers are those that a Service can be balanced with: round robin and least connections, each also weighted;
// hashes of the destination, of the source, and Maglev's; shortest expected delay; never queue; least connections by
// locality, without and with replication.
var Schedulers = []string{"rr", "wrr", "lc", "wlc", "dh", "sh", "sed", "nq", "mh", "lblc", "lblcr"}

// Validate says what is wrong with the options.
func (o *Options) Validate() error {
	if o.Scheduler != "" && !slices.Contains(Schedulers, o.Scheduler) {
		return fmt.Errorf("IPVS scheduler %q is not one of %s", o.Scheduler, strings.Join(Schedulers, ", "))
	}
	for _, d := range []time.Duration{o.TCPTimeout, o.TCPFinTimeout, o.UDPTimeout} {
		if d < 0 {
			return fmt.Errorf("an IPVS timeout of %v is less than nothing", d)
		}
	}
	return nil
}

// New returns the mode.
func New(o Options) backend.Mode {
	if o.Scheduler == "" {
		o.Scheduler = defaultScheduler
	}
	if o.Mark == 0 {
		o.Mark = defaultMark
	}
	return &mode{o}
}

type mode struct{ Options }

func (m *mode) Name() string { return "ipvs" }

// Traits are what the mode can do and does by default.
func (m *mode) Traits() backend.Traits {
	return backend.Traits{Fallback: "iptables"}
}

func (m *mode) Limits() []string {
	return []string{
		"node ports are not served on loopback addresses (127.0.0.1, ::1)",
		"connections to a cluster IP that no Service has any more end after five minutes at the latest",
		"the node's own connections to Services always come from an address of the node, also where the plan would leave them as they are",
		"a client that uses one of its ports for two addresses of a Service at a time may get answers from one of them only, unless it is masqueraded",
		fmt.Sprintf("of the endpoints of a Service with affinity, at most %d keep their clients", maxSlot),
	}
}

func (m *mode) Open(context.Context) (backend.Backend, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	if err := hasIPVS(); err != nil {
		return nil, err
	}
	k, err := openKernel()
	if err != nil {
		return nil, err
	}
	return newBackend(m.Options, k), nil
}

// Probe creates what the mode consists of, a virtual server with the scheduler and a device, and removes it again: there
// is no other way to learn whether a kernel can, and whether its modules can be loaded.
func (m *mode) Probe(_ context.Context, families []intent.Family) error {
	if err := m.Validate(); err != nil {
		return err
	}
	if err := hasIPVS(); err != nil {
		return err
	}
	err := m.try(families)
	if errors.Is(err, os.ErrPermission) {
		return errors.New("changing IPVS, devices and nftables needs the privilege CAP_NET_ADMIN: run as root")
	}
	return err
}

func (m *mode) try(families []intent.Family) error {
	k, err := openKernel()
	if err != nil {
		return err
	}
	defer k.close()
	for _, f := range families {
		probe := key{mark: probeMark, family: f}
		if err := k.director.addServer(probe, m.server()); err != nil {
			return fmt.Errorf("the kernel refuses the IPVS scheduler %q for IPv%d (%w): load the module ip_vs_%s, or choose another --ipvs-scheduler",
				m.Scheduler, f, err, m.Scheduler)
		}
		if err := k.director.delServer(probe); err != nil {
			return fmt.Errorf("remove a virtual server made to see whether it can be: %w", err)
		}
	}
	if err := k.device.probe(); err != nil {
		return fmt.Errorf("the IPVS mode needs a dummy device (%w): load the module dummy", err)
	}
	if err := k.rules.probe(); err != nil {
		return fmt.Errorf("the IPVS mode needs nftables of Linux 5.9 or newer for what IPVS lacks (%w): load the modules nf_tables and nft_reject_ipv4", err)
	}
	return nil
}

// Cleanup removes our servers, which are those on our addresses and those with our marks; then the device and the table.
// It goes on after an error.
func (m *mode) Cleanup(context.Context) error {
	k, err := openKernel()
	if err != nil {
		return err
	}
	defer k.close()
	return k.cleanup()
}

func (k *kernel) cleanup() error {
	held, err := k.device.list()
	if err != nil {
		return err
	}
	found, err := k.rules.read()
	if err != nil {
		return err
	}
	maps.Copy(found.addrs, held)
	servers, err := k.ours(found.addrs)
	errs := []error{err}
	for at := range servers {
		errs = append(errs, k.director.delServer(at))
	}
	return errors.Join(append(errs, k.device.remove(), k.rules.remove())...)
}

// Package nftables is the proxy mode that programs a plan.Snapshot into the kernel's nf_tables over netlink: a number of rules
// that doesn't grow with the Services, which are elements of maps. It encodes decisions and makes none.
package nftables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
)

// Options are what an administrator can choose.
type Options struct {
	// Mark is the bit of the packet mark that says between two hooks that the source is to be rewritten. Zero: 0x4000,
	// as with kube-proxy.
	Mark uint32
}

const defaultMark = 0x4000

// tableName is ours in both families.
const tableName = "portal"

// New returns the mode.
func New(o Options) backend.Mode {
	if o.Mark == 0 {
		o.Mark = defaultMark
	}
	return &mode{Options: o}
}

type mode struct {
	Options
	spare nf.Spare
}

func (m *mode) Name() string { return "nftables" }

// Traits are what the mode can do and does by default.
func (m *mode) Traits() backend.Traits {
	return backend.Traits{
		Traits:    plan.Traits{PrimaryNodePorts: true, DropsUnassigned: true},
		Automatic: true, FailureMetric: "sync_proxy_rules_nftables_sync_failures_total", PartialFailureMetric: "sync_proxy_rules_nftables_sync_failures_total",
	}
}

func (m *mode) Limits() []string {
	return []string{"node ports are not served on loopback addresses (127.0.0.1, ::1)"}
}

func (m *mode) Open(context.Context) (backend.Backend, error) {
	s, err := m.spare.Take()
	if err != nil {
		return nil, err
	}
	return &tables{socket: s, mark: m.Mark}, nil
}

// Cleanup deletes our tables.
func (m *mode) Cleanup(context.Context) error {
	s, err := nf.Dial()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Remove(layoutOf(intent.IPv4, tableName).at, layoutOf(intent.IPv6, tableName).at)
}

var families = []intent.Family{intent.IPv4, intent.IPv6}

// Probe lets the kernel check all that the mode may ever write, in a table of its own that the same transaction deletes.
func (m *mode) Probe(_ context.Context, wanted []intent.Family) error {
	s, err := m.spare.Take()
	if err != nil {
		return errors.New("this kernel has no nf_tables netlink: load the module nf_tables, or choose --proxy-mode=iptables")
	}
	defer func() { m.spare.Put(s) }()
	if probe(s, m.Mark, wanted...) == nil {
		return nil
	}
	for _, f := range wanted {
		err := probe(s, m.Mark, f)
		switch {
		case err == nil:
		case errors.Is(err, unix.EPERM):
			return errors.New("changing nftables needs the privilege CAP_NET_ADMIN: run as root")
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT):
			return fmt.Errorf("this kernel's nftables doesn't know IPv%d (%w): load nf_tables and nft_chain_nat, or choose --proxy-mode=iptables", f, err)
		default:
			return fmt.Errorf("this kernel lacks something that the nftables mode needs (IPv%d, %w): Linux 5.13 or newer has all, or choose --proxy-mode=iptables", f, err)
		}
	}
	return nil
}

func probe(s *nf.Socket, mark uint32, families ...intent.Family) error {
	b := nf.NewBatch()
	for _, f := range families {
		l := layoutOf(f, fmt.Sprintf("%s-probe-%d", tableName, unix.Getpid()))
		facts := &plan.Facts{NodePorts: plan.NodePorts{All: true}}
		t := newTable(newRuler(l, facts, mark))
		t.base(b, facts, nil)
		everything := shape{sticky: 1000, ranged: true}
		everything.routes[plan.FromNode] = leg{of: 1, masquerade: true}
		everything.routes[plan.FromOutside] = leg{verdict: plan.Reject}
		everything.routes[plan.FromPod] = leg{verdict: plan.Drop}
		t.addShape(b, everything, 1)
		b.DeleteTableLast(l.at)
	}
	return s.Commit(b)
}

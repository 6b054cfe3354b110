// Package iptables is the proxy mode that encodes a plan.Snapshot as iptables rules, with either of the kernel's mechanisms
// behind them: nf_tables over netlink, the older one through the commands that are on the machine. It decides nothing about
// traffic and knows no other mode.
package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
)

// prefix begins the names of all chains of this mode. Nothing else in the tables is touched, but for the jumps to them.
const prefix = "PORTAL-"

// canaryChain, which is empty and which nothing leads to, is missing in a table that somebody has flushed.
const canaryChain = "PORTAL-CANARY"

// Options are what an administrator may decide.
type Options struct {
	// Variant forces one; empty: the one that has rules already.
	Variant Variant
	// Mark is the bit of packets' marks that says that their source is to be rewritten; zero: kube-proxy's, bit 14.
	Mark uint32
	// Commands writes through the commands also where netlink would do.
	Commands bool
	// Log gets what happens; nil: the default logger.
	Log *slog.Logger
}

// New returns the mode.
func New(o Options) backend.Mode {
	if o.Mark == 0 {
		o.Mark = 1 << 14
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return &mode{Options: o}
}

type mode struct {
	Options
	picked Variant
	spare  nf.Spare
}

func (*mode) Name() string { return "iptables" }

// Traits are what the mode can do and does by default.
func (*mode) Traits() backend.Traits {
	return backend.Traits{
		Traits:    plan.Traits{Loopback4: true, LoopbackByDefault: true},
		Automatic: true, FailureMetric: "sync_proxy_rules_iptables_restore_failures_total", PartialFailureMetric: "sync_proxy_rules_iptables_partial_restore_failures_total",
	}
}

// jumpRule is a rule that sends all packets of a built-in chain to one of ours.
type jumpRule struct{ from, to string }

func (j jumpRule) String() string { return j.from + " -j " + j.to }

// jumps lead from the built-in chains to ours.
var jumps = map[string][]jumpRule{
	"nat":    {{"PREROUTING", "PORTAL-SERVICES"}, {"OUTPUT", "PORTAL-SERVICES"}, {"POSTROUTING", "PORTAL-POSTROUTING"}},
	"filter": {{"INPUT", "PORTAL-INPUT"}, {"FORWARD", "PORTAL-FORWARD"}, {"OUTPUT", "PORTAL-OUTPUT"}},
}

var tables = []string{"nat", "filter"}

// needs are the parts of the kernel without which the mode can't be, with a rule that uses each.
var needs = []need{
	{"the nat table", "nat", rule{to: returns}},
	{"the filter table", "filter", rule{to: returns}},
	{"the conntrack match (xt_conntrack)", "filter", rule{state: stateMatch{states: stateNew}, to: returns}},
	{"the mark match and target (xt_mark)", "nat", mark(0x4000).is().with(mark(0x4000).clear())},
	{"the statistic match (xt_statistic)", "nat", rule{oneIn: 2, to: returns}},
	{"the addrtype match (xt_addrtype)", "nat", rule{local: localSource, to: returns}},
	{"the recent match (xt_recent)", "nat", rule{recent: recentMatch{list: "PORTAL-PROBE"}, to: returns}},
	{"the bpf match (xt_bpf)", "nat", rule{hairpin: intent.IPv4, to: returns}},
	{"the DNAT target (xt_nat)", "nat", rule{proto: intent.TCP, to: target{kind: dnat}}},
	{"the MASQUERADE target (xt_MASQUERADE)", "nat", rule{to: masquerades}},
	{"the REJECT target (ipt_REJECT, ip6t_REJECT)", "filter", rule{proto: intent.TCP, to: target{kind: reject, reset: true}}},
}

type need struct {
	what, table string
	rule        rule
}

// of is the rule for a family.
func (n need) of(f intent.Family) rule {
	r := n.rule
	if r.hairpin != 0 {
		r.hairpin = f
	}
	if r.to.kind == dnat {
		r.to.addr = netip.AddrPortFrom(loopback4.Addr().Next(), 1)
		if f == intent.IPv6 {
			r.to.addr = netip.AddrPortFrom(loopback6, 1)
		}
	}
	return r
}

// Probe tries, in a scratch chain, what the mode will ask of the kernel.
func (m *mode) Probe(ctx context.Context, families []intent.Family) error {
	if os.Geteuid() != 0 {
		return errors.New("the iptables mode changes the kernel's tables: run it as root")
	}
	v, err := m.variant(ctx, families)
	if err != nil {
		return err
	}
	for _, f := range families {
		if err := (tool{f, v}).present(); err != nil {
			return err
		}
	}
	if v == NFT && !m.Commands {
		if m.probe(families) == nil {
			return nil
		}
		m.Commands = true // unless they fail, too
	}
	for _, f := range families {
		if err := (tool{f, v}).probe(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (t tool) probe(ctx context.Context) error {
	all := chains{}
	for _, n := range needs {
		all[n.table] = append(all[n.table], n.of(t.family))
	}
	if t.test(ctx, "nat", all["nat"]...) == nil && t.test(ctx, "filter", all["filter"]...) == nil {
		return nil
	}
	for _, n := range needs {
		if err := t.test(ctx, n.table, n.of(t.family)); err != nil {
			return fmt.Errorf("the kernel does not offer %s to %s: load the module, or choose another --proxy-mode (%w)", n.what, t.name(""), err)
		}
	}
	return nil
}

func (m *mode) variant(ctx context.Context, families []intent.Family) (Variant, error) {
	if m.Variant != "" {
		return m.Variant, nil
	}
	if m.picked == "" {
		var err error
		if m.picked, err = pick(ctx, families); err != nil {
			return "", err
		}
	}
	return m.picked, nil
}

// Open chooses the variant.
func (m *mode) Open(ctx context.Context) (backend.Backend, error) {
	v, err := m.variant(ctx, []intent.Family{intent.IPv4, intent.IPv6})
	if err != nil {
		return nil, err
	}
	b := &tablesBackend{
		mark: mark(m.Mark), log: m.Log, now: time.Now, rulesets: map[intent.Family]*ruleset{}, tools: map[intent.Family]tool{},
	}
	if v == NFT && !m.Commands {
		// Without it, commands do.
		s, err := m.spare.Take()
		if err != nil {
			return nil, err
		}
		b.direct = &direct{s}
	}
	for _, f := range []intent.Family{intent.IPv4, intent.IPv6} {
		if t := (tool{f, v}); t.present() == nil {
			b.tools[f] = t
		}
	}
	return b, nil
}

// Cleanup removes our chains and the jumps to them, in every variant, and takes back the sysctl that we set.
func (m *mode) Cleanup(ctx context.Context) error {
	var errs []error
	for _, f := range []intent.Family{intent.IPv4, intent.IPv6} {
		for _, v := range installed(f) {
			errs = append(errs, tool{f, v}.clear(ctx))
		}
	}
	return errors.Join(errs...)
}

func (t tool) cleanup(ctx context.Context) error {
	for _, table := range tables {
		have, err := t.list(ctx, table)
		if err != nil {
			return err
		}
		s := newSection()
		for _, name := range have.chains {
			s.remove(name)
		}
		for line := range have.jumps {
			s.leave = append(s.leave, "-D"+strings.TrimPrefix(line, "-A"))
		}
		if s.empty() {
			continue
		}
		if err := t.restore(ctx, func(b *bufio.Writer) { s.print(b, table) }); err != nil {
			return err
		}
		if slices.Contains(have.chains, localnetChain) {
			if err := setLocalnet("0"); err != nil {
				return err
			}
		}
	}
	return nil
}

// Limits follow kube-proxy's iptables mode.
func (m *mode) Limits() []string {
	limits := []string{
		"packets to other ports of a cluster IP are not rejected: they go where the node's routes send them",
		"what this node itself sends to an external or load-balancer IP without endpoints is not rejected, unless the address is the node's own",
		"what has no endpoints is rejected also to those whom source ranges exclude",
		"node ports are not served on ::1",
	}
	if n, err := os.ReadFile("/sys/module/xt_recent/parameters/ip_list_tot"); err == nil {
		limits = append(limits, fmt.Sprintf("session affinity remembers the last %s clients of each endpoint (the kernel's xt_recent.ip_list_tot)", strings.TrimSpace(string(n))))
	}
	return limits
}

// liberal says whether the kernel counts TCP packets outside the window as valid.
func liberal() bool {
	v, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	return err == nil && strings.TrimSpace(string(v)) != "0"
}

// localnetChain, which is empty and which nothing leads to, remembers that route_localnet was off before we came.
const localnetChain = "PORTAL-LOCALNET"

const localnet = "/proc/sys/net/ipv4/conf/all/route_localnet"

// openLocalnet lets packets to 127.0.0.1 leave the loopback device, which node ports there need.
func openLocalnet() (changed bool, err error) {
	now, err := os.ReadFile(localnet)
	if err != nil {
		return false, err
	}
	if strings.TrimSpace(string(now)) == "1" {
		return false, nil
	}
	return true, setLocalnet("1")
}

func setLocalnet(v string) error {
	if err := os.WriteFile(localnet, []byte(v), 0o644); err != nil {
		return fmt.Errorf("node ports on 127.0.0.1 need net.ipv4.conf.all.route_localnet: %w", err)
	}
	return nil
}

package userspace

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	tableName = "portal-userspace"
	// ownMark is on what this process sends, so that it is not led back to it.
	ownMark = 0x20000
)

var (
	families = []intent.Family{intent.IPv4, intent.IPv6}
	origins  = [plan.Origins]string{"pod", "node", "outside"}
)

// listening are the ports of our sockets of one family, by origin: the kernel tells us an origin by the port it leads to.
type listening struct{ tcp, udp [plan.Origins]uint16 }

// table writes what the kernel is told about one family, as text for the nft command. Rules are the same whatever
// Services there are; Services are elements of sets.
type table struct {
	family intent.Family
	ip     string // the family's name in rules
	key    string // an expression: what a packet is addressed to
	source Source
}

func newTable(f intent.Family, s Source) *table {
	t := &table{family: f, ip: "ip", source: s}
	if f == intent.IPv6 {
		t.ip = "ip6"
	}
	t.key = t.ip + " daddr . meta l4proto . th dport"
	return t
}

func (t *table) addrType() string {
	if t.family == intent.IPv6 {
		return "ipv6_addr"
	}
	return "ipv4_addr"
}

func (t *table) remove() string {
	// Naming the table first makes it be there, and its removal no error.
	return fmt.Sprintf("table %[1]s %[2]s\ndelete table %[1]s %[2]s\n", t.ip, tableName)
}

// empty leaves chains without rules and sets without elements of a table that was made for these facts. A packet that is
// inside the rules when they are replaced goes on with the old ones, but each look-up asks anew which elements count: it
// finds them in a set that stays, and none in one that was removed.
func (t *table) empty(facts *plan.Facts) string {
	var b strings.Builder
	fmt.Fprintf(&b, "flush table %s %s\n", t.ip, tableName)
	for _, s := range t.sets(facts) {
		fmt.Fprintf(&b, "flush %s %s %s %s\n", s.kind, t.ip, tableName, s.name)
	}
	return b.String()
}

// base makes the rules and sets without Services' elements. Without sockets, the chains that lead to them are empty.
func (t *table) base(facts *plan.Facts, at *listening) string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	say("table %s %s {", t.ip, tableName)
	for _, s := range t.sets(facts) {
		say("%s %s { %s }", s.kind, s.name, s.spec)
	}
	pods, ports := t.pods(&facts.Pods), t.ports(&facts.NodePorts)

	say("chain reject-it { meta l4proto tcp reject with tcp reset; reject; }")
	for _, o := range origins {
		say("chain refuse-%s {", o)
		say("%s vmap @%s-refused", t.key, o)
		say("%s @vips return", t.key)
		say("%s meta l4proto . th dport vmap @%s-refused-ports", ports, o)
		say("meta l4proto { tcp, udp, sctp } %s daddr @cluster-ips goto reject-it", t.ip)
		say("}")
	}
	say("chain refuse {")
	say("%s @guarded %s . %s saddr != @allowed drop", t.key, t.key, t.ip)
	for _, p := range pods {
		say("%s goto refuse-pod", p)
	}
	say("fib saddr type local goto refuse-node")
	say("goto refuse-outside")
	say("}")
	// Before the destination is changed, which happens at -100.
	say("chain refuse-in { type filter hook prerouting priority -110; ct state new jump refuse; }")
	say("chain refuse-out { type filter hook output priority -110; meta mark & %#x == 0 ct state new jump refuse; }", ownMark)

	t.redirect(say, pods, ports, "in", t.home(facts), at)
	t.redirect(say, pods, ports, "out", "redirect to ", at)
	say("chain take-in { type nat hook prerouting priority -100; jump in-vips; }")
	say("chain take-out { type nat hook output priority -100; meta mark & %#x == 0 jump out-vips; }", ownMark)
	if at != nil {
		// Our sockets are for those whom the rules above lead there.
		say("chain input { type filter hook input priority -10; meta l4proto . th dport { %s } ct status & dnat != dnat goto reject-it; }", sockets(at))
	}
	if t.source == Preserve {
		// Answers to a client's address that one of our sockets has are ours; a rule for this mark routes them here.
		say("chain come-back { type filter hook prerouting priority -150; socket transparent 1 meta mark set meta mark | %#x; }", returnMark)
	}
	say("}")
	return b.String()
}

type set struct{ kind, name, spec string }

func (t *table) sets(facts *plan.Facts) []set {
	vip, port := t.addrType()+" . inet_proto . inet_service", "inet_proto . inet_service"
	list := []set{
		{"set", "vips", "type " + vip + ";"},
		{"set", "node-ports", "type " + port + ";"},
		{"set", "cluster-ips", "type " + t.addrType() + ";"},
		{"set", "guarded", "type " + vip + ";"},
		{"set", "allowed", "type " + vip + " . " + t.addrType() + "; flags interval;"},
	}
	for _, o := range origins {
		list = append(list, set{"map", o + "-refused", "type " + vip + " : verdict;"}, set{"map", o + "-refused-ports", "type " + port + " : verdict;"})
	}
	if !facts.NodePorts.All {
		list = append(list, set{"set", "node-addrs", "type " + t.addrType() + "; flags interval; " + t.nodeAddrs(&facts.NodePorts)})
	}
	return list
}

func (t *table) nodeAddrs(n *plan.NodePorts) string {
	var list []string
	for _, a := range n.Addrs {
		if intent.FamilyOf(a) == t.family && !a.IsLoopback() {
			list = append(list, a.String())
		}
	}
	if n.Loopback(t.family) {
		list = append(list, t.loopback())
	}
	if len(list) == 0 {
		return ""
	}
	return "elements = { " + strings.Join(list, ", ") + " }"
}

func (t *table) loopback() string {
	if t.family == intent.IPv6 {
		return "::1"
	}
	return "127.0.0.0/8"
}

// pods are the matches for packets from Pods.
func (t *table) pods(d *plan.Detector) []string {
	var out []string
	for _, p := range d.Prefixes {
		if intent.FamilyOf(p.Addr()) == t.family {
			out = append(out, t.ip+" saddr "+p.String())
		}
	}
	if d.Interface != "" {
		out = append(out, fmt.Sprintf("iifname %q", d.Interface))
	}
	if d.InterfacePrefix != "" {
		out = append(out, fmt.Sprintf("iifname %q", d.InterfacePrefix+"*"))
	}
	return out
}

// ports matches packets to addresses on which node ports are served.
func (t *table) ports(n *plan.NodePorts) string {
	switch {
	case !n.All:
		return t.ip + " daddr @node-addrs"
	case n.Loopback(t.family):
		return "fib daddr type local"
	}
	return "fib daddr type local " + t.ip + " daddr != " + t.loopback()
}

// redirect are the chains that lead a packet to the socket of its protocol and origin.
func (t *table) redirect(say func(string, ...any), pods []string, ports, way, to string, at *listening) {
	for o, name := range origins {
		if at == nil {
			say("chain %s-%s { }", way, name)
			continue
		}
		say("chain %s-%s { meta l4proto tcp %s:%d; meta l4proto udp %s:%d; }", way, name, to, at.tcp[o], to, at.udp[o])
	}
	say("chain %s-origin {", way)
	for _, p := range pods {
		say("%s goto %s-pod", p, way)
	}
	say("fib saddr type local goto %s-node", way)
	say("goto %s-outside", way)
	say("}")
	say("chain %s-vips { %s @vips goto %s-origin; %s meta l4proto . th dport @node-ports goto %s-origin; }", way, t.key, way, ports, way)
}

// home is how packets from elsewhere are led to this node: to its own address, for the interface that they come in by
// may have none, without which "redirect" fails.
func (t *table) home(facts *plan.Facts) string {
	local := localAddrs()
	for _, a := range facts.Addrs {
		switch {
		case intent.FamilyOf(a) != t.family || !slices.Contains(local, a):
		case t.family == intent.IPv6:
			return "dnat to [" + a.String() + "]"
		default:
			return "dnat to " + a.String()
		}
	}
	return "redirect to "
}

// localAddrs are those of the node's interfaces.
func localAddrs() []netip.Addr {
	var out []netip.Addr
	list, _ := net.InterfaceAddrs()
	for _, l := range list {
		if p, err := netip.ParsePrefix(l.String()); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out
}

func sockets(at *listening) string {
	var list []string
	for o := range origins {
		list = append(list, fmt.Sprintf("tcp . %d", at.tcp[o]), fmt.Sprintf("udp . %d", at.udp[o]))
	}
	return strings.Join(list, ", ")
}

// element is a member of a set: its text, and for a map what it leads to.
type element struct{ set, text, verdict string }

// elements are what a frontend adds to the sets.
func (t *table) elements(f *plan.Frontend) []element {
	key, suffix := vipKey(f)
	members := "vips"
	if f.Kind == plan.NodePort {
		members = "node-ports"
	}
	var out []element
	forwards := false
	for o, r := range f.Routes {
		switch {
		case r.Verdict == plan.Drop:
			out = append(out, element{origins[o] + "-refused" + suffix, key, "drop"})
		case r.Verdict == plan.Reject || f.Protocol == intent.SCTP:
			out = append(out, element{origins[o] + "-refused" + suffix, key, "goto reject-it"})
		default:
			forwards = true
		}
	}
	if forwards {
		out = append(out, element{set: members, text: key})
	}
	if f.Sources != nil {
		out = append(out, element{set: "guarded", text: key})
		for _, p := range outermost(f.Sources) {
			if intent.FamilyOf(p.Addr()) == t.family {
				out = append(out, element{set: "allowed", text: key + " . " + p.String()})
			}
		}
	}
	return out
}

// vipKey is a frontend in a set, and the end of the names of the sets that it is in.
func vipKey(f *plan.Frontend) (key, suffix string) {
	key = fmt.Sprintf("%s . %d", strings.ToLower(f.Protocol.String()), f.Port)
	if f.Kind == plan.NodePort {
		return key, "-ports"
	}
	return f.Addr.String() + " . " + key, ""
}

// outermost leaves out prefixes that others contain: the kernel takes no overlapping ones.
func outermost(list []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for i, p := range list {
		inside := false
		for j, q := range list {
			inside = inside || i != j && q.Overlaps(p) && (q.Bits() < p.Bits() || q.Bits() == p.Bits() && j < i)
		}
		if !inside {
			out = append(out, p.Masked())
		}
	}
	return out
}

// change is a text that removes and adds elements, in this order.
func (t *table) change(gone, come map[element]bool) string {
	var b strings.Builder
	write := func(verb string, list map[element]bool, withVerdict bool) {
		sets := map[string][]string{}
		for e := range list {
			text := e.text
			if withVerdict && e.verdict != "" {
				text += " : " + e.verdict
			}
			sets[e.set] = append(sets[e.set], text)
		}
		for set, list := range sets {
			fmt.Fprintf(&b, "%s element %s %s %s { %s }\n", verb, t.ip, tableName, set, strings.Join(list, ", "))
		}
	}
	write("delete", gone, false)
	write("add", come, true)
	return b.String()
}

// nft makes the changes of a text, all or none.
func nft(ctx context.Context, text string, args ...string) error {
	if text == "" {
		return nil
	}
	cmd := exec.CommandContext(ctx, "nft", append(args, "-f", "-")...)
	var complaint bytes.Buffer
	cmd.Stdin, cmd.Stderr = strings.NewReader(text), &complaint
	if err := cmd.Run(); err != nil {
		first, _, _ := strings.Cut(complaint.String(), "\n")
		return fmt.Errorf("nft: %w: %s", err, first)
	}
	return nil
}

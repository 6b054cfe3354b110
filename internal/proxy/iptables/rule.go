package iptables

import (
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"portal/internal/intent"
)

// rule is an iptables rule: what is asked of a packet, and what happens to it. It has two printers, one for the commands and
// one for netlink, which lead to the same rule in the kernel. Rules can be compared.
type rule struct {
	// in is an interface; one that ends with + stands for all that begin so.
	in       string
	src, dst address
	proto    intent.Protocol // 0: any
	ports    portRange
	// The matches, in the order in which they are asked.
	local         localMatch
	mark          markMatch
	state, state2 stateMatch
	hairpin       intent.Family // the source is the destination; 0: it needn't be
	oneIn         int           // matches one packet of so many, at random; 0: all
	recent        recentMatch
	to            target
}

// address is an address with the bits of it that count; none: any address.
type address struct {
	addr, mask netip.Addr
	not        bool
}

func host(a netip.Addr) address { return address{addr: a, mask: maskOf(a, a.BitLen())} }

func within(p netip.Prefix) address {
	return address{addr: p.Masked().Addr(), mask: maskOf(p.Addr(), p.Bits())}
}

func outside(p netip.Prefix) address {
	a := within(p)
	a.not = true
	return a
}

// maskOf is a mask of some bits for addresses of a's family.
func maskOf(a netip.Addr, bits int) netip.Addr {
	b := make([]byte, a.BitLen()/8)
	for i := range bits {
		b[i/8] |= 0x80 >> (i % 8)
	}
	mask, _ := netip.AddrFromSlice(b)
	return mask
}

// bits is the length of a mask that covers the first bits and nothing else; otherwise -1.
func (a address) bits() int {
	n, ended := 0, false
	for _, b := range a.mask.AsSlice() {
		for i := 7; i >= 0; i-- {
			switch set := b>>i&1 == 1; {
			case set && ended:
				return -1
			case set:
				n++
			default:
				ended = true
			}
		}
	}
	return n
}

// portRange is a range of destination ports; the zero value: any.
type portRange struct{ first, last uint16 }

func onePort(p uint16) portRange { return portRange{p, p} }

// localMatch asks whether an address is this node's.
type localMatch uint8

const (
	localSource localMatch = iota + 1
	localDestination
)

// markMatch compares the bits of the packet's mark that are in mask.
type markMatch struct {
	value, mask uint32
	not         bool
}

// stateMatch asks for states of the connection.
type stateMatch struct {
	states uint16
	not    bool
}

// States, as bits of struct xt_conntrack_mtinfo3.
const (
	stateInvalid     = 1
	stateEstablished = 2
	stateRelated     = 4
	stateNew         = 8
	stateDNAT        = 128
)

var stateNames = []struct {
	bit  uint16
	name string
}{{stateInvalid, "INVALID"}, {stateNew, "NEW"}, {stateRelated, "RELATED"}, {stateEstablished, "ESTABLISHED"}, {stateDNAT, "DNAT"}}

// recentMatch remembers clients in a list, or matches those that were remembered within some seconds.
type recentMatch struct {
	list    string
	seconds uint32 // 0: remembers
}

// target is where a rule leads.
type target struct {
	kind  targetKind
	chain string // of jumpTo and goTo
	mark  markMatch
	addr  netip.AddrPort // of dnat
	reset bool           // of reject
}

type targetKind uint8

const (
	jumpTo targetKind = iota + 1
	goTo
	accept
	drop
	back // RETURN
	setMark
	dnat
	masquerade
	reject
)

func jump(chain string) target           { return target{kind: jumpTo, chain: chain} }
func goes(chain string) target           { return target{kind: goTo, chain: chain} }
func toEndpoint(a netip.AddrPort) target { return target{kind: dnat, addr: a} }

var (
	accepts     = target{kind: accept}
	drops       = target{kind: drop}
	returns     = target{kind: back}
	masquerades = target{kind: masquerade}
)

// with returns the rule with another target.
func (r rule) with(t target) rule {
	r.to = t
	return r
}

// chance is the probability of a packet of oneIn, as it is printed.
func (r *rule) chance() float64 { return math.Round(1e10/float64(r.oneIn)) / 1e10 }

// appendText prints the rule for the commands, without the chain.
func (r *rule) appendText(b []byte) []byte {
	say := func(words ...string) {
		for _, w := range words {
			b = append(append(b, w...), ' ')
		}
	}
	not := func(is bool) {
		if is {
			say("!")
		}
	}
	if r.in != "" {
		say("-i", r.in)
	}
	for _, x := range []struct {
		option string
		address
	}{{"-s", r.src}, {"-d", r.dst}} {
		if x.addr.IsValid() {
			not(x.not)
			say(x.option)
			b = append(x.addr.AppendTo(b), '/')
			if n := x.bits(); n >= 0 {
				b = strconv.AppendInt(b, int64(n), 10)
			} else {
				b = x.mask.AppendTo(b)
			}
			b = append(b, ' ')
		}
	}
	if r.proto != 0 {
		say("-p", protocols[r.proto])
	}
	switch {
	case r.ports == portRange{}:
	case r.ports.first == r.ports.last:
		say("--dport", strconv.Itoa(int(r.ports.first)))
	default:
		say("--dport", fmt.Sprintf("%d:%d", r.ports.first, r.ports.last))
	}
	switch r.local {
	case localSource:
		say("-m addrtype --src-type LOCAL")
	case localDestination:
		say("-m addrtype --dst-type LOCAL")
	}
	if r.mark.mask != 0 {
		say("-m mark")
		not(r.mark.not)
		say(fmt.Sprintf("--mark %#x/%#x", r.mark.value, r.mark.mask))
	}
	for _, s := range []stateMatch{r.state, r.state2} {
		if s.states != 0 {
			say("-m conntrack")
			not(s.not)
			say("--ctstate", s.names())
		}
	}
	if r.hairpin != 0 {
		say(`-m bpf --bytecode "` + hairpinProgram(r.hairpin).text() + `"`)
	}
	if r.oneIn > 0 {
		say("-m statistic --mode random --probability", strconv.FormatFloat(r.chance(), 'f', 10, 64))
	}
	if r.recent.list != "" {
		say("-m recent --name", r.recent.list)
		if r.recent.seconds == 0 {
			say("--set")
		} else {
			say("--update --seconds", strconv.FormatUint(uint64(r.recent.seconds), 10), "--reap")
		}
	}
	return append(b, r.to.text()...)
}

func (r *rule) String() string { return string(r.appendText(nil)) }

func (s stateMatch) names() string {
	var list []string
	for _, n := range stateNames {
		if s.states&n.bit != 0 {
			list = append(list, n.name)
		}
	}
	return strings.Join(list, ",")
}

func (t *target) text() string {
	switch t.kind {
	case jumpTo:
		return "-j " + t.chain
	case goTo:
		return "-g " + t.chain
	case accept:
		return "-j ACCEPT"
	case drop:
		return "-j DROP"
	case back:
		return "-j RETURN"
	case setMark:
		return fmt.Sprintf("-j MARK --set-xmark %#x/%#x", t.mark.value, t.mark.mask)
	case dnat:
		return "-j DNAT --to-destination " + t.addr.String()
	case masquerade:
		return "-j MASQUERADE --random-fully"
	case reject:
		if t.reset {
			return "-j REJECT --reject-with tcp-reset"
		}
		return "-j REJECT"
	}
	return ""
}

package nf

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// IP writes what is often matched in packets of one family.
type IP struct {
	Family byte // NFPROTO_*
	// Width is how many bytes an address has.
	Width int
}

// The two families.
var (
	IPv4 = IP{unix.NFPROTO_IPV4, 4}
	IPv6 = IP{unix.NFPROTO_IPV6, 16}
)

// Is6 says whether it is IPv6.
func (f IP) Is6() bool { return f.Width == 16 }

// Words is how many registers an address takes.
func (f IP) Words() uint32 { return uint32(f.Width / 4) }

// AddrField is the type of an address.
func (f IP) AddrField() Field {
	if f.Is6() {
		return IPv6Field
	}
	return IPv4Field
}

// Loopback are the addresses of the loopback device.
func (f IP) Loopback() netip.Prefix {
	if f.Is6() {
		return netip.MustParsePrefix("::1/128")
	}
	return netip.MustParsePrefix("127.0.0.0/8")
}

// AppendAddr appends an address of the family; zeros for none.
func (f IP) AppendAddr(b []byte, a netip.Addr) []byte {
	if f.Is6() {
		v := [16]byte{}
		if a.IsValid() {
			v = a.As16()
		}
		return append(b, v[:]...)
	}
	v := [4]byte{}
	if a.IsValid() {
		v = a.Unmap().As4()
	}
	return append(b, v[:]...)
}

// AppendPort appends a port as it fills a register.
func AppendPort(b []byte, port uint16) []byte {
	return append(binary.BigEndian.AppendUint16(b, port), 0, 0)
}

// AppendProto appends a protocol as it fills a register.
func AppendProto(b []byte, proto byte) []byte { return append(b, proto, 0, 0, 0) }

// Source loads the source address.
func (f IP) Source(reg uint32) Payload { return f.address(reg, 12, 8) }

// Destination loads the destination address.
func (f IP) Destination(reg uint32) Payload { return f.address(reg, 16, 24) }

func (f IP) address(reg, in4, in6 uint32) Payload {
	if f.Is6() {
		return Payload{reg, unix.NFT_PAYLOAD_NETWORK_HEADER, in6, 16}
	}
	return Payload{reg, unix.NFT_PAYLOAD_NETWORK_HEADER, in4, 4}
}

// Proto loads the transport protocol.
func Proto(reg uint32) Meta { return Meta{Key: unix.NFT_META_L4PROTO, Dst: reg} }

// IsProto matches a transport protocol.
func IsProto(proto byte) Rule { return Rule{Proto(Reg0), Cmp{Reg: Reg0, Data: []byte{proto}}} }

// DestinationPort loads the destination port.
func DestinationPort(reg uint32) Payload {
	return Payload{reg, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2}
}

// SourcePort loads the source port.
func SourcePort(reg uint32) Payload {
	return Payload{reg, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2}
}

// Within matches, or with not does not match, if an address in Reg0 is in a prefix.
func (f IP) Within(p netip.Prefix, not bool) Rule {
	mask := make([]byte, f.Width)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return Rule{Bitwise{Src: Reg0, Dst: Reg0, Mask: mask}, Cmp{Reg: Reg0, Not: not, Data: f.AppendAddr(nil, p.Masked().Addr())}}
}

// From are the matches for packets whose source is in one of some prefixes, or that came in by an interface, or by one
// whose name begins so.
func (f IP) From(prefixes []netip.Prefix, iface, ifacePrefix string) (out []Rule) {
	for _, p := range prefixes {
		if p.Addr().Is6() == f.Is6() {
			out = append(out, append(Rule{f.Source(Reg0)}, f.Within(p, false)...))
		}
	}
	cameBy := func(name []byte) Rule {
		return Rule{Meta{Key: unix.NFT_META_IIFNAME, Dst: Reg0}, Cmp{Reg: Reg0, Data: name}}
	}
	if iface != "" {
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, iface)
		out = append(out, cameBy(name))
	}
	if ifacePrefix != "" {
		out = append(out, cameBy([]byte(ifacePrefix)))
	}
	return out
}

// IsLocal matches if the source or the destination is an address of this node; with not, if it isn't.
func IsLocal(source, not bool) Rule {
	return Rule{AddressType{Source: source, Dst: Reg0}, Cmp{Reg: Reg0, Not: not, Data: Number(unix.RTN_LOCAL)}}
}

// NotLoopback matches if the destination is an address of this node other than those of the loopback device.
func (f IP) NotLoopback() Rule {
	out := append(Rule{f.Destination(Reg0)}, f.Within(f.Loopback(), true)...)
	return append(out, IsLocal(false, false)...)
}

// Reject are the rules that answer that nobody is there. A reset reaches a process on this node even while connect holds
// its socket, when an ICMP message would be lost.
func (f IP) Reject() []Rule {
	portUnreachable := uint8(3)
	if f.Is6() {
		portUnreachable = 4
	}
	return []Rule{append(IsProto(unix.IPPROTO_TCP), Reject{Reset: true}), {Reject{Code: portUnreachable}}}
}

// HasBit matches if a bit is set of the mark that load loads into Reg0; with not, if it isn't.
func HasBit(load Expr, bit uint32, not bool) Rule {
	return Rule{load, Bitwise{Src: Reg0, Dst: Reg0, Mask: Number(bit)}, Cmp{Reg: Reg0, Not: !not, Data: Number(0)}}
}

// Mark loads the packet's mark, SetMark sets it.
func Mark(reg uint32) Meta    { return Meta{Key: unix.NFT_META_MARK, Dst: reg} }
func SetMark(reg uint32) Meta { return Meta{Key: unix.NFT_META_MARK, Src: reg} }

// MarkBit sets bits of the packet's mark and leaves the others, which belong to others.
func MarkBit(bits uint32) Rule {
	return Rule{Mark(Reg0), Bitwise{Src: Reg0, Dst: Reg0, Mask: Number(^bits), Xor: Number(bits)}, SetMark(Reg0)}
}

// CtMarkBit does the same with the connection's mark.
func CtMarkBit(bits uint32) Rule {
	return Rule{
		Ct{Key: unix.NFT_CT_MARK, Dst: Reg0}, Bitwise{Src: Reg0, Dst: Reg0, Mask: Number(^bits), Xor: Number(bits)}, Ct{Key: unix.NFT_CT_MARK, Src: Reg0},
	}
}

// Concat puts parts of a rule together.
func Concat(parts ...Rule) (out Rule) {
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// Last is the last address of a prefix.
func Last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Disjoint leaves out prefixes that others contain: intervals of a set may not overlap.
func Disjoint(list []netip.Prefix) (out []netip.Prefix) {
next:
	for i, p := range list {
		p = p.Masked()
		for j, q := range list {
			q = q.Masked()
			if j != i && q.Bits() <= p.Bits() && q.Contains(p.Addr()) && (q != p || j < i) {
				continue next
			}
		}
		out = append(out, p)
	}
	return out
}

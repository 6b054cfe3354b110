package iptables

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// What the nft variant of the commands makes of a rule: expressions of nf_tables', and the kernel's structures of extensions.

// register is the one that the commands use.
const register = unix.NFT_REG_1

// appendExprs prints the rule as expressions.
func (r *rule) appendExprs(b []byte, f intent.Family) []byte {
	if r.in != "" {
		name, prefix := strings.CutSuffix(r.in, "+")
		data := []byte(name)
		if !prefix {
			data = append(data, 0)
		}
		b = nf.Meta{Key: unix.NFT_META_IIFNAME, Dst: register}.Append(b)
		b = nf.Cmp{Reg: register, Data: data}.Append(b)
	}
	if r.proto != 0 {
		b = nf.Meta{Key: unix.NFT_META_L4PROTO, Dst: register}.Append(b)
		b = nf.Cmp{Reg: register, Data: []byte{byte(r.proto)}}.Append(b)
	}
	source, destination := uint32(12), uint32(16)
	if f == intent.IPv6 {
		source, destination = 8, 24
	}
	b = r.dst.appendExprs(r.src.appendExprs(b, source), destination)
	b = r.ports.appendExprs(b, r.proto)
	b = r.appendMatches(b)
	return r.to.appendExprs(nf.Counter{}.Append(b), f)
}

func (a address) appendExprs(b []byte, offset uint32) []byte {
	n := -1
	if a.addr.IsValid() {
		n = a.bits()
	}
	value := a.addr.AsSlice()
	switch {
	case !a.addr.IsValid() || n == 0:
		return b
	case n > 0 && n%8 == 0:
		value = value[:n/8]
		b = nf.Payload{Dst: register, Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: offset, Len: uint32(len(value))}.Append(b)
	default:
		b = nf.Payload{Dst: register, Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: offset, Len: uint32(len(value))}.Append(b)
		b = nf.Bitwise{Src: register, Dst: register, Mask: a.mask.AsSlice()}.Append(b)
	}
	return nf.Cmp{Reg: register, Not: a.not, Data: value}.Append(b)
}

func (p portRange) appendExprs(b []byte, proto intent.Protocol) []byte {
	if p == (portRange{}) {
		return b
	}
	if proto == intent.SCTP {
		return extension(b, false, "sctp", 0, sctpInfo(p))
	}
	b = nf.Payload{Dst: register, Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Offset: 2, Len: 2}.Append(b)
	first, last := binary.BigEndian.AppendUint16(nil, p.first), binary.BigEndian.AppendUint16(nil, p.last)
	if p.first == p.last {
		return nf.Cmp{Reg: register, Data: first}.Append(b)
	}
	return nf.Range{Reg: register, From: first, To: last}.Append(b)
}

func extension(b []byte, target bool, name string, revision uint32, info []byte) []byte {
	return nf.Extension{Target: target, Name: name, Revision: revision, Info: info}.Append(b)
}

// sctpInfo is struct xt_sctp_info: ranges of destination and source ports, kinds of chunks, and which of them count.
func sctpInfo(p portRange) []byte {
	const destination = 2
	b := make([]byte, 292)
	binary.NativeEndian.PutUint16(b, p.first)
	binary.NativeEndian.PutUint16(b[2:], p.last)
	for i := range 4 {
		b[268+3*i] = math.MaxUint8 // no kind
	}
	binary.NativeEndian.PutUint32(b[284:], destination)
	return b
}

func (r *rule) appendMatches(b []byte) []byte {
	if r.local != 0 {
		info := make([]byte, 8) // struct xt_addrtype_info_v1
		binary.NativeEndian.PutUint16(info[2*(r.local-localSource):], 1<<unix.RTN_LOCAL)
		b = extension(b, false, "addrtype", 1, info)
	}
	if m := r.mark; m.mask != 0 {
		b = nf.Meta{Key: unix.NFT_META_MARK, Dst: register}.Append(b)
		b = nf.Bitwise{Src: register, Dst: register, Mask: nf.Number(m.mask)}.Append(b)
		b = nf.Cmp{Reg: register, Not: m.not, Data: nf.Number(m.value)}.Append(b)
	}
	for _, s := range []stateMatch{r.state, r.state2} {
		if s.states != 0 {
			b = extension(b, false, "conntrack", 3, s.info())
		}
	}
	if r.hairpin != 0 {
		b = extension(b, false, "bpf", 1, hairpinProgram(r.hairpin).info())
	}
	if r.oneIn > 0 {
		info := make([]byte, 24)          // struct xt_statistic_info
		for _, at := range []int{4, 12} { // where it is, and where the commands leave it too
			binary.NativeEndian.PutUint32(info[at:], uint32(math.Round(r.chance()*(1<<31))))
		}
		b = extension(b, false, "statistic", 0, info)
	}
	if r.recent.list != "" {
		b = extension(b, false, "recent", 1, r.recent.info())
	}
	return b
}

// info is struct xt_conntrack_mtinfo3.
func (s stateMatch) info() []byte {
	const byState = 1
	info := make([]byte, 164)
	binary.NativeEndian.PutUint16(info[146:], byState)
	if s.not {
		binary.NativeEndian.PutUint16(info[148:], byState)
	}
	binary.NativeEndian.PutUint16(info[150:], s.states)
	return info
}

// info is struct xt_recent_mtinfo_v1.
func (m recentMatch) info() []byte {
	const set, update, reap = 2, 4, 32
	const nameAt, nameSize, maskAt = 10, 200, 212
	info := make([]byte, maskAt+16)
	binary.NativeEndian.PutUint32(info, m.seconds)
	info[8] = set
	if m.seconds != 0 {
		info[8] = update | reap
	}
	copy(info[nameAt:nameAt+nameSize-1], m.list)
	for i := range 16 {
		info[maskAt+i] = 0xff
	}
	return info
}

func (t *target) appendExprs(b []byte, f intent.Family) []byte {
	switch t.kind {
	case jumpTo:
		return nf.Jump(t.chain).Append(b)
	case goTo:
		return nf.Goto(t.chain).Append(b)
	case accept:
		return nf.Accept.Append(b)
	case drop:
		return nf.Drop.Append(b)
	case back:
		return nf.Return.Append(b)
	case setMark:
		return extension(b, true, "MARK", 2, nf.AppendNumber(nf.Number(t.mark.value), t.mark.mask))
	case dnat:
		return extension(b, true, "DNAT", 2, t.dnatInfo())
	case masquerade:
		return extension(b, true, "MASQUERADE", 0, masqueradeInfo(f))
	case reject:
		return extension(b, true, "REJECT", 0, nf.Number(rejectWith(f, t.reset)))
	}
	return b
}

// dnatInfo is struct nf_nat_range2: from one address and port to the same.
func (t *target) dnatInfo() []byte {
	const addresses, ports = 1, 2
	info := make([]byte, 48)
	binary.NativeEndian.PutUint32(info, addresses|ports)
	for _, at := range []int{4, 20} {
		copy(info[at:], t.addr.Addr().AsSlice())
	}
	for _, at := range []int{36, 38} {
		binary.BigEndian.PutUint16(info[at:], t.addr.Port())
	}
	return info
}

// masqueradeInfo is struct nf_nat_ipv4_multi_range_compat with one range, or struct nf_nat_range, of which only flags are used.
func masqueradeInfo(f intent.Family) []byte {
	const fullyRandom = 1 << 4
	if f == intent.IPv6 {
		info := make([]byte, 40)
		binary.NativeEndian.PutUint32(info, fullyRandom)
		return info
	}
	info := make([]byte, 24)
	binary.NativeEndian.PutUint32(info, 1)
	binary.NativeEndian.PutUint32(info[4:], fullyRandom)
	return info
}

// rejectWith is of enum ipt_reject_with or enum ip6t_reject_with.
func rejectWith(f intent.Family, reset bool) uint32 {
	switch {
	case f == intent.IPv6 && reset:
		return 6
	case f == intent.IPv6:
		return 4
	case reset:
		return 7
	}
	return 3
}

// program is one of the bpf match.
type program []instruction

type instruction struct {
	code    uint16
	yes, no uint8
	value   uint32
}

// hairpinProgram accepts packets whose source is their destination.
func hairpinProgram(f intent.Family) (out program) {
	source, words := 12, 1
	if f == intent.IPv6 {
		source, words = 8, 4
	}
	const load, toX, equalX, ret = 32, 7, 29, 6
	for i := range words {
		at := source + 4*i
		toEnd := 4*(words-i-1) + 1
		out = append(out, instruction{load, 0, 0, uint32(at)}, instruction{code: toX},
			instruction{load, 0, 0, uint32(at + 4*words)}, instruction{equalX, 0, uint8(toEnd), 0})
	}
	return append(out, instruction{ret, 0, 0, 65535}, instruction{code: ret})
}

func (p program) text() string {
	list := []string{fmt.Sprint(len(p))}
	for _, i := range p {
		list = append(list, fmt.Sprintf("%d %d %d %d", i.code, i.yes, i.no, i.value))
	}
	return strings.Join(list, ",")
}

// info is struct xt_bpf_info_v1.
func (p program) info() []byte {
	const instructions = 64
	info := make([]byte, 8, 8+instructions*8+8)
	binary.NativeEndian.PutUint16(info[2:], uint16(len(p)))
	for _, i := range p {
		info = binary.NativeEndian.AppendUint16(info, i.code)
		info = append(info, i.yes, i.no)
		info = binary.NativeEndian.AppendUint32(info, i.value)
	}
	return info[:cap(info)]
}

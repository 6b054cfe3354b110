package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// What each of wire's words becomes: expressions of nf_tables', and the kernel's structures of extensions.

func appendExpr(b []byte, name string, fill func([]byte) []byte) []byte {
	return nf.AppendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
		b = nf.AppendString(b, unix.NFTA_EXPR_NAME, name)
		return nf.AppendNested(b, unix.NFTA_EXPR_DATA, fill)
	})
}

func appendMeta(b []byte, key uint32) []byte {
	return appendExpr(b, "meta", func(b []byte) []byte {
		b = nf.AppendUint32(b, unix.NFTA_META_KEY, key)
		return nf.AppendUint32(b, unix.NFTA_META_DREG, unix.NFT_REG_1)
	})
}

func appendPayload(b []byte, base, offset, length uint32) []byte {
	return appendExpr(b, "payload", func(b []byte) []byte {
		b = nf.AppendUint32(b, unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1)
		b = nf.AppendUint32(b, unix.NFTA_PAYLOAD_BASE, base)
		b = nf.AppendUint32(b, unix.NFTA_PAYLOAD_OFFSET, offset)
		return nf.AppendUint32(b, unix.NFTA_PAYLOAD_LEN, length)
	})
}

func appendData(b []byte, typ uint16, value []byte) []byte {
	return nf.AppendNested(b, typ, func(b []byte) []byte { return nf.AppendAttr(b, unix.NFTA_DATA_VALUE, value) })
}

func appendCmp(b []byte, op uint32, value []byte) []byte {
	return appendExpr(b, "cmp", func(b []byte) []byte {
		b = nf.AppendUint32(b, unix.NFTA_CMP_SREG, unix.NFT_REG_1)
		b = nf.AppendUint32(b, unix.NFTA_CMP_OP, op)
		return appendData(b, unix.NFTA_CMP_DATA, value)
	})
}

func appendBitwise(b, mask []byte) []byte {
	return appendExpr(b, "bitwise", func(b []byte) []byte {
		b = nf.AppendUint32(b, unix.NFTA_BITWISE_SREG, unix.NFT_REG_1)
		b = nf.AppendUint32(b, unix.NFTA_BITWISE_DREG, unix.NFT_REG_1)
		b = nf.AppendUint32(b, unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		b = appendData(b, unix.NFTA_BITWISE_MASK, mask)
		return appendData(b, unix.NFTA_BITWISE_XOR, make([]byte, len(mask)))
	})
}

func appendCounter(b []byte) []byte {
	return appendExpr(b, "counter", func(b []byte) []byte {
		b = nf.AppendAttr(b, unix.NFTA_COUNTER_BYTES, make([]byte, 8))
		return nf.AppendAttr(b, unix.NFTA_COUNTER_PACKETS, make([]byte, 8))
	})
}

// Of expressions that are extensions of iptables; package unix lacks them.
const extensionName, extensionRevision, extensionInfo = 1, 2, 3

// appendExtension writes a match or a target. Infos are the kernel's structures, in units of eight bytes.
func appendExtension(b []byte, kind, name string, revision uint32, info []byte) []byte {
	for len(info)%8 != 0 {
		info = append(info, 0)
	}
	return appendExpr(b, kind, func(b []byte) []byte {
		b = nf.AppendString(b, extensionName, name)
		b = nf.AppendUint32(b, extensionRevision, revision)
		return nf.AppendAttr(b, extensionInfo, info)
	})
}

func (w *wire) match(name string, revision uint32, info []byte) {
	w.matches = appendExtension(w.matches, "match", name, revision, info)
}

func comparison(not bool) uint32 {
	if not {
		return unix.NFT_CMP_NEQ
	}
	return unix.NFT_CMP_EQ
}

// address compares an address of the packet's with one, all or some of its bits. The places are those of IPv4 and IPv6.
func (w *wire) address(b []byte, text string, not bool, place4, place6 uint32) ([]byte, error) {
	addr, mask, err := addressAndMask(text)
	if err != nil {
		return b, err
	}
	place := place4
	if w.family == intent.IPv6 {
		place = place6
	}
	if (len(addr) == 16) != (w.family == intent.IPv6) {
		return b, fmt.Errorf("%s is of the other family", text)
	}
	n := leading(mask)
	if n == 0 {
		return b, nil // any address
	}
	if n > 0 {
		b = appendPayload(b, unix.NFT_PAYLOAD_NETWORK_HEADER, place, uint32(n))
		return appendCmp(b, comparison(not), addr[:n]), nil
	}
	b = appendPayload(b, unix.NFT_PAYLOAD_NETWORK_HEADER, place, uint32(len(addr)))
	b = appendBitwise(b, mask)
	return appendCmp(b, comparison(not), addr), nil
}

func addressAndMask(text string) (addr, mask []byte, err error) {
	one, rest, more := strings.Cut(text, "/")
	a, err := netip.ParseAddr(one)
	if err != nil {
		return nil, nil, err
	}
	bits := a.BitLen()
	if more {
		if m, err := netip.ParseAddr(rest); err == nil {
			return a.AsSlice(), m.AsSlice(), nil
		}
		if bits, err = strconv.Atoi(rest); err != nil || bits < 0 || bits > a.BitLen() {
			return nil, nil, fmt.Errorf("%q is no address with a mask", text)
		}
	}
	mask = make([]byte, a.BitLen()/8)
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return a.AsSlice(), mask, nil
}

// leading is how many whole bytes a mask covers, if it covers these and nothing else; otherwise -1.
func leading(mask []byte) int {
	n := 0
	for n < len(mask) && mask[n] == 0xff {
		n++
	}
	for _, m := range mask[n:] {
		if m != 0 {
			return -1
		}
	}
	return n
}

// interfaceName compares where a packet came in; a name that ends with + stands for all that begin so.
func (w *wire) interfaceName(name string) {
	value, any := strings.CutSuffix(name, "+")
	raw := []byte(value)
	if !any {
		raw = append(raw, 0)
	}
	w.iface = appendMeta(w.iface, unix.NFT_META_IIFNAME)
	w.iface = appendCmp(w.iface, unix.NFT_CMP_EQ, raw)
}

// port compares the destination port, with one or with a range.
func (w *wire) port(text string) error {
	from, to, ranged := strings.Cut(text, ":")
	if !ranged {
		to = from
	}
	lo, err1 := strconv.ParseUint(from, 10, 16)
	hi, err2 := strconv.ParseUint(to, 10, 16)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if w.proto == unix.IPPROTO_SCTP {
		w.match("sctp", 0, sctpInfo(uint16(lo), uint16(hi)))
		return nil
	}
	w.matches = appendPayload(w.matches, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)
	first, last := binary.BigEndian.AppendUint16(nil, uint16(lo)), binary.BigEndian.AppendUint16(nil, uint16(hi))
	if lo == hi {
		w.matches = appendCmp(w.matches, unix.NFT_CMP_EQ, first)
		return nil
	}
	w.matches = appendExpr(w.matches, "range", func(b []byte) []byte {
		b = nf.AppendUint32(b, unix.NFTA_RANGE_SREG, unix.NFT_REG_1)
		b = nf.AppendUint32(b, unix.NFTA_RANGE_OP, unix.NFT_RANGE_EQ)
		b = appendData(b, unix.NFTA_RANGE_FROM_DATA, first)
		return appendData(b, unix.NFTA_RANGE_TO_DATA, last)
	})
	return nil
}

// sctpInfo is struct xt_sctp_info: ranges of destination and source ports, kinds of chunks, and which of them count.
func sctpInfo(lo, hi uint16) []byte {
	const destination = 2
	b := make([]byte, 292)
	binary.NativeEndian.PutUint16(b, lo)
	binary.NativeEndian.PutUint16(b[2:], hi)
	for i := range 4 {
		b[268+3*i] = math.MaxUint8 // no kind
	}
	binary.NativeEndian.PutUint32(b[284:], destination)
	return b
}

// packetMark compares some bits of the packet's mark.
func (w *wire) packetMark(text string, not bool) error {
	value, mask, err := valueAndMask(text)
	if err != nil {
		return err
	}
	w.matches = appendMeta(w.matches, unix.NFT_META_MARK)
	w.matches = appendBitwise(w.matches, binary.NativeEndian.AppendUint32(nil, mask))
	w.matches = appendCmp(w.matches, comparison(not), binary.NativeEndian.AppendUint32(nil, value))
	return nil
}

func valueAndMask(text string) (value, mask uint32, err error) {
	one, two, _ := strings.Cut(text, "/")
	v, err1 := strconv.ParseUint(one, 0, 32)
	m, err2 := strconv.ParseUint(two, 0, 32)
	return uint32(v), uint32(m), errors.Join(err1, err2)
}

// states are bits of struct xt_conntrack_mtinfo3.
var states = map[string]uint16{"INVALID": 1, "ESTABLISHED": 2, "RELATED": 4, "NEW": 8, "SNAT": 64, "DNAT": 128, "UNTRACKED": 256}

func (w *wire) state(list string, not bool) error {
	const byState = 1
	info := make([]byte, 164)
	var mask uint16
	for name := range strings.SplitSeq(list, ",") {
		bit, known := states[name]
		if !known {
			return errWord
		}
		mask |= bit
	}
	binary.NativeEndian.PutUint16(info[146:], byState)
	if not {
		binary.NativeEndian.PutUint16(info[148:], byState)
	}
	binary.NativeEndian.PutUint16(info[150:], mask)
	w.match("conntrack", 3, info)
	return nil
}

// addressType asks whether an address is this node's; at is the place of source or destination in the structure.
func (w *wire) addressType(text string, at int) error {
	if text != "LOCAL" {
		return errWord
	}
	info := make([]byte, 8)
	binary.NativeEndian.PutUint16(info[at:], 1<<unix.RTN_LOCAL)
	w.match("addrtype", 1, info)
	return nil
}

// chance is struct xt_statistic_info.
func (w *wire) chance(text string) error {
	p, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return err
	}
	info := make([]byte, 24)
	for _, at := range []int{4, 12} { // where it is, and where the commands leave it too
		binary.NativeEndian.PutUint32(info[at:], uint32(math.Round(p*(1<<31))))
	}
	w.match("statistic", 0, info)
	return nil
}

// program is struct xt_bpf_info_v1: instructions of a number each for what, two jumps and a value.
func (w *wire) program(text string) error {
	const instructions = 64
	parts := strings.Split(text, ",")
	n, err := strconv.Atoi(parts[0])
	if err != nil || n != len(parts)-1 || n > instructions {
		return errors.New("not a program")
	}
	info := make([]byte, 8, 8+instructions*8+8)
	binary.NativeEndian.PutUint16(info[2:], uint16(n))
	for _, one := range parts[1:] {
		var code, value uint32
		var yes, no uint8
		if _, err := fmt.Sscan(one, &code, &yes, &no, &value); err != nil {
			return err
		}
		info = binary.NativeEndian.AppendUint16(info, uint16(code))
		info = append(info, yes, no)
		info = binary.NativeEndian.AppendUint32(info, value)
	}
	w.match("bpf", 1, info[:cap(info)])
	return nil
}

const recentSet, recentUpdate, recentReap = 2, 4, 32

// endRecent writes struct xt_recent_mtinfo_v1, whose options are complete when something else begins.
func (w *wire) endRecent() {
	if w.recent.name == "" {
		return
	}
	const nameAt, nameSize, maskAt = 10, 200, 212
	info := make([]byte, maskAt+16)
	binary.NativeEndian.PutUint32(info, w.recent.seconds)
	info[8] = w.recent.how
	copy(info[nameAt:nameAt+nameSize-1], w.recent.name)
	for i := range 16 {
		info[maskAt+i] = 0xff
	}
	w.match("recent", 1, info)
	w.recent = recentMatch{}
}

// Verdicts that package unix lacks.
const drop, accept = 0, 1

// finish writes the verdict.
func (w *wire) finish() error {
	w.endRecent()
	if !w.to.present {
		return errors.New("no target")
	}
	switch w.to.name {
	case "MARK":
		value, mask, err := valueAndMask(w.to.value)
		if err != nil {
			return err
		}
		info := binary.NativeEndian.AppendUint32(nil, value)
		w.target("MARK", 2, binary.NativeEndian.AppendUint32(info, mask))
	case "DNAT":
		return w.destination(w.to.value)
	case "MASQUERADE":
		w.masquerade()
	case "REJECT":
		return w.reject()
	case "ACCEPT":
		w.code(accept, "")
	case "DROP":
		w.code(drop, "")
	case "RETURN":
		w.code(unix.NFT_RETURN, "")
	default:
		if !strings.HasPrefix(w.to.name, prefix) {
			return errWord
		}
		code := int32(unix.NFT_GOTO)
		if w.to.jump {
			code = unix.NFT_JUMP
		}
		w.code(code, w.to.name)
	}
	return nil
}

func (w *wire) target(name string, revision uint32, info []byte) {
	w.verdict = appendExtension(w.verdict, "target", name, revision, info)
}

// code is a verdict of nf_tables' own.
func (w *wire) code(code int32, chain string) {
	w.verdict = appendExpr(w.verdict, "immediate", func(b []byte) []byte {
		b = nf.AppendUint32(b, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		return nf.AppendNested(b, unix.NFTA_IMMEDIATE_DATA, func(b []byte) []byte {
			return nf.AppendNested(b, unix.NFTA_DATA_VERDICT, func(b []byte) []byte {
				b = nf.AppendUint32(b, unix.NFTA_VERDICT_CODE, uint32(code))
				if chain != "" {
					b = nf.AppendString(b, unix.NFTA_VERDICT_CHAIN, chain)
				}
				return b
			})
		})
	})
}

// destination is struct nf_nat_range2: from one address and port to the same.
func (w *wire) destination(text string) error {
	to, err := netip.ParseAddrPort(text)
	if err != nil {
		return err
	}
	const addresses, ports = 1, 2
	info := make([]byte, 48)
	binary.NativeEndian.PutUint32(info, addresses|ports)
	for _, at := range []int{4, 20} {
		copy(info[at:], to.Addr().AsSlice())
	}
	for _, at := range []int{36, 38} {
		binary.BigEndian.PutUint16(info[at:], to.Port())
	}
	w.target("DNAT", 2, info)
	return nil
}

// masquerade is struct nf_nat_ipv4_multi_range_compat with one range, or struct nf_nat_range, of which only flags are used.
func (w *wire) masquerade() {
	const fully = 1 << 4
	flags := uint32(0)
	if w.to.option == "--random-fully" {
		flags = fully
	}
	if w.family == intent.IPv6 {
		info := make([]byte, 40)
		binary.NativeEndian.PutUint32(info, flags)
		w.target("MASQUERADE", 0, info)
		return
	}
	info := make([]byte, 24)
	binary.NativeEndian.PutUint32(info, 1)
	binary.NativeEndian.PutUint32(info[4:], flags)
	w.target("MASQUERADE", 0, info)
}

func (w *wire) reject() error {
	port, reset := uint32(3), uint32(7) // enum ipt_reject_with
	if w.family == intent.IPv6 {
		port, reset = 4, 6 // enum ip6t_reject_with
	}
	with := port
	switch w.to.value {
	case "":
	case "tcp-reset":
		with = reset
	default:
		return errWord
	}
	w.target("REJECT", 0, binary.NativeEndian.AppendUint32(nil, with))
	return nil
}

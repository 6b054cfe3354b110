package nf

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// Reg0 is the first of sixteen registers of four bytes. A value of more bytes takes several neighbours.
const Reg0 = unix.NFT_REG32_00

// Expr is one expression of a rule.
type Expr interface {
	// Append writes the expression as an element of a rule's list.
	Append(b []byte) []byte
}

// Rule is a list of expressions; the first that does not match ends it.
type Rule []Expr

func appendExpr(b []byte, name string, fill func([]byte) []byte) []byte {
	return appendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
		b = appendString(b, unix.NFTA_EXPR_NAME, name)
		return appendNested(b, unix.NFTA_EXPR_DATA, fill)
	})
}

func appendData(b []byte, typ uint16, value []byte) []byte {
	return appendNested(b, typ, func(b []byte) []byte { return AppendAttr(b, unix.NFTA_DATA_VALUE, value) })
}

// Meta loads metadata of a packet (NFT_META_*) into Dst, or sets it from Src.
type Meta struct{ Key, Dst, Src uint32 }

func (e Meta) Append(b []byte) []byte {
	return appendExpr(b, "meta", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_META_KEY, e.Key)
		if e.Src != 0 {
			return appendUint32(b, unix.NFTA_META_SREG, e.Src)
		}
		return appendUint32(b, unix.NFTA_META_DREG, e.Dst)
	})
}

// Payload loads bytes of a packet, counted from a header (NFT_PAYLOAD_*).
type Payload struct{ Dst, Base, Offset, Len uint32 }

func (e Payload) Append(b []byte) []byte {
	return appendExpr(b, "payload", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_PAYLOAD_DREG, e.Dst)
		b = appendUint32(b, unix.NFTA_PAYLOAD_BASE, e.Base)
		b = appendUint32(b, unix.NFTA_PAYLOAD_OFFSET, e.Offset)
		return appendUint32(b, unix.NFTA_PAYLOAD_LEN, e.Len)
	})
}

// SetPayload writes bytes of a packet and corrects the checksum at ChecksumOffset; PseudoHeader: also the transport's.
type SetPayload struct {
	Src, Base, Offset, Len, ChecksumOffset uint32
	PseudoHeader                           bool
}

func (e SetPayload) Append(b []byte) []byte {
	const pseudoHeader = 1 // NFT_PAYLOAD_L4CSUM_PSEUDOHDR
	return appendExpr(b, "payload", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_PAYLOAD_SREG, e.Src)
		b = appendUint32(b, unix.NFTA_PAYLOAD_BASE, e.Base)
		b = appendUint32(b, unix.NFTA_PAYLOAD_OFFSET, e.Offset)
		b = appendUint32(b, unix.NFTA_PAYLOAD_LEN, e.Len)
		b = appendUint32(b, unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFT_PAYLOAD_CSUM_INET)
		b = appendUint32(b, unix.NFTA_PAYLOAD_CSUM_OFFSET, e.ChecksumOffset)
		if e.PseudoHeader {
			b = appendUint32(b, unix.NFTA_PAYLOAD_CSUM_FLAGS, pseudoHeader)
		}
		return b
	})
}

// Cmp matches if a register holds Data; with Not, if it does not.
type Cmp struct {
	Reg  uint32
	Not  bool
	Data []byte
}

func (e Cmp) Append(b []byte) []byte {
	op := uint32(unix.NFT_CMP_EQ)
	if e.Not {
		op = unix.NFT_CMP_NEQ
	}
	return appendExpr(b, "cmp", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_CMP_SREG, e.Reg)
		b = appendUint32(b, unix.NFTA_CMP_OP, op)
		return appendData(b, unix.NFTA_CMP_DATA, e.Data)
	})
}

// Range matches if a register is between two values, both included.
type Range struct {
	Reg      uint32
	From, To []byte
}

func (e Range) Append(b []byte) []byte {
	return appendExpr(b, "range", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_RANGE_SREG, e.Reg)
		b = appendUint32(b, unix.NFTA_RANGE_OP, unix.NFT_RANGE_EQ)
		b = appendData(b, unix.NFTA_RANGE_FROM_DATA, e.From)
		return appendData(b, unix.NFTA_RANGE_TO_DATA, e.To)
	})
}

// Bitwise computes Src & Mask ^ Xor; no Xor is zero.
type Bitwise struct {
	Src, Dst  uint32
	Mask, Xor []byte
}

func (e Bitwise) Append(b []byte) []byte {
	xor := e.Xor
	if xor == nil {
		xor = make([]byte, len(e.Mask))
	}
	return appendExpr(b, "bitwise", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_BITWISE_SREG, e.Src)
		b = appendUint32(b, unix.NFTA_BITWISE_DREG, e.Dst)
		b = appendUint32(b, unix.NFTA_BITWISE_LEN, uint32(len(e.Mask)))
		b = appendData(b, unix.NFTA_BITWISE_MASK, e.Mask)
		return appendData(b, unix.NFTA_BITWISE_XOR, xor)
	})
}

// Counter counts packets and bytes.
type Counter struct{}

func (Counter) Append(b []byte) []byte {
	return appendExpr(b, "counter", func(b []byte) []byte {
		b = AppendAttr(b, unix.NFTA_COUNTER_BYTES, make([]byte, 8))
		return AppendAttr(b, unix.NFTA_COUNTER_PACKETS, make([]byte, 8))
	})
}

// Immediate loads a constant.
type Immediate struct {
	Dst  uint32
	Data []byte
}

func (e Immediate) Append(b []byte) []byte {
	return appendExpr(b, "immediate", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_IMMEDIATE_DREG, e.Dst)
		return appendData(b, unix.NFTA_IMMEDIATE_DATA, e.Data)
	})
}

// Verdict ends a rule, and is the data of a verdict map. Chain is for Goto and Jump.
type Verdict struct {
	Code  int32
	Chain string
}

// The verdicts.
var (
	Drop     = Verdict{Code: 0}
	Accept   = Verdict{Code: 1}
	Continue = Verdict{Code: unix.NFT_CONTINUE}
	Return   = Verdict{Code: unix.NFT_RETURN}
)

// Goto continues in another chain and does not come back.
func Goto(chain string) Verdict { return Verdict{unix.NFT_GOTO, chain} }

// Jump continues in another chain and comes back.
func Jump(chain string) Verdict { return Verdict{unix.NFT_JUMP, chain} }

func (e Verdict) Append(b []byte) []byte {
	return appendExpr(b, "immediate", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		return e.appendData(b, unix.NFTA_IMMEDIATE_DATA)
	})
}

func (e Verdict) appendData(b []byte, typ uint16) []byte {
	return appendNested(b, typ, func(b []byte) []byte {
		return appendNested(b, unix.NFTA_DATA_VERDICT, func(b []byte) []byte {
			b = appendUint32(b, unix.NFTA_VERDICT_CODE, uint32(e.Code))
			if e.Chain != "" {
				b = appendString(b, unix.NFTA_VERDICT_CHAIN, e.Chain)
			}
			return b
		})
	})
}

// IsIn matches if a set has what begins at Key; with Not, if it has not.
type IsIn struct {
	Set *Set
	Key uint32
	Not bool
}

func (e IsIn) Append(b []byte) []byte {
	return appendExpr(b, "lookup", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_LOOKUP_SREG, e.Key)
		b = appendString(b, unix.NFTA_LOOKUP_SET, e.Set.Name)
		if e.Not {
			b = appendUint32(b, unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
		}
		return b
	})
}

// Lookup loads what a map has for what begins at Key into Dst; the rule ends if it has nothing.
type Lookup struct {
	Map      *Set
	Key, Dst uint32
}

func (e Lookup) Append(b []byte) []byte {
	return appendExpr(b, "lookup", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_LOOKUP_SREG, e.Key)
		b = appendUint32(b, unix.NFTA_LOOKUP_DREG, e.Dst)
		return appendString(b, unix.NFTA_LOOKUP_SET, e.Map.Name)
	})
}

// VerdictMap does what a map has for what begins at Key.
func VerdictMap(m *Set, key uint32) Lookup { return Lookup{m, key, unix.NFT_REG_VERDICT} }

// Dynset adds to, updates or deletes from a set that packets change.
type Dynset struct {
	Set           *Set
	Op, Key, Data uint32
	Timeout       time.Duration
}

// DynsetDelete is NFT_DYNSET_OP_DELETE, which package unix lacks.
const DynsetDelete = 2

func (e Dynset) Append(b []byte) []byte {
	return appendExpr(b, "dynset", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_DYNSET_SREG_KEY, e.Key)
		if e.Data != 0 {
			b = appendUint32(b, unix.NFTA_DYNSET_SREG_DATA, e.Data)
		}
		b = appendUint32(b, unix.NFTA_DYNSET_OP, e.Op)
		if e.Timeout != 0 {
			b = AppendAttr(b, unix.NFTA_DYNSET_TIMEOUT, binary.BigEndian.AppendUint64(nil, uint64(e.Timeout.Milliseconds())))
		}
		return appendString(b, unix.NFTA_DYNSET_SET_NAME, e.Set.Name)
	})
}

// AddressType loads the type (RTN_*) of the packet's source or destination address as seen from this node.
type AddressType struct {
	Source bool
	Dst    uint32
}

func (e AddressType) Append(b []byte) []byte {
	flags := uint32(unix.NFTA_FIB_F_DADDR)
	if e.Source {
		flags = unix.NFTA_FIB_F_SADDR
	}
	return appendExpr(b, "fib", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_FIB_DREG, e.Dst)
		b = appendUint32(b, unix.NFTA_FIB_FLAGS, flags)
		return appendUint32(b, unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
	})
}

// Ct loads what connection tracking knows of a packet (NFT_CT_*) into Dst, or sets it from Src. For addresses and ports it
// is about one direction.
type Ct struct {
	Key, Dst, Src uint32
	Direction     Direction
}

// Direction of a connection.
type Direction uint8

const (
	NoDirection Direction = iota
	Original
	Reply
)

func (e Ct) Append(b []byte) []byte {
	return appendExpr(b, "ct", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_CT_KEY, e.Key)
		if e.Direction != NoDirection {
			b = AppendAttr(b, unix.NFTA_CT_DIRECTION, []byte{byte(e.Direction - Original)})
		}
		if e.Src != 0 {
			return appendUint32(b, unix.NFTA_CT_SREG, e.Src)
		}
		return appendUint32(b, unix.NFTA_CT_DREG, e.Dst)
	})
}

// Reject answers that nobody is there, with an ICMP code or a TCP reset.
type Reject struct {
	Reset bool
	Code  uint8
}

func (e Reject) Append(b []byte) []byte {
	typ := uint32(unix.NFT_REJECT_ICMP_UNREACH)
	if e.Reset {
		typ = unix.NFT_REJECT_TCP_RST
	}
	return appendExpr(b, "reject", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_REJECT_TYPE, typ)
		return AppendAttr(b, unix.NFTA_REJECT_ICMP_CODE, []byte{e.Code})
	})
}

// Masquerade rewrites the source to an address of this node, from a random port.
type Masquerade struct{}

func (Masquerade) Append(b []byte) []byte {
	return appendExpr(b, "masq", func(b []byte) []byte {
		return appendUint32(b, unix.NFTA_MASQ_FLAGS, unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY)
	})
}

// DNAT rewrites the destination to the address and port in two registers.
type DNAT struct {
	Family     byte
	Addr, Port uint32
}

func (e DNAT) Append(b []byte) []byte {
	return appendExpr(b, "nat", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		b = appendUint32(b, unix.NFTA_NAT_FAMILY, uint32(e.Family))
		b = appendUint32(b, unix.NFTA_NAT_REG_ADDR_MIN, e.Addr)
		b = appendUint32(b, unix.NFTA_NAT_REG_PROTO_MIN, e.Port)
		return b
	})
}

// Redirect rewrites the destination to this node and the port in a register.
type Redirect struct{ Port uint32 }

func (e Redirect) Append(b []byte) []byte {
	return appendExpr(b, "redir", func(b []byte) []byte { return appendUint32(b, unix.NFTA_REDIR_REG_PROTO_MIN, e.Port) })
}

// Random loads a random number from Offset to Offset + Below - 1.
type Random struct{ Dst, Below, Offset uint32 }

func (e Random) Append(b []byte) []byte {
	return appendExpr(b, "numgen", func(b []byte) []byte {
		b = appendUint32(b, unix.NFTA_NG_DREG, e.Dst)
		b = appendUint32(b, unix.NFTA_NG_MODULUS, e.Below)
		b = appendUint32(b, unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM)
		return appendUint32(b, unix.NFTA_NG_OFFSET, e.Offset)
	})
}

// Transparent loads 1 if the packet has a transparent socket on this node.
type Transparent struct{ Dst uint32 }

func (e Transparent) Append(b []byte) []byte {
	const socketKey, socketDst, transparent = 1, 2, 0 // NFTA_SOCKET_KEY, NFTA_SOCKET_DREG, NFT_SOCKET_TRANSPARENT
	return appendExpr(b, "socket", func(b []byte) []byte {
		b = appendUint32(b, socketKey, transparent)
		return appendUint32(b, socketDst, e.Dst)
	})
}

// NoTrack keeps a packet from connection tracking, and so from all NAT; only before that is it of use.
type NoTrack struct{}

func (NoTrack) Append(b []byte) []byte {
	return appendExpr(b, "notrack", func(b []byte) []byte { return b })
}

// Comment does nothing: the nft tool shows it with the rule, instead of the rule's tag.
type Comment string

func (Comment) Append(b []byte) []byte { return b }

// Extension is a match or a target of iptables. Info is the kernel's structure.
type Extension struct {
	Target   bool
	Name     string
	Revision uint32
	Info     []byte
}

func (e Extension) Append(b []byte) []byte {
	kind := "match"
	if e.Target {
		kind = "target"
	}
	const name, revision, info = 1, 2, 3 // NFTA_MATCH_*, NFTA_TARGET_*
	padded := e.Info
	for len(padded)%8 != 0 {
		padded = append(padded, 0)
	}
	return appendExpr(b, kind, func(b []byte) []byte {
		b = appendString(b, name, e.Name)
		b = appendUint32(b, revision, e.Revision)
		return AppendAttr(b, info, padded)
	})
}

// Number is a number as the kernel computes with it.
func Number(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// AppendNumber appends one.
func AppendNumber(b []byte, v uint32) []byte { return binary.NativeEndian.AppendUint32(b, v) }

package nftables

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// phase is a part of a transaction. Whatever is found to be needed while one is put together, it reaches the kernel in
// this order: nothing is used before it is there, nothing goes while it is used, a key is free before it is taken again.
type phase uint8

const (
	cleared phase = iota // rules, elements, sets and chains that go, and tables
	structure
	removedElements
	removedChains
	addedElements
	rules
	phases
)

// batch is a transaction in the making: netlink messages that the kernel carries out all or none.
type batch struct {
	parts [phases][][]byte
	seq   uint32
	open  [64]*elements // by what the set is, and whether they go
	// owner is whom the messages written now are for: a number that means something to the caller, 0 for nobody.
	owner  int
	owners map[uint32]int
	err    error
}

// elements is a message with elements of one set, still growing.
type elements struct {
	buf  []byte
	list int // where the list begins
	del  bool
}

// A list is an attribute, whose length has 16 bits.
const elementsLimit = 60000

func newBatch() *batch { return &batch{seq: 1} }

// message writes a message into a phase.
func (b *batch) message(p phase, family byte, typ, flags uint16, fill func([]byte) []byte) {
	last := b.room(p)
	at := len(*last)
	buf := nf.AppendHeader(*last, nf.Kind(typ), unix.NLM_F_REQUEST|flags, b.next(), family, 0)
	buf = fill(buf)
	binary.NativeEndian.PutUint32(buf[at:], uint32(len(buf)-at))
	*last = buf
}

// room returns the buffer that small messages of a phase are written into.
func (b *batch) room(p phase) *[]byte {
	if n := len(b.parts[p]); n == 0 || len(b.parts[p][n-1]) >= elementsLimit {
		b.parts[p] = append(b.parts[p], nil)
	}
	return &b.parts[p][len(b.parts[p])-1]
}

// next returns the number of the next message, and notes whom it is for.
func (b *batch) next() uint32 {
	b.seq++
	if b.owner != 0 {
		b.owners[b.seq] = b.owner
	}
	return b.seq
}

// forOwner says whom the following messages are for, and keeps their elements out of other messages.
func (b *batch) forOwner(owner int) {
	if b.owners == nil {
		b.owners = map[uint32]int{}
	}
	b.closeElements()
	b.owner = owner
}

func (b *batch) addTable(family byte, name string) {
	b.message(cleared, family, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_TABLE_NAME, name)
		return nf.AppendUint32(m, unix.NFTA_TABLE_FLAGS, 0)
	})
}

func (b *batch) delTable(p phase, family byte, name string) {
	b.message(p, family, unix.NFT_MSG_DELTABLE, 0, func(m []byte) []byte {
		return nf.AppendString(m, unix.NFTA_TABLE_NAME, name)
	})
}

// delRules removes all rules of a table.
func (b *batch) delRules(family byte, table string) {
	b.message(cleared, family, unix.NFT_MSG_DELRULE, 0, func(m []byte) []byte {
		return nf.AppendString(m, unix.NFTA_RULE_TABLE, table)
	})
}

func (b *batch) delSet(family byte, table, name string) {
	b.message(cleared, family, unix.NFT_MSG_DELSET, 0, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_SET_TABLE, table)
		return nf.AppendString(m, unix.NFTA_SET_NAME, name)
	})
}

// flush removes all elements of a set.
func (b *batch) flush(s *set) {
	b.message(cleared, s.family, unix.NFT_MSG_DELSETELEM, 0, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_SET_ELEM_LIST_TABLE, s.table)
		return nf.AppendString(m, unix.NFTA_SET_ELEM_LIST_SET, s.name)
	})
}

func (b *batch) delChain(p phase, family byte, table, name string) {
	b.message(p, family, unix.NFT_MSG_DELCHAIN, 0, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_CHAIN_TABLE, table)
		return nf.AppendString(m, unix.NFTA_CHAIN_NAME, name)
	})
}

// hook is where a base chain hangs.
type hook struct {
	point    uint32
	priority int32
}

// addChain adds a chain; at is nil for one that isn't a base chain.
func (b *batch) addChain(family byte, table, name string, at *hook) {
	b.message(structure, family, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_CHAIN_TABLE, table)
		m = nf.AppendString(m, unix.NFTA_CHAIN_NAME, name)
		if at == nil {
			return m
		}
		m = nf.AppendNested(m, unix.NFTA_CHAIN_HOOK, func(m []byte) []byte {
			m = nf.AppendUint32(m, unix.NFTA_HOOK_HOOKNUM, at.point)
			return nf.AppendUint32(m, unix.NFTA_HOOK_PRIORITY, uint32(at.priority))
		})
		return nf.AppendString(m, unix.NFTA_CHAIN_TYPE, "nat")
	})
}

func (b *batch) addRule(family byte, table, chain string, exprs []expr.Any) {
	b.message(rules, family, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_RULE_TABLE, table)
		m = nf.AppendString(m, unix.NFTA_RULE_CHAIN, chain)
		return nf.AppendNested(m, unix.NFTA_RULE_EXPRESSIONS, func(m []byte) []byte {
			for _, e := range exprs {
				data, err := expr.Marshal(family, e)
				if err != nil {
					b.err = err
				}
				m = nf.AppendAttr(m, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, data)
			}
			return m
		})
	})
}

// add puts an element into a set, or a pair into a map.
func (b *batch) add(s *set, key, data []byte) { b.element(s, false, key, nil, data) }

// addRange puts an interval into a set.
func (b *batch) addRange(s *set, from, to []byte) { b.element(s, false, from, to, nil) }

func (b *batch) del(s *set, key []byte) { b.element(s, true, key, nil, nil) }

func (b *batch) delRange(s *set, from, to []byte) { b.element(s, true, from, to, nil) }

func (b *batch) element(s *set, del bool, key, end, data []byte) {
	at := &b.open[s.slot(del)]
	if *at == nil {
		*at = b.openElement(s, del, 0)
	} else if m := *at; len(m.buf)-m.list > elementsLimit {
		b.closeElement(m)
		*at = b.openElement(s, del, elementsLimit+1000) // where there were many, many come
	}
	m := *at
	m.buf = appendElement(m.buf, key, end, data)
}

// appendElement is written flat, since a full sync writes tens of thousands.
func appendElement(b, key, end, data []byte) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	b = appendValue(b, unix.NFTA_SET_ELEM_KEY, key)
	if end != nil {
		b = appendValue(b, elemKeyEnd, end)
	}
	if data != nil {
		b = appendValue(b, unix.NFTA_SET_ELEM_DATA, data)
	}
	binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at))
	binary.NativeEndian.PutUint16(b[at+2:], unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED)
	return b
}

// elemKeyEnd is NFTA_SET_ELEM_KEY_END, which package unix lacks.
const elemKeyEnd = 10

func appendValue(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(8+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ|unix.NLA_F_NESTED)
	return nf.AppendAttr(b, unix.NFTA_DATA_VALUE, value)
}

func (b *batch) openElement(s *set, del bool, room int) *elements {
	typ, flags := uint16(unix.NFT_MSG_NEWSETELEM), uint16(unix.NLM_F_CREATE)
	if del {
		typ, flags = unix.NFT_MSG_DELSETELEM, 0
	}
	m := nf.AppendHeader(make([]byte, 0, room), nf.Kind(typ), unix.NLM_F_REQUEST|flags, b.next(), s.family, 0)
	m = nf.AppendString(m, unix.NFTA_SET_ELEM_LIST_TABLE, s.table)
	m = nf.AppendString(m, unix.NFTA_SET_ELEM_LIST_SET, s.name)
	list := len(m)
	return &elements{append(m, 0, 0, 0, 0), list, del}
}

func (b *batch) closeElement(m *elements) {
	binary.NativeEndian.PutUint16(m.buf[m.list:], uint16(len(m.buf)-m.list))
	binary.NativeEndian.PutUint16(m.buf[m.list+2:], unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED)
	binary.NativeEndian.PutUint32(m.buf, uint32(len(m.buf)))
	p := addedElements
	if m.del {
		p = removedElements
	}
	if len(m.buf) < elementsLimit/2 {
		last := b.room(p)
		*last = append(*last, m.buf...)
	} else {
		b.parts[p] = append(b.parts[p], m.buf)
	}
}

func (b *batch) closeElements() {
	for i, m := range b.open {
		if m != nil {
			b.closeElement(m)
			b.open[i] = nil
		}
	}
}

// addVerdict puts a goto into a verdict map; an empty chain means: go on.
func (b *batch) addVerdict(s *set, key []byte, chain string) {
	b.message(rules, s.family, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_SET_ELEM_LIST_TABLE, s.table)
		m = nf.AppendString(m, unix.NFTA_SET_ELEM_LIST_SET, s.name)
		return nf.AppendNested(m, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(m []byte) []byte {
			return nf.AppendNested(m, unix.NFTA_LIST_ELEM, func(m []byte) []byte {
				m = appendValue(m, unix.NFTA_SET_ELEM_KEY, key)
				return nf.AppendNested(m, unix.NFTA_SET_ELEM_DATA, func(m []byte) []byte {
					return nf.AppendNested(m, unix.NFTA_DATA_VERDICT, func(m []byte) []byte {
						if chain == "" {
							return nf.AppendUint32(m, unix.NFTA_VERDICT_CODE, verdictCode(unix.NFT_CONTINUE))
						}
						m = nf.AppendUint32(m, unix.NFTA_VERDICT_CODE, verdictCode(unix.NFT_GOTO))
						return nf.AppendString(m, unix.NFTA_VERDICT_CHAIN, chain)
					})
				})
			})
		})
	})
}

func verdictCode(v int32) uint32 { return uint32(v) }

// bytes returns the transaction as it is sent, nil if there is nothing in it.
func (b *batch) bytes() ([]byte, error) {
	if b.err != nil {
		return nil, b.err
	}
	b.closeElements()
	size := 64
	for _, p := range b.parts {
		for _, m := range p {
			size += len(m)
		}
	}
	out := make([]byte, 0, size)
	out = nf.AppendBracket(out, unix.NFNL_MSG_BATCH_BEGIN)
	first := len(out)
	for _, p := range b.parts {
		for _, m := range p {
			out = append(out, m...)
		}
	}
	if len(out) == first {
		return nil, nil
	}
	// One message asks for an acknowledgement: the sign that the transaction was read at all.
	out[first+6] |= unix.NLM_F_ACK
	return nf.AppendBracket(out, unix.NFNL_MSG_BATCH_END), nil
}

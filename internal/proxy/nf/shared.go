package nf

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Tables that others use, too: those of iptables. What is in them is not tracked.

// SharedTable adds a table, unless it is there.
func (b *Batch) SharedTable(t *Table) {
	b.message(structure, t.Family, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(m []byte) []byte {
		return appendUint32(appendString(m, unix.NFTA_TABLE_NAME, t.Name), unix.NFTA_TABLE_FLAGS, 0)
	})
}

// SharedChain adds a chain, unless it is there.
func (b *Batch) SharedChain(t *Table, name string, hook Hook) { b.newChain(t, name, hook) }

// FlushSharedChain deletes the rules of a chain.
func (b *Batch) FlushSharedChain(t *Table, name string) { b.flushChain(t, name) }

// DeleteSharedChain deletes a chain that no rule leads to any more; it is empty or flushed.
func (b *Batch) DeleteSharedChain(t *Table, name string) {
	b.named(deletedChains, t, unix.NFT_MSG_DELCHAIN, name)
}

// DeleteSharedChainLast deletes a chain when all else is done.
func (b *Batch) DeleteSharedChainLast(t *Table, name string) {
	b.named(last, t, unix.NFT_MSG_DELCHAIN, name)
}

// SharedRule adds a rule behind the others of a chain, or before them. Extensions of iptables want to know for which
// protocol the rule is; 0: any.
func (b *Batch) SharedRule(t *Table, chain string, proto byte, first bool, expressions func([]byte) []byte) {
	flags := uint16(unix.NLM_F_CREATE | unix.NLM_F_APPEND)
	if first {
		flags = unix.NLM_F_CREATE
	}
	b.message(rules, t.Family, unix.NFT_MSG_NEWRULE, flags, func(m []byte) []byte {
		m = appendString(m, unix.NFTA_RULE_TABLE, t.Name)
		m = appendString(m, unix.NFTA_RULE_CHAIN, chain)
		if proto != 0 {
			m = appendNested(m, unix.NFTA_RULE_COMPAT, func(m []byte) []byte {
				m = appendUint32(m, unix.NFTA_RULE_COMPAT_PROTO, uint32(proto))
				return appendUint32(m, unix.NFTA_RULE_COMPAT_FLAGS, 0)
			})
		}
		return appendNested(m, unix.NFTA_RULE_EXPRESSIONS, expressions)
	})
}

// RuleInfo is a rule as the kernel lists it; valid during the call that gets it.
type RuleInfo struct {
	Family                byte
	Table, Chain, Comment string
	Handle                uint64
	// Expressions is the encoded list.
	Expressions []byte
	tag         string
}

// JumpsTo is the chain that the rule sends every packet to, if it does nothing else but count them.
func (r RuleInfo) JumpsTo() (chain string) {
	for _, e := range Attributes(r.Expressions) {
		switch attrString(e, unix.NFTA_EXPR_NAME) {
		case "counter":
		case "immediate":
			verdict := attr(attr(attr(e, unix.NFTA_EXPR_DATA), unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT)
			code := int32(attrUint32(verdict, unix.NFTA_VERDICT_CODE))
			if code != unix.NFT_JUMP {
				return ""
			}
			chain = attrString(verdict, unix.NFTA_VERDICT_CHAIN)
		default:
			return ""
		}
	}
	return chain
}

// AppendMeaning appends what a list of expressions asks of packets and does to them, the same for a list that is written and
// for what the kernel lists of it: without counters, registers and attributes that kernels add.
func AppendMeaning(b, expressions []byte) []byte {
	const name, revision, info = 1, 2, 3 // NFTA_MATCH_*, NFTA_TARGET_*
	for _, e := range Attributes(expressions) {
		kind, data := attrString(e, unix.NFTA_EXPR_NAME), attr(e, unix.NFTA_EXPR_DATA)
		if kind == "counter" {
			continue
		}
		b = append(append(b, kind...), 0)
		switch kind {
		case "meta":
			b = appendValues(b, data, unix.NFTA_META_KEY)
		case "payload":
			b = appendValues(b, data, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN)
		case "bitwise":
			b = appendValues(b, attr(data, unix.NFTA_BITWISE_MASK), unix.NFTA_DATA_VALUE)
		case "cmp":
			b = appendValues(b, data, unix.NFTA_CMP_OP)
			b = appendValues(b, attr(data, unix.NFTA_CMP_DATA), unix.NFTA_DATA_VALUE)
		case "range":
			b = appendValues(b, data, unix.NFTA_RANGE_OP)
			b = appendValues(b, attr(data, unix.NFTA_RANGE_FROM_DATA), unix.NFTA_DATA_VALUE)
			b = appendValues(b, attr(data, unix.NFTA_RANGE_TO_DATA), unix.NFTA_DATA_VALUE)
		case "immediate":
			value := attr(data, unix.NFTA_IMMEDIATE_DATA)
			b = appendValues(b, value, unix.NFTA_DATA_VALUE)
			b = appendValues(b, attr(value, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CODE, unix.NFTA_VERDICT_CHAIN)
		case "match", "target":
			b = appendValues(b, data, name, revision, info)
		}
	}
	return b
}

// appendValues appends attributes with their lengths.
func appendValues(b, attrs []byte, types ...uint16) []byte {
	for _, t := range types {
		v := attr(attrs, t)
		b = append(binary.NativeEndian.AppendUint16(b, uint16(len(v))), v...)
	}
	return b
}

// Chains lists the names of the chains of a table. reset is called before each attempt.
func (s *Socket) Chains(t *Table, reset func(), got func(name string)) error {
	return s.dump(t.Family, unix.NFT_MSG_GETCHAIN, appendString(nil, unix.NFTA_CHAIN_TABLE, t.Name), reset, func(m []byte) {
		if attrString(m, unix.NFTA_CHAIN_TABLE) == t.Name {
			got(attrString(m, unix.NFTA_CHAIN_NAME))
		}
	})
}

// Rules lists the rules of a table, or of one of its chains; those of all tables if it has no name. reset is called before
// each attempt.
func (s *Socket) Rules(t *Table, chain string, reset func(), got func(RuleInfo)) error {
	var body []byte
	if t.Name != "" {
		body = appendString(body, unix.NFTA_RULE_TABLE, t.Name)
	}
	if chain != "" {
		body = appendString(body, unix.NFTA_RULE_CHAIN, chain)
	}
	return s.dump(t.Family, unix.NFT_MSG_GETRULE, body, reset, func(m []byte) {
		r := RuleInfo{Family: t.Family, Table: attrString(m, unix.NFTA_RULE_TABLE), Chain: attrString(m, unix.NFTA_RULE_CHAIN)}
		if t.Name != "" && r.Table != t.Name || chain != "" && r.Chain != chain {
			return
		}
		r.Expressions = attr(m, unix.NFTA_RULE_EXPRESSIONS)
		if v := attr(m, unix.NFTA_RULE_HANDLE); len(v) == 8 {
			r.Handle = binary.BigEndian.Uint64(v)
		}
		r.Comment, r.tag = readRuleUserData(attr(m, unix.NFTA_RULE_USERDATA))
		got(r)
	})
}

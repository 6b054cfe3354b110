package nf

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// phase is a part of a transaction. Whatever the order of calls, messages reach the kernel in this order: nothing is used
// before it is there, nothing is deleted while it is used, a key is free before it is taken again.
type phase uint8

const (
	flushing phase = iota // tables that are deleted, rules
	deletedStructure
	structure
	deletedElements
	deletedChains
	addedElements
	rules // and elements that lead to chains
	last
	phases
)

// Batch is a transaction in the making: the kernel carries out all of it or nothing.
type Batch struct {
	parts [phases][][]byte
	count int // of messages
	open  map[openKey]*elements
	setID uint32
	// owner is whom the messages written now are for: a number that means something to the caller, 0 for nobody.
	owner   int
	owners  map[int]int
	changes map[*Table]*change
	// generation is the one that the transaction was made for, 0 for any.
	generation uint32
	scratch    []byte
}

type openKey struct {
	set *Set
	del bool
}

// elements is a message with elements of one set, still growing.
type elements struct {
	buf   []byte
	start int // of the list
	phase phase
}

// maxList bounds a list of elements: it is an attribute, whose length has 16 bits.
const maxList = 60000

// NewBatch returns an empty transaction.
func NewBatch() *Batch {
	return &Batch{open: map[openKey]*elements{}, changes: map[*Table]*change{}}
}

// OnlyAt makes the kernel refuse the transaction with ERESTART if anybody has changed anything since that generation.
func (b *Batch) OnlyAt(generation uint32) { b.generation = generation }

// Owner says whom the following messages are for, and keeps their elements out of other messages, so that a Refusal tells
// whom it concerns.
func (b *Batch) Owner(n int) {
	if n == b.owner {
		return
	}
	b.closeElements()
	b.owner = n
}

// next counts a message, and notes whom it is for.
func (b *Batch) next() uint32 {
	b.count++
	if b.owner != 0 {
		if b.owners == nil {
			b.owners = map[int]int{}
		}
		b.owners[b.count] = b.owner
	}
	return uint32(b.count)
}

func (b *Batch) message(p phase, family byte, typ, flags uint16, fill func([]byte) []byte) {
	room := b.room(p)
	start := len(*room)
	buf := appendHeader(*room, typ, unix.NLM_F_REQUEST|flags, b.next(), family)
	*room = finish(fill(buf), start)
}

// room returns the buffer that small messages of a phase are written into.
func (b *Batch) room(p phase) *[]byte {
	if n := len(b.parts[p]); n == 0 || len(b.parts[p][n-1]) >= maxList {
		b.parts[p] = append(b.parts[p], nil)
	}
	return &b.parts[p][len(b.parts[p])-1]
}

// element writes an element into the growing message of its set.
func (b *Batch) element(s *Set, del bool, e *Element) {
	at := openKey{s, del}
	m := b.open[at]
	switch {
	case m == nil:
		m = b.openElements(s, del, 0)
		b.open[at] = m
	case len(m.buf)-m.start > maxList:
		b.closeMessage(m)
		m = b.openElements(s, del, maxList+1000) // where there were many, many come
		b.open[at] = m
	}
	m.buf = s.appendElement(m.buf, e, !del)
}

func (b *Batch) openElements(s *Set, del bool, room int) *elements {
	typ, flags, p := uint16(unix.NFT_MSG_NEWSETELEM), uint16(unix.NLM_F_CREATE), addedElements
	switch {
	case del:
		typ, flags, p = unix.NFT_MSG_DELSETELEM, 0, deletedElements
	case s.Verdicts:
		p = rules
	}
	m := appendHeader(make([]byte, 0, room), typ, unix.NLM_F_REQUEST|flags, b.next(), s.Table.Family)
	m = appendString(m, unix.NFTA_SET_ELEM_LIST_TABLE, s.Table.Name)
	m = appendString(m, unix.NFTA_SET_ELEM_LIST_SET, s.Name)
	return &elements{append(m, 0, 0, 0, 0), len(m), p}
}

func (b *Batch) closeMessage(m *elements) {
	finish(finishNested(m.buf, m.start, unix.NFTA_SET_ELEM_LIST_ELEMENTS), 0)
	if len(m.buf) < maxList/2 {
		room := b.room(m.phase)
		*room = append(*room, m.buf...)
	} else {
		b.parts[m.phase] = append(b.parts[m.phase], m.buf)
	}
}

func (b *Batch) closeElements() {
	for _, m := range b.open {
		b.closeMessage(m)
	}
	clear(b.open)
}

// Empty says whether the transaction changes nothing.
func (b *Batch) Empty() bool { return b.count == 0 }

// bytes returns the transaction as it is sent. Its messages are numbered behind base, which is the number of the beginning.
func (b *Batch) bytes(base uint32) []byte {
	b.closeElements()
	size := 64
	for _, p := range b.parts {
		for _, m := range p {
			size += len(m)
		}
	}
	out := appendBracket(make([]byte, 0, size), unix.NFNL_MSG_BATCH_BEGIN, base, b.generation)
	first := len(out)
	for _, p := range b.parts {
		for _, m := range p {
			out = append(out, m...)
		}
	}
	for at := first; at < len(out); at += align(int(binary.NativeEndian.Uint32(out[at:]))) {
		binary.NativeEndian.PutUint32(out[at+8:], base+binary.NativeEndian.Uint32(out[at+8:]))
	}
	// One message asks for an acknowledgement: the sign that the transaction was read at all.
	out[first+6] |= unix.NLM_F_ACK
	return appendBracket(out, unix.NFNL_MSG_BATCH_END, base, 0)
}

// appendBracket writes the beginning or the end of a transaction.
func appendBracket(b []byte, typ uint16, seq, generation uint32) []byte {
	start := len(b)
	b = appendRawHeader(b, typ, unix.NLM_F_REQUEST, seq, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	if generation != 0 {
		b = appendUint32(b, unix.NFNL_BATCH_GENID, generation)
	}
	return finish(b, start)
}

// describe says what a message of the transaction is about. offset is where in it the kernel found the mistake, 0 if it
// does not say.
func (b *Batch) describe(number, offset int) string {
	if number == 0 {
		return "the transaction"
	}
	for _, p := range b.parts {
		for _, part := range p {
			for m := range Messages(part) {
				if int(m.Seq) == number && len(m.Body) >= 4 {
					return describe(m.Type&0xff, m.Body[4:], offset-unix.NLMSG_HDRLEN-4)
				}
			}
		}
	}
	return fmt.Sprintf("message %d", number)
}

var messageNames = map[uint16]string{
	unix.NFT_MSG_NEWTABLE: "adding the table", unix.NFT_MSG_DELTABLE: "deleting the table",
	unix.NFT_MSG_NEWCHAIN: "adding the chain", unix.NFT_MSG_DELCHAIN: "deleting the chain",
	unix.NFT_MSG_NEWSET: "adding the set", unix.NFT_MSG_DELSET: "deleting the set",
	unix.NFT_MSG_NEWRULE: "adding a rule to the chain", unix.NFT_MSG_DELRULE: "deleting rules of the chain",
	unix.NFT_MSG_NEWSETELEM: "adding elements to the set", unix.NFT_MSG_DELSETELEM: "deleting elements of the set",
}

// describe reads the names that every message begins with: of a table, and of what is in it.
func describe(typ uint16, attrs []byte, offset int) string {
	out := fmt.Sprintf("%s %s", messageNames[typ], attrString(attrs, 1))
	if name := attrString(attrs, nameAttr(typ)); name != "" && typ != unix.NFT_MSG_NEWTABLE && typ != unix.NFT_MSG_DELTABLE {
		out = fmt.Sprintf("%s %s of the table %s", messageNames[typ], name, attrString(attrs, 1))
	}
	if typ != unix.NFT_MSG_NEWSETELEM && typ != unix.NFT_MSG_DELSETELEM {
		return out
	}
	var keys [][]byte
	list := attr(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	at := len(attrs) - len(list) // the list is the last attribute
	for _, v := range Attributes(list) {
		if offset >= at && offset < at+4+align(len(v)) || offset < 0 {
			keys = append(keys, readElement(v).Key)
		}
		at += 4 + align(len(v))
	}
	if len(keys) == 1 {
		out += fmt.Sprintf(", element %x", keys[0])
	}
	return out
}

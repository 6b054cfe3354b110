package nf

import (
	"crypto/sha256"
	"encoding/hex"
	"hash/maphash"
	"maps"
	"slices"

	"golang.org/x/sys/unix"
)

// Table is a table of our own, and what the last acknowledged transaction left in it.
type Table struct {
	Family byte
	Name   string
	// Comment is what the nft tool shows of the table.
	Comment string
	// Owned: the kernel removes the table when the socket that added it is closed, however its process ends.
	Owned bool

	sets   map[string]digest
	chains map[string]chainState
}

// digest is the sum over a set's elements, whatever their order: what it takes to notice that one is missing, too many
// or another, without remembering them.
type digest struct {
	count int
	sum   uint64
}

var seed = maphash.MakeSeed()

func (d digest) plus(e digest) digest  { return digest{d.count + e.count, d.sum + e.sum} }
func (d digest) minus(e digest) digest { return digest{d.count - e.count, d.sum - e.sum} }

// Hook is where packets enter a base chain.
type Hook struct {
	Type     string // filter, nat or route
	Point    uint32 // NF_INET_*
	Priority int32
}

// Chain is a chain with its rules; without a Hook, packets come there from other chains only.
type Chain struct {
	Name  string
	Hook  Hook
	Rules []Rule
}

// chainState is a chain by the tags of its rules.
type chainState struct {
	hook Hook
	tags []string
}

// tag identifies the expressions of a rule. It is stored with the rule as a comment, so that another process can tell
// whether a rule is the one that it would write.
func tag(expressions []byte) string {
	sum := sha256.Sum256(expressions)
	return "portal " + hex.EncodeToString(sum[:8])
}

// change is what a transaction does to a table.
type change struct {
	// reset: sets and chains are all that the table will have; otherwise they are the difference.
	reset bool
	// present is what there was, as far as it has not been declared again.
	present *Present
	sets    map[string]digest
	chains  map[string]chainState
	deleted []string // chains
	dropped []string // sets
	// rewrite: a set was replaced, so that rules must be written anew that look like before.
	rewrite bool
}

func (b *Batch) change(t *Table) *change {
	c := b.changes[t]
	if c == nil {
		c = &change{sets: map[string]digest{}, chains: map[string]chainState{}}
		b.changes[t] = c
	}
	return c
}

// acknowledge notes in the tables what the kernel has now.
func (b *Batch) acknowledge() {
	for t, c := range b.changes {
		if c.reset || t.sets == nil {
			t.sets, t.chains = map[string]digest{}, map[string]chainState{}
		}
		for _, name := range c.deleted {
			delete(t.chains, name)
		}
		for _, name := range c.dropped {
			delete(t.sets, name)
		}
		for name, d := range c.sets {
			t.sets[name] = t.sets[name].plus(d)
		}
		maps.Copy(t.chains, c.chains)
	}
	clear(b.changes)
}

// Replace begins to declare all of a table. What is declared and present is not touched; Prune removes the rest.
// Without a Present there is no such table yet.
func (b *Batch) Replace(t *Table, present *Present) {
	c := b.change(t)
	c.reset, c.present = true, present
	if present != nil {
		return
	}
	b.message(structure, t.Family, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(m []byte) []byte {
		const userData, comment = 6, 0 // NFTA_TABLE_USERDATA, NFTNL_UDATA_TABLE_COMMENT
		m = appendString(m, unix.NFTA_TABLE_NAME, t.Name)
		flags := uint32(0)
		if t.Owned {
			flags = tableOwner
		}
		m = appendUint32(m, unix.NFTA_TABLE_FLAGS, flags)
		if t.Comment != "" {
			m = AppendAttr(m, userData, appendUserData(comment, t.Comment))
		}
		return m
	})
}

const tableOwner = 2 // NFT_TABLE_F_OWNER

func appendUserData(typ byte, text string) []byte {
	return append(append([]byte{typ, byte(len(text) + 1)}, text...), 0)
}

// Prune deletes all that was present and has not been declared since Replace, but for some sets.
func (b *Batch) Prune(t *Table, keep ...string) {
	c := b.change(t)
	if c.present == nil {
		return
	}
	for name, state := range c.present.chains {
		if len(state.tags) > 0 {
			b.flushChain(t, name)
		}
		b.named(deletedChains, t, unix.NFT_MSG_DELCHAIN, name)
	}
	for name, s := range c.present.sets {
		switch {
		case slices.Contains(keep, name):
		case s.declared == nil:
			b.named(deletedStructure, t, unix.NFT_MSG_DELSET, name)
		default:
			for key := range s.elements {
				e := Element{Key: []byte(key)}
				if s.declared.Intervals {
					e.Key, e.End = e.Key[:len(key)/2], e.Key[len(key)/2:]
				}
				b.element(s.declared, true, &e)
			}
		}
	}
	c.present = nil
}

// named writes a message that has nothing but the names of a table and of what is in it.
func (b *Batch) named(p phase, t *Table, typ uint16, name string) {
	b.message(p, t.Family, typ, 0, func(m []byte) []byte { return appendString(appendString(m, 1, t.Name), nameAttr(typ), name) })
}

// nameAttr is the attribute with the name of what is in a table; the table's own is always the first.
func nameAttr(typ uint16) uint16 {
	if typ == unix.NFT_MSG_NEWCHAIN || typ == unix.NFT_MSG_DELCHAIN {
		return unix.NFTA_CHAIN_NAME
	}
	return 2 // NFTA_SET_NAME, NFTA_RULE_CHAIN, NFTA_SET_ELEM_LIST_SET
}

// flushChain deletes the rules of a chain.
func (b *Batch) flushChain(t *Table, name string) { b.named(flushing, t, unix.NFT_MSG_DELRULE, name) }

// DeleteTable deletes a table with all that is in it, before anything else is done.
func (b *Batch) DeleteTable(t *Table) {
	b.deleteTable(flushing, t)
}

// DeleteTableLast deletes a table when all else is done.
func (b *Batch) DeleteTableLast(t *Table) { b.deleteTable(last, t) }

func (b *Batch) deleteTable(p phase, t *Table) {
	b.message(p, t.Family, unix.NFT_MSG_DELTABLE, 0, func(m []byte) []byte { return appendString(m, unix.NFTA_TABLE_NAME, t.Name) })
	if p == flushing {
		b.change(t).reset = true
	}
}

// AddSet declares a set. One that is present in another form is replaced.
func (b *Batch) AddSet(s *Set) {
	c := b.change(s.Table)
	if _, known := c.sets[s.Name]; !known && !s.Dynamic {
		c.sets[s.Name] = digest{} // it is there, with no elements
	}
	if c.present != nil {
		if have := c.present.sets[s.Name]; have != nil {
			if have.form == s.form() {
				if have.declared = s; have.unknown {
					have.elements = nil
					b.named(flushing, s.Table, unix.NFT_MSG_DELSETELEM, s.Name)
				}
				return
			}
			delete(c.present.sets, s.Name)
			b.named(deletedStructure, s.Table, unix.NFT_MSG_DELSET, s.Name)
			c.rewrite = true
		}
	}
	b.setID++
	id := b.setID
	b.message(structure, s.Table.Family, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func(m []byte) []byte { return s.append(m, id) })
}

// DeleteSet deletes a set that no rule uses.
func (b *Batch) DeleteSet(t *Table, name string) {
	b.named(deletedStructure, t, unix.NFT_MSG_DELSET, name)
	c := b.change(t)
	c.dropped = append(c.dropped, name)
}

// AddChain declares a chain with its rules. Sets that they use are declared before.
func (b *Batch) AddChain(t *Table, chain Chain) {
	c := b.change(t)
	have, there := t.chains[chain.Name]
	if c.reset {
		have, there = chainState{}, false
		if c.present != nil {
			have, there = c.present.chains[chain.Name]
			delete(c.present.chains, chain.Name)
		}
	}
	state := chainState{hook: chain.Hook}
	encoded, comments := make([][]byte, len(chain.Rules)), make([]string, len(chain.Rules))
	for i, r := range chain.Rules {
		for _, e := range r {
			encoded[i] = e.Append(encoded[i])
			if c, ok := e.(Comment); ok {
				comments[i] = string(c)
			}
		}
		state.tags = append(state.tags, tag(append([]byte(comments[i]), encoded[i]...)))
	}
	c.chains[chain.Name] = state
	if there && have.hook == chain.Hook && slices.Equal(have.tags, state.tags) && !c.rewrite {
		return
	}
	if there && len(have.tags) > 0 {
		b.flushChain(t, chain.Name)
	}
	if there && have.hook != chain.Hook {
		b.named(deletedStructure, t, unix.NFT_MSG_DELCHAIN, chain.Name)
		there = false
	}
	if !there {
		b.newChain(t, chain.Name, chain.Hook)
	}
	for i := range encoded {
		b.message(rules, t.Family, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(m []byte) []byte {
			m = appendString(m, unix.NFTA_RULE_TABLE, t.Name)
			m = appendString(m, unix.NFTA_RULE_CHAIN, chain.Name)
			m = appendNested(m, unix.NFTA_RULE_EXPRESSIONS, func(m []byte) []byte { return append(m, encoded[i]...) })
			return AppendAttr(m, unix.NFTA_RULE_USERDATA, ruleUserData(comments[i], state.tags[i]))
		})
	}
}

const (
	ruleComment = 0 // NFTNL_UDATA_RULE_COMMENT
	// ruleTag is a number that the nft tool knows nothing of: where a tag is if the rule has a comment of its own.
	ruleTag = 200
	// longestComment leaves room for the tag: all of a rule's user data has 256 bytes.
	longestComment = 200
)

// ruleUserData is what is stored with a rule: its tag, which is its comment unless it has one.
func ruleUserData(comment, tag string) []byte {
	if comment == "" {
		return appendUserData(ruleComment, tag)
	}
	return append(appendUserData(ruleComment, comment[:min(len(comment), longestComment)]), appendUserData(ruleTag, tag)...)
}

// readRuleUserData reads it. A rule without a tag has its comment as one.
func readRuleUserData(u []byte) (comment, tag string) {
	for len(u) > 2 && int(u[1])+2 <= len(u) && u[1] > 0 {
		text := string(u[2 : 1+u[1]])
		switch u[0] {
		case ruleComment:
			comment = text
		case ruleTag:
			tag = text
		}
		u = u[2+int(u[1]):]
	}
	if tag == "" {
		tag = comment
	}
	return comment, tag
}

func (b *Batch) newChain(t *Table, name string, hook Hook) {
	b.message(structure, t.Family, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(m []byte) []byte {
		m = appendString(m, unix.NFTA_CHAIN_TABLE, t.Name)
		m = appendString(m, unix.NFTA_CHAIN_NAME, name)
		if hook.Type == "" {
			return m
		}
		m = appendNested(m, unix.NFTA_CHAIN_HOOK, func(m []byte) []byte {
			m = appendUint32(m, unix.NFTA_HOOK_HOOKNUM, hook.Point)
			return appendUint32(m, unix.NFTA_HOOK_PRIORITY, uint32(hook.Priority))
		})
		m = appendUint32(m, unix.NFTA_CHAIN_POLICY, uint32(Accept.Code))
		return appendString(m, unix.NFTA_CHAIN_TYPE, hook.Type)
	})
}

// DeleteChain deletes a chain with its rules; elements that lead there are deleted in the same transaction.
func (b *Batch) DeleteChain(t *Table, name string) {
	b.named(deletedChains, t, unix.NFT_MSG_DELCHAIN, name)
	c := b.change(t)
	c.deleted = append(c.deleted, name)
}

func (s *Set) digest(scratch []byte, e *Element) (digest, []byte) {
	scratch = s.appendContent(e.appendKey(scratch[:0]), e)
	return digest{1, maphash.Bytes(seed, scratch)}, scratch
}

// Add puts an element into a set. One that is present is left alone; its key with something else is replaced.
func (b *Batch) Add(s *Set, e Element) {
	if s.Dynamic {
		b.element(s, false, &e)
		return
	}
	c := b.change(s.Table)
	d, scratch := s.digest(b.scratch, &e)
	b.scratch = scratch
	c.sets[s.Name] = c.sets[s.Name].plus(d)
	if c.present != nil {
		if have := c.present.sets[s.Name]; have != nil && have.elements != nil {
			key := scratch[:len(e.Key)+len(e.End)]
			content, there := have.elements[string(key)]
			delete(have.elements, string(key))
			if there && content == string(scratch[len(key):]) {
				return
			}
			if there {
				b.element(s, true, &e)
			}
		}
	}
	b.element(s, false, &e)
}

// Delete takes an element out of a set. All of it is given, as it was added.
func (b *Batch) Delete(s *Set, e Element) {
	c := b.change(s.Table)
	d, scratch := s.digest(b.scratch, &e)
	b.scratch = scratch
	c.sets[s.Name] = c.sets[s.Name].minus(d)
	b.element(s, true, &e)
}

// FlushDynamic deletes all elements of a set that packets change.
func (b *Batch) FlushDynamic(s *Set) { b.named(flushing, s.Table, unix.NFT_MSG_DELSETELEM, s.Name) }

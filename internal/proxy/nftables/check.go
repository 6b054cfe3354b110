package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// seen is what Check compares with.
type seen struct {
	// generation counts every transaction in the network namespace; 0: not looked yet.
	generation uint32
	// handles tell a table from another of the same name.
	handles map[intent.Family]uint64
}

// remember notes the tables that were just written.
func (t *tables) remember() error {
	t.seen = seen{handles: map[intent.Family]uint64{}}
	for f, one := range t.byFamily {
		h, err := t.socket.table(one.layout)
		if err != nil {
			return fmt.Errorf("reading the table %s back: %w", tableName, err)
		}
		t.seen.handles[f] = h
	}
	return nil
}

// CheckEvery is often, since a service that loads its own rules mostly flushes everybody's first.
func (t *tables) CheckEvery() time.Duration { return 4 * time.Second }

// Check costs one question while nobody changes nftables, and otherwise one for each chain and map of ours.
func (t *tables) Check(context.Context) error {
	if t.byFamily == nil {
		return errors.New("nothing has been written yet")
	}
	t.tidy()
	now, err := t.socket.generation()
	if err != nil {
		return fmt.Errorf("asking nf_tables for its generation: %w", err)
	}
	if now == t.seen.generation {
		return nil
	}
	for f, one := range t.byFamily {
		if err := t.socket.inspect(one, t.seen.handles[f], t.facts); err != nil {
			return fmt.Errorf("the table %s of IPv%d is not as it was written: %w", tableName, f, err)
		}
	}
	t.seen.generation = now
	return nil
}

// tidy removes sets that were replaced. It doesn't matter when: the next full sync would remove them too.
func (t *tables) tidy() {
	b := newBatch()
	for _, s := range t.late {
		b.delSet(s.family, tableName, s.name)
	}
	if t.commit(b) == nil {
		t.late = nil
	}
}

func (s *socket) generation() (uint32, error) {
	var id uint32
	err := s.Ask(unix.AF_UNSPEC, unix.NFT_MSG_GETGEN, false, nil, func(m []byte) {
		for typ, v := range nf.Attributes(m) {
			if typ == unix.NFTA_GEN_ID && len(v) == 4 {
				id = binary.BigEndian.Uint32(v)
			}
		}
	})
	return id, err
}

// tableHandle is NFTA_TABLE_HANDLE, which package unix lacks.
const tableHandle = 4

// table returns the handle of a table.
func (s *socket) table(l *layout) (uint64, error) {
	var handle uint64
	err := s.Ask(l.family, unix.NFT_MSG_GETTABLE, false, nf.AppendString(nil, unix.NFTA_TABLE_NAME, l.table), func(m []byte) {
		for typ, v := range nf.Attributes(m) {
			if typ == tableHandle && len(v) == 8 {
				handle = binary.BigEndian.Uint64(v)
			}
		}
	})
	return handle, err
}

// kind is the form of a set.
type kind struct{ flags, key, data, size uint32 }

// like says whether a set of the kernel's is what we would make.
func (k kind) like(s *set) bool {
	if s.verdicts {
		k.data = 0 // how large the kernel's verdicts are is its own business
	}
	return k == kind{s.flags, s.keyLen, s.dataLen, s.size}
}

// inventory is what is in a table.
type inventory struct {
	sets map[string]kind
	// chains have a hook if they are base chains.
	chains map[string]*hook
}

// inventory returns nil where there is no table. It lists names, never elements.
func (s *socket) inventory(l *layout) (out *inventory, err error) {
	err = nf.Again(func() error { out, err = s.takeInventory(l); return err })
	return out, err
}

func (s *socket) takeInventory(l *layout) (*inventory, error) {
	if _, err := s.table(l); errors.Is(err, unix.ENOENT) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	out := &inventory{sets: map[string]kind{}, chains: map[string]*hook{}}
	err := s.Ask(l.family, unix.NFT_MSG_GETSET, true, nf.AppendString(nil, unix.NFTA_SET_TABLE, l.table), func(m []byte) {
		table, name, k := setOf(m)
		if table == l.table {
			out.sets[name] = k
		}
	})
	if err != nil {
		return nil, err
	}
	err = s.Ask(l.family, unix.NFT_MSG_GETCHAIN, true, nf.AppendString(nil, unix.NFTA_CHAIN_TABLE, l.table), func(m []byte) {
		if table, name, at := chainOf(m); table == l.table {
			out.chains[name] = at
		}
	})
	return out, err
}

// open says whether packets come in.
func (i *inventory) open() bool {
	for _, at := range i.chains {
		if at != nil {
			return true
		}
	}
	return false
}

func chainOf(m []byte) (table, name string, at *hook) {
	for typ, v := range nf.Attributes(m) {
		switch typ {
		case unix.NFTA_CHAIN_TABLE:
			table = nf.Text(v)
		case unix.NFTA_CHAIN_NAME:
			name = nf.Text(v)
		case unix.NFTA_CHAIN_HOOK:
			at = &hook{}
			for typ, v := range nf.Attributes(v) {
				switch typ {
				case unix.NFTA_HOOK_HOOKNUM:
					at.point = binary.BigEndian.Uint32(v)
				case unix.NFTA_HOOK_PRIORITY:
					at.priority = int32(binary.BigEndian.Uint32(v))
				}
			}
		}
	}
	return table, name, at
}

func setOf(m []byte) (table, name string, k kind) {
	for typ, v := range nf.Attributes(m) {
		switch typ {
		case unix.NFTA_SET_TABLE:
			table = nf.Text(v)
		case unix.NFTA_SET_NAME:
			name = nf.Text(v)
		case unix.NFTA_SET_FLAGS:
			k.flags = binary.BigEndian.Uint32(v)
		case unix.NFTA_SET_KEY_LEN:
			k.key = binary.BigEndian.Uint32(v)
		case unix.NFTA_SET_DATA_LEN:
			k.data = binary.BigEndian.Uint32(v)
		case unix.NFTA_SET_DESC:
			for typ, v := range nf.Attributes(v) {
				if typ == unix.NFTA_SET_DESC_SIZE {
					k.size = binary.BigEndian.Uint32(v)
				}
			}
		}
	}
	return table, name, k
}

// inspect looks at a table: that it is the one we made, its chains have their rules, its maps their canaries.
func (s *socket) inspect(t *table, handle uint64, f *plan.Facts) error {
	is, err := s.table(t.layout)
	if err != nil {
		return err
	}
	if is != handle {
		return errors.New("it was made anew by somebody else")
	}
	// A chain is used by its rules and by whatever leads to it.
	uses := map[string]uint32{}
	for _, rule := range t.baseRules(f) {
		uses[rule.chain]++
	}
	delete(uses, rejectChain)
	uses[hairpinChain]++
	for one := range t.shapes {
		uses[one.chain()] = uint32(len(t.shape(&one))) + 1
	}
	for chain, want := range uses {
		got, err := s.chainUse(t.layout, chain)
		if err != nil {
			return fmt.Errorf("chain %s: %w", chain, err)
		}
		if got != want {
			return fmt.Errorf("chain %s is used %d times, not %d", chain, got, want)
		}
	}
	for _, c := range t.canaryKeys() {
		if err := s.find(c.set, c.key); err != nil {
			return fmt.Errorf("elements of %s: %w", c.set.name, err)
		}
	}
	return nil
}

func (s *socket) chainUse(l *layout, chain string) (use uint32, err error) {
	body := nf.AppendString(nf.AppendString(nil, unix.NFTA_CHAIN_TABLE, l.table), unix.NFTA_CHAIN_NAME, chain)
	err = s.Ask(l.family, unix.NFT_MSG_GETCHAIN, false, body, func(m []byte) {
		for typ, v := range nf.Attributes(m) {
			if typ == unix.NFTA_CHAIN_USE && len(v) == 4 {
				use = binary.BigEndian.Uint32(v)
			}
		}
	})
	return use, err
}

// find says whether an element is there.
func (s *socket) find(in *set, key []byte) error {
	body := nf.AppendString(nf.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, in.table), unix.NFTA_SET_ELEM_LIST_SET, in.name)
	body = nf.AppendNested(body, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(m []byte) []byte { return appendElement(m, key, nil, nil) })
	return s.Ask(in.family, unix.NFT_MSG_GETSETELEM, false, body, func([]byte) {})
}

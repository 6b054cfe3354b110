package zone

import (
	"hash/maphash"
	"sync/atomic"
)

// table maps names to what they answer. One goroutine writes; readers take no lock and never wait.
type table struct {
	seed  maphash.Seed
	slots atomic.Pointer[slots]
	used  int // slots that are not empty, graves counted
	live  int
}

// slots are tried one after the other from a name's own. The tags, a part of each name's hash, are looked through first:
// they lie close together, while each name is a walk through memory. Tag 0 is an empty slot, 1 a grave, whose name was
// removed and past which a search goes on.
type slots struct {
	tags  []atomic.Uint32
	names []atomic.Pointer[Name]
}

const (
	empty = 0
	grave = 1
)

func newSlots(n int) *slots {
	return &slots{make([]atomic.Uint32, n), make([]atomic.Pointer[Name], n)}
}

func newTable() *table {
	t := &table{seed: maphash.MakeSeed()}
	t.slots.Store(newSlots(64))
	return t
}

func tagOf(h uint64) uint32 { return uint32(h>>32) | 2 }

func (t *table) get(name []byte) *Name {
	h := maphash.Bytes(t.seed, name)
	tag, s := tagOf(h), t.slots.Load()
	mask := uint64(len(s.tags) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.tags[i].Load() {
		case empty:
			return nil
		case tag:
			// The name may have been removed, or replaced by another, since its tag was read.
			if n := s.names[i].Load(); n != nil && n.owner == string(name) {
				return n
			}
		}
	}
}

// put adds a name, or replaces it in one step.
func (t *table) put(n *Name) {
	h := maphash.String(t.seed, n.owner)
	s := t.slots.Load()
	if 2*(t.used+1) > len(s.tags) {
		s = t.rebuild()
	}
	tag, mask := tagOf(h), uint64(len(s.tags)-1)
	free := -1
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.tags[i].Load() {
		case empty:
			if free < 0 {
				free = int(i)
				t.used++
			}
			t.live++
			s.names[free].Store(n)
			s.tags[free].Store(tag)
			return
		case grave:
			if free < 0 {
				free = int(i)
			}
		case tag:
			if s.names[i].Load().owner == n.owner {
				s.names[i].Store(n)
				return
			}
		}
	}
}

func (t *table) remove(owner string) {
	h := maphash.String(t.seed, owner)
	s := t.slots.Load()
	tag, mask := tagOf(h), uint64(len(s.tags)-1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.tags[i].Load() {
		case empty:
			return
		case tag:
			if s.names[i].Load().owner == owner {
				s.tags[i].Store(grave)
				s.names[i].Store(nil)
				t.live--
				return
			}
		}
	}
}

// rebuild moves to a table with room, leaving the old one to its readers.
func (t *table) rebuild() *slots {
	size := 64
	for size < 3*(t.live+1) {
		size *= 2
	}
	s := newSlots(size)
	mask := uint64(size - 1)
	t.each(func(n *Name) bool {
		h := maphash.String(t.seed, n.owner)
		j := h & mask
		for s.tags[j].Load() != empty {
			j = (j + 1) & mask
		}
		s.names[j].Store(n)
		s.tags[j].Store(tagOf(h))
		return true
	})
	t.used = t.live
	t.slots.Store(s)
	return s
}

// each calls do for every name until it returns false.
func (t *table) each(do func(*Name) bool) {
	s := t.slots.Load()
	for i := range s.names {
		if n := s.names[i].Load(); n != nil && !do(n) {
			return
		}
	}
}

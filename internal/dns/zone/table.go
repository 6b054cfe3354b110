package zone

import "sync/atomic"

// table is a hash table with one writer, whose readers take no lock and never wait. It keeps no keys: the caller decides
// which of the values with a hash it wants, and there may be several.
type table[T any] struct {
	slots atomic.Pointer[slots[T]]
	used  int // slots that are not empty, tombstones included
	live  int
	// all lists the values, to rebuild the table with another size.
	all func(add func(hash uint64, v *T))
}

// slots are probed linearly. The tags, a part of each hash, are compared first: they are close together in memory, while the
// values are not. Tag 0 is an empty slot. Tag 1 is a tombstone: it keeps the slot of a removed value occupied, so that
// readers search on past it.
type slots[T any] struct {
	tags   []atomic.Uint32
	values []atomic.Pointer[T]
}

const (
	empty     = 0
	tombstone = 1
)

func newSlots[T any](n int) *slots[T] {
	return &slots[T]{make([]atomic.Uint32, n), make([]atomic.Pointer[T], n)}
}

// newTable returns an empty table. hash returns the hash of a value; it is nil if values have several.
func newTable[T any](hash func(*T) uint64) *table[T] {
	t := &table[T]{}
	t.all = func(add func(uint64, *T)) {
		t.each(func(v *T) bool { add(hash(v), v); return true })
	}
	t.slots.Store(newSlots[T](64))
	return t
}

func tagOf(h uint64) uint32 { return uint32(h>>32) | 2 }

// find returns the first value with the hash that matches. match may be called with values that have another hash.
func (t *table[T]) find(h uint64, match func(*T) bool) *T {
	tag, s := tagOf(h), t.slots.Load()
	mask := uint64(len(s.tags) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.tags[i].Load() {
		case empty:
			return nil
		case tag:
			// The value may have been removed, or replaced by another, since its tag was read.
			if v := s.values[i].Load(); v != nil && match(v) {
				return v
			}
		}
	}
}

// put adds a value, or atomically replaces another one.
func (t *table[T]) put(h uint64, v *T, replaces func(*T) bool) {
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
			s.values[free].Store(v)
			s.tags[free].Store(tag)
			return
		case tombstone:
			if free < 0 {
				free = int(i)
			}
		case tag:
			if replaces(s.values[i].Load()) {
				s.values[i].Store(v)
				return
			}
		}
	}
}

// remove removes the first value with the hash that matches.
func (t *table[T]) remove(h uint64, match func(*T) bool) {
	s := t.slots.Load()
	tag, mask := tagOf(h), uint64(len(s.tags)-1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.tags[i].Load() {
		case empty:
			return
		case tag:
			if match(s.values[i].Load()) {
				s.tags[i].Store(tombstone)
				s.values[i].Store(nil)
				t.live--
				return
			}
		}
	}
}

// rebuild replaces the slots by larger ones; readers of the old ones finish there.
func (t *table[T]) rebuild() *slots[T] {
	t.live = 0
	t.all(func(uint64, *T) { t.live++ })
	size := 64
	for size < 3*(t.live+1) {
		size *= 2
	}
	s := newSlots[T](size)
	mask := uint64(size - 1)
	t.all(func(h uint64, v *T) {
		i := h & mask
		for s.tags[i].Load() != empty {
			i = (i + 1) & mask
		}
		s.values[i].Store(v)
		s.tags[i].Store(tagOf(h))
	})
	t.used = t.live
	t.slots.Store(s)
	return s
}

// each calls do for every value until it returns false.
func (t *table[T]) each(do func(*T) bool) {
	s := t.slots.Load()
	for i := range s.values {
		if v := s.values[i].Load(); v != nil && !do(v) {
			return
		}
	}
}

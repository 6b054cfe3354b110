package zone

import "sync/atomic"

// table finds values by a hash. One goroutine writes; readers take no lock and never wait. It keeps no keys: who asks
// says which of the values with the hash is meant, and there may be several.
type table[T any] struct {
	slots atomic.Pointer[slots[T]]
	used  int // slots that are not empty, graves counted
	live  int
	// all lists what the table is to hold, for the move to one of another size.
	all func(add func(hash uint64, v *T))
}

// slots are tried one after the other from a hash's own. The tags, a part of each hash, are looked through first: they
// lie close together, while each value is a walk through memory. Tag 0 is an empty slot, 1 a grave, whose value was
// removed and past which a search goes on.
type slots[T any] struct {
	tags   []atomic.Uint32
	values []atomic.Pointer[T]
}

const (
	empty = 0
	grave = 1
)

func newSlots[T any](n int) *slots[T] {
	return &slots[T]{make([]atomic.Uint32, n), make([]atomic.Pointer[T], n)}
}

// newTable returns an empty table. hash is that of a value, for tables where each value has one.
func newTable[T any](hash func(*T) uint64) *table[T] {
	t := &table[T]{}
	t.all = func(add func(uint64, *T)) {
		t.each(func(v *T) bool { add(hash(v), v); return true })
	}
	t.slots.Store(newSlots[T](64))
	return t
}

func tagOf(h uint64) uint32 { return uint32(h>>32) | 2 }

// find returns the first value with the hash that match wants. Some of those it is shown may have another hash.
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

// put adds a value, or sets it in the place of the one that it replaces, in one step.
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
		case grave:
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

// remove takes out the first value with the hash that match wants.
func (t *table[T]) remove(h uint64, match func(*T) bool) {
	s := t.slots.Load()
	tag, mask := tagOf(h), uint64(len(s.tags)-1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.tags[i].Load() {
		case empty:
			return
		case tag:
			if match(s.values[i].Load()) {
				s.tags[i].Store(grave)
				s.values[i].Store(nil)
				t.live--
				return
			}
		}
	}
}

// rebuild moves to a table with room, leaving the old one to its readers.
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

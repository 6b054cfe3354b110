package alloc

import (
	"math/bits"
	"math/rand/v2"
)

// space is a row of numbered places, each free or occupied, of which a free one can be picked at random at a cost that
// hardly grows as the row fills. Only words with an occupied place take memory, so that a row may be 2^64 long.
type space struct {
	size uint64
	// reserve places at the beginning are picked last: people who choose for themselves choose small numbers.
	reserve uint64
	words   map[uint64]uint64
}

func newSpace(size, reserve uint64) *space {
	return &space{size: size, reserve: reserve, words: map[uint64]uint64{}}
}

func (s *space) occupy(place uint64) { s.words[place/64] |= 1 << (place % 64) }

func (s *space) leave(place uint64) {
	word := s.words[place/64] &^ (1 << (place % 64))
	if word == 0 {
		delete(s.words, place/64)
		return
	}
	s.words[place/64] = word
}

// pick gives a free place, without occupying it.
func (s *space) pick(random *rand.Rand) (uint64, bool) {
	if place, ok := s.pickBetween(s.reserve, s.size, random); ok {
		return place, true
	}
	return s.pickBetween(0, s.reserve, random)
}

// pickBetween looks for a free place in [low, high) from a random one on, and around.
func (s *space) pickBetween(low, high uint64, random *rand.Rand) (uint64, bool) {
	if low >= high {
		return 0, false
	}
	start := low + random.Uint64N(high-low)
	if place, ok := s.firstFree(start, high); ok {
		return place, true
	}
	return s.firstFree(low, start)
}

// firstFree is the first free place in [low, high), found a word at a time.
func (s *space) firstFree(low, high uint64) (uint64, bool) {
	for place := low; place < high; place = (place/64 + 1) * 64 {
		free := ^s.words[place/64] >> (place % 64)
		if free == 0 {
			continue
		}
		if place += uint64(bits.TrailingZeros64(free)); place < high {
			return place, true
		}
		return 0, false
	}
	return 0, false
}

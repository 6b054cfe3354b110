package process

import "testing"

func TestPercentOf(t *testing.T) {
	for live, want := range map[uint64]int{0: 800, 1 << 20: 800, 8 << 20: 400, 32 << 20: 100, 1 << 30: 100} {
		if got := percentOf(live); got != want {
			t.Errorf("%d bytes in use: %d %%, want %d %%", live, got, want)
		}
	}
}

// TestQuiet: memory is given back once, some seconds after the last time that much was allocated, if there is something to give.
func TestQuiet(t *testing.T) {
	const mb = 1 << 20
	var q quiet
	allocated := uint64(0)
	for i, c := range []struct {
		more, live, objects uint64
		want                bool
	}{
		{50 * mb, 10 * mb, 60 * mb, false},
		{0, 10 * mb, 60 * mb, false},
		{quietBytes, 10 * mb, 60 * mb, false},
		{0, 10 * mb, 60 * mb, true},
		{0, 10 * mb, 60 * mb, false}, // once is enough
		{0, 10 * mb, 60 * mb, false},
		{mb, 10 * mb, 12 * mb, false},
		{0, 10 * mb, 12 * mb, false},
		{0, 10 * mb, 12 * mb, false},
		{0, 10 * mb, 12 * mb, false}, // not worth it
		{0, 10 * mb, 60 * mb, true},
	} {
		allocated += c.more
		if got := q.now(usage{live: c.live, allocated: allocated, objects: c.objects, free: mb}); got != c.want {
			t.Errorf("second %d: %v, want %v", i, got, c.want)
		}
	}
}

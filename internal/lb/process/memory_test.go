package process

import "testing"

func TestPercentOf(t *testing.T) {
	for live, want := range map[uint64]int{0: 800, 1 << 20: 800, 8 << 20: 400, 32 << 20: 100, 1 << 30: 100} {
		if got := percentOf(live); got != want {
			t.Errorf("%d bytes in use: %d %%, want %d %%", live, got, want)
		}
	}
}

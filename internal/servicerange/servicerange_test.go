package servicerange

import (
	"net/netip"
	"testing"
)

func TestCovered(t *testing.T) {
	four, six := netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("fd00:1::/112")
	for text, want := range map[string]bool{
		"10.1.0.0": false, "10.1.0.1": true, "10.1.0.254": true, "10.1.0.255": false, "10.1.1.1": false,
		"fd00:1::": false, "fd00:1::1": true, "fd00:1::ffff": true, "fd00:1::1:0": false,
	} {
		if got := Covered([]netip.Prefix{four, six}, netip.MustParseAddr(text)); got != want {
			t.Errorf("%s covered: %v, want %v", text, got, want)
		}
	}
}

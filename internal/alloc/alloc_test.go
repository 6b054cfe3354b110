package alloc

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func newAllocator(t interface{ Helper() }, firstPort, lastPort uint16, prefixes ...string) (*Allocator, *time.Time) {
	t.Helper()
	now := time.Unix(1_700_000_000, 0)
	b := New(firstPort, lastPort, rand.New(rand.NewPCG(1, 2)), func() time.Time { return now })
	var ranges []netip.Prefix
	for _, p := range prefixes {
		ranges = append(ranges, netip.MustParsePrefix(p))
	}
	b.SetRanges(ranges)
	return b, &now
}

// A range is handed out to its last address, the upper part first, none twice, and neither the network's own address
// nor the broadcast address ever.
func TestEveryAddressOnceUpperPartFirst(t *testing.T) {
	b, _ := newAllocator(t, 30000, 30009, "10.0.0.0/24")
	h := b.Begin(false)
	seen := map[netip.Addr]bool{}
	for i := range 254 {
		addr, err := h.Address(false)
		if err != nil {
			t.Fatalf("address %d: %v", i, err)
		}
		if seen[addr] {
			t.Fatalf("%s was handed out twice", addr)
		}
		seen[addr] = true
		low := addr.Less(netip.MustParseAddr("10.0.0.17"))
		if i < 254-16 && low {
			t.Fatalf("%s is of the lower part and was handed out as number %d, before the upper part was used up", addr, i)
		}
	}
	for _, never := range []string{"10.0.0.0", "10.0.0.255"} {
		if seen[netip.MustParseAddr(never)] {
			t.Errorf("%s was handed out", never)
		}
	}
	var full *FullError
	if _, err := h.Address(false); !errors.As(err, &full) {
		t.Errorf("a full range answers %v", err)
	}
}

// What one request has reserved no other gets; what it releases is free again.
func TestReservation(t *testing.T) {
	b, now := newAllocator(t, 30000, 30000, "10.0.0.0/30")
	first := b.Begin(false)
	port, err := first.Port()
	if err != nil || port != 30000 {
		t.Fatalf("got %d, %v", port, err)
	}
	second := b.Begin(false)
	if got, err := second.Port(); err == nil {
		t.Fatalf("a second request got %d while the first had reserved the only port", got)
	}
	first.Release()
	if _, err := second.Port(); err != nil {
		t.Fatalf("the port is not free after it was released: %v", err)
	}
	second.Commit()
	if _, err := b.Begin(false).Port(); err == nil {
		t.Fatal("a stored claim that the allocator has not seen yet was handed out")
	}
	// It was stored and removed again before the allocator saw either.
	*now = now.Add(commitGrace + time.Second)
	if _, err := b.Begin(false).Port(); err != nil {
		t.Fatalf("a committed claim does not expire: %v", err)
	}
}

// A stored claim outlives the reservation through which it was made.
func TestStoredWhileReserved(t *testing.T) {
	b, now := newAllocator(t, 30000, 30000)
	h := b.Begin(false)
	port, _ := h.Port()
	b.Taken(Claim{Port: port})
	h.Release()
	*now = now.Add(time.Hour)
	if _, err := b.Begin(false).Port(); err == nil {
		t.Fatal("a claim was forgotten because the request that made it failed afterwards")
	}
	b.Freed(Claim{Port: port})
	if _, err := b.Begin(false).Port(); err != nil {
		t.Fatalf("a freed claim is not free: %v", err)
	}
}

func TestRangesComeAndGo(t *testing.T) {
	b, _ := newAllocator(t, 1, 1, "10.0.0.0/30")
	b.Taken(Claim{Addr: netip.MustParseAddr("10.1.0.1")})
	b.SetRanges([]netip.Prefix{netip.MustParsePrefix("10.1.0.0/30")})
	addr, err := b.Begin(false).Address(false)
	if err != nil || addr.String() != "10.1.0.2" {
		t.Errorf("got %s, %v: a new range must know what is taken in it", addr, err)
	}
	var outside *OutsideError
	if err := b.Begin(false).CheckAddress(netip.MustParseAddr("10.0.0.1")); !errors.As(err, &outside) {
		t.Errorf("an address of a range that was removed: %v", err)
	}
	if _, err := b.Begin(false).Address(true); err == nil {
		t.Error("an IPv6 address came from an IPv4 range")
	}
}

func TestCheckAddress(t *testing.T) {
	b, _ := newAllocator(t, 1, 1, "10.0.0.0/29", "fd00::/112")
	for addr, ok := range map[string]bool{
		"10.0.0.0": false, "10.0.0.1": true, "10.0.0.6": true, "10.0.0.7": false, "10.0.0.8": false,
		"fd00::": false, "fd00::1": true, "fd00::ffff": true, "fd00::1:0": false,
	} {
		if err := b.Begin(false).CheckAddress(netip.MustParseAddr(addr)); (err == nil) != ok {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// The last address of a range that lies within another one is one like others: whoever got it by chance can ask for it again.
func TestCheckAddressOfOverlappingRanges(t *testing.T) {
	const edge = "10.0.0.15"
	for _, prefixes := range [][]string{{"10.0.0.0/28", "10.0.0.0/24"}, {"10.0.0.0/24", "10.0.0.0/28"}} {
		b, _ := newAllocator(t, 30000, 30001, prefixes...)
		h := b.Begin(false)
		got := false
		for range 254 {
			addr, err := h.Address(false)
			if err != nil {
				t.Fatal(err)
			}
			got = got || addr.String() == edge
		}
		if !got {
			t.Errorf("%v: %s was not handed out", prefixes, edge)
		}
		for addr, ok := range map[string]bool{edge: true, "10.0.0.0": false, "10.0.0.255": false, "10.0.1.0": false} {
			if err := h.CheckAddress(netip.MustParseAddr(addr)); (err == nil) != ok {
				t.Errorf("%v: %s: %v", prefixes, addr, err)
			}
		}
	}
}

// What is in use is never more than what there is: claims that a range has no place for don't count.
func TestInUse(t *testing.T) {
	b, _ := newAllocator(t, 30000, 30001)
	for _, addr := range []string{"10.9.9.8", "10.9.9.9", "10.9.9.11", "fd00::", "fd00::1"} {
		b.Taken(Claim{Addr: netip.MustParseAddr(addr)})
	}
	for _, c := range []struct {
		prefix     string
		used, size uint64
	}{{"10.9.9.9/32", 0, 0}, {"10.9.9.8/30", 1, 2}, {"10.9.9.0/24", 3, 254}, {"fd00::/127", 1, 1}, {"fd00::/64", 1, 1<<64 - 2}} {
		if used, size := b.InUse(netip.MustParsePrefix(c.prefix)); used != c.used || size != c.size {
			t.Errorf("%s: %d of %d in use, want %d of %d", c.prefix, used, size, c.used, c.size)
		}
	}
	for _, port := range []uint16{29999, 30001, 30002, 32000} { // the range was wider once
		b.Taken(Claim{Port: port})
	}
	if used, size := b.PortsInUse(); used != 1 || size != 2 {
		t.Errorf("%d of %d ports are in use, want 1 of 2", used, size)
	}
}

// A range of 2^64 addresses costs no more than what is taken of it.
func TestHugeRange(t *testing.T) {
	b, _ := newAllocator(t, 1, 1, "fd00::/64")
	h := b.Begin(false)
	for range 1000 {
		if _, err := h.Address(true); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAllocatorAgainstModel plays random requests and events against a plain set: what the allocator hands out is never in it, and
// a range is called full only when it is.
func TestAllocatorAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, _ := newAllocator(t, 100, 140)
		taken := map[uint16]bool{}
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"create", "fail", "elsewhere", "delete", "relist"}).Draw(t, "step") {
			case "create", "fail":
				h := b.Begin(false)
				port, err := h.Port()
				if err != nil {
					if len(taken) < 41 {
						t.Fatalf("%v, with %d of 41 taken", err, len(taken))
					}
					continue
				}
				if taken[port] {
					t.Fatalf("%d was handed out twice", port)
				}
				if rapid.Bool().Draw(t, "stored") {
					taken[port] = true
					b.Taken(Claim{Port: port})
					h.Commit()
				} else {
					h.Release()
				}
			case "elsewhere":
				port := uint16(rapid.IntRange(100, 140).Draw(t, "port"))
				taken[port] = true
				b.Taken(Claim{Port: port})
			case "delete":
				port := uint16(rapid.IntRange(100, 140).Draw(t, "port"))
				delete(taken, port)
				b.Freed(Claim{Port: port})
			case "relist":
				var all []Claim
				for port := range taken {
					all = append(all, Claim{Port: port})
				}
				b.Reset(all)
			}
			if used, size := b.PortsInUse(); used != uint64(len(taken)) || size != 41 {
				t.Fatalf("%d of %d in use, want %d of 41", used, size, len(taken))
			}
		}
	})
}

func BenchmarkChooseInAnAlmostFullRange(b *testing.B) {
	allocator, _ := newAllocator(b, 1, 1, "10.96.0.0/16")
	fill := allocator.Begin(false)
	for range 65000 {
		if _, err := fill.Address(false); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		h := allocator.Begin(false)
		if _, err := h.Address(false); err != nil {
			b.Fatal(err)
		}
		h.Release()
	}
}

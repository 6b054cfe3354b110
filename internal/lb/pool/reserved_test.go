package pool

import (
	"net/netip"
	"strings"
	"testing"
)

// TestReservedRanges: no address of a range that is others' is given, though it is free; who has one keeps it, and who gets none hears why.
func TestReservedRanges(t *testing.T) {
	set := pools(t, "10.96.255.254-10.97.0.2")
	table := NewTable()
	give := func(name string, change ...func(*Request)) (string, []string, string) {
		r := request(name)
		for _, f := range change {
			f(r)
		}
		got, why := table.Assign(set, r)
		if why != nil {
			return "", got.Notes, why.Message
		}
		return got.Addresses[0].String(), got.Notes, ""
	}
	if got, _, why := give("old"); got != "10.96.255.254" {
		t.Fatalf("%s %s", got, why)
	}
	table.ReservedRanges = []Reserved{{netip.MustParsePrefix("10.96.0.0/16"), "the Service range"}, {netip.MustParsePrefix("10.97.0.0/31"), "the Pod range of Node a"}}
	table = table.Clone()
	if got, _, why := give("old"); got != "10.96.255.254" {
		t.Errorf("who has one: %s %s", got, why)
	}
	got, notes, why := give("asks", func(r *Request) {
		r.Addresses, r.AddressesFrom = []netip.Addr{netip.MustParseAddr("10.97.0.1")}, "spec.loadBalancerIP"
	})
	if got != "10.97.0.2" || len(notes) != 1 || !strings.Contains(notes[0], "10.97.0.1 is ignored, and another address given: it is in the Pod range of Node a 10.97.0.0/31") {
		t.Errorf("who asks for one: %s %v %s", got, notes, why)
	}
	const want = "no IPv4 address: all addresses of pool default are in use or not given: 10.96.255.254-10.97.0.2 overlaps the Service range 10.96.0.0/16"
	if got, _, why := give("late"); got != "" || why != want {
		t.Errorf("the rest is others': %s %s", got, why)
	}
	// A range up to the last address of all ends the search.
	set = pools(t, "255.255.255.0-255.255.255.255")
	table.ReservedRanges = []Reserved{{netip.MustParsePrefix("255.0.0.0/8"), "the Service range"}}
	if got, _, why := give("last"); got != "" || !strings.Contains(why, "overlaps the Service range 255.0.0.0/8") {
		t.Errorf("%s %s", got, why)
	}
}

// TestApart: which of which pool's ranges is others' is said.
func TestApart(t *testing.T) {
	reserved := []Reserved{{netip.MustParsePrefix("10.96.0.0/16"), "the Service range"}, {netip.MustParsePrefix("fd00:244:1::/64"), "the Pod range of Node a"}}
	for text, want := range map[string]string{
		"- {name: a, addresses: [10.95.0.0/16, 10.97.0.0/16]}":                                    "",
		"- {name: a, addresses: [10.0.0.0/8]}":                                                    "pools[0].addresses[0]: 10.0.0.0-10.255.255.255 overlaps the Service range 10.96.0.0/16: a pool needs addresses of its own",
		"- {name: a, addresses: [192.0.2.1]}\n- {name: b, addresses: [192.0.2.2, fd00:244:1::5]}": "pools[1].addresses[1]: fd00:244:1::5 overlaps the Pod range of Node a fd00:244:1::/64: a pool needs addresses of its own",
	} {
		list, err := ParseYAML("test", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := Apart(list, reserved); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

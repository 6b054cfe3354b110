package lb

import (
	"net"
	"net/netip"
	"testing"
)

// TestMachineAddresses: the addresses of this machine's interfaces are known.
func TestMachineAddresses(t *testing.T) {
	got := machineAddresses()
	if got[netip.MustParseAddr("127.0.0.1")] == "" {
		t.Errorf("127.0.0.1 is missing: %v", got)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		prefix := netip.MustParsePrefix(a.String())
		if found := got[prefix.Addr()] != ""; found == prefix.IsSingleIP() {
			t.Errorf("%s: %v", prefix, found)
		}
	}
}

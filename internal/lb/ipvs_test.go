package lb

import (
	"maps"
	"net/netip"
	"testing"
)

// TestParseIPVS: the kernel's table, as Linux 6.12 prints it.
func TestParseIPVS(t *testing.T) {
	got := parseIPVS(`IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  C0A864F0:0050 rr persistent 10800 FFFFFFFF
  -> 0AF40102:24A0      Masq    1      0          0         
UDP  0A60000A:0035 rr 
TCP  [fd00:0100:0000:0000:0000:0000:0000:00f0]:01BB rr 
  -> [fd00:0244:0000:0000:0000:0000:0000:0002]:24A0      Masq    1      0          0         
FWM  00000001 rr
TCP  C0A864F0 rr
TCP  C0A864:0050 rr
`)
	want := map[netip.AddrPort]bool{netip.MustParseAddrPort("192.168.100.240:80"): true, netip.MustParseAddrPort("[fd00:100::f0]:443"): true}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestProxyMarks: Portal's proxy has IPVS balance by marks, other programs may have marks of their own.
func TestProxyMarks(t *testing.T) {
	for text, want := range map[string]bool{
		"TCP  0A60000A:0035 rr\nFWM  50000001 rr\n  -> C0A86463:0050      Masq    1      0          0\n": true,
		"FWM  00000001 rr\n":      false,
		"FWM  5 rr\n":             false,
		"FWM\n":                   false,
		"TCP  50000001:0050 rr\n": false,
	} {
		if got := hasProxyMarks(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

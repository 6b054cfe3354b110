package userspace

import (
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// TestReturnWithoutIPv6: where IPv6 is turned off, removing the way back of answers finds nothing, and that is no error.
func TestReturnWithoutIPv6(t *testing.T) {
	alone(t)
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if err := openReturn(intent.IPv4); err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if err := closeReturn(f); err != nil {
			t.Errorf("IPv%d: %v", f, err)
		}
	}
	// A kernel that was booted without IPv6 answers as this one does about a family that it has not.
	rule := returnRule(intent.IPv6)
	rule.Family = unix.AF_IPX
	del := nl.NewNetlinkRequest(unix.RTM_DELROUTE, unix.NLM_F_ACK)
	route := nl.NewRtDelMsg()
	route.Family = unix.AF_IPX
	del.AddData(route)
	_, err := del.Execute(unix.NETLINK_ROUTE, 0)
	for what, err := range map[string]error{"rule": netlink.RuleDel(rule), "route": err} {
		if err == nil || !absent(err) {
			t.Errorf("remove a %s: %v", what, err)
		}
	}
	if absent(unix.EPERM) {
		t.Error("an error that says something else counts")
	}
}

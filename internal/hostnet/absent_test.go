package hostnet

import (
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"portal/internal/nettest"
)

// TestAbsent: a kernel that was booted without IPv6 answers as this one does about a family that it does not have.
func TestAbsent(t *testing.T) {
	nettest.InNamespace(t, func() {
		_, rules := netlink.RuleList(unix.AF_IPX)
		del := nl.NewNetlinkRequest(unix.RTM_DELROUTE, unix.NLM_F_ACK)
		msg := nl.NewRtDelMsg()
		msg.Family = unix.AF_IPX
		del.AddData(msg)
		_, route := del.Execute(unix.NETLINK_ROUTE, 0)
		for what, err := range map[string]error{"list rules": rules, "remove a route": route} {
			if err == nil || !Absent(err) {
				t.Errorf("%s: %v", what, err)
			}
		}
	})
	if Absent(nil) || Absent(unix.EPERM) || Absent(unix.EINVAL) {
		t.Error("an error that says something else counts")
	}
}

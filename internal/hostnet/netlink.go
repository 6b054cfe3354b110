package hostnet

import (
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// netlinkTimeout is how long the kernel may take to answer, and to go on with a list.
const netlinkTimeout = 10 * time.Second

// OpenNetlink opens a netlink socket that is kept, in a network namespace; netns.None() is the thread's own. Its requests have a
// deadline, which those of netlink.NewHandle have not.
func OpenNetlink(ns netns.NsHandle, protocol int) (*netlink.Handle, error) {
	return openNetlink(ns, protocol, netlinkTimeout)
}

func openNetlink(ns netns.NsHandle, protocol int, timeout time.Duration) (*netlink.Handle, error) {
	h, err := netlink.NewHandleAt(ns, protocol)
	if err != nil {
		return nil, err
	}
	if err := h.SetSocketTimeout(timeout); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

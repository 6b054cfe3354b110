package peers

import (
	"context"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/node/network"
)

// Changes receives when links, addresses or this package's own routes may have changed, until ctx ends: see hostnet.Watch. Pods' own
// interfaces come and go and don't matter.
func Changes(ctx context.Context) <-chan struct{} { return hostnet.Watch(ctx, interest) }

var interest = hostnet.Interest{
	Link: func(u netlink.LinkUpdate) bool {
		return u.Link == nil || !strings.HasPrefix(u.Link.Attrs().Name, network.InterfacePrefix)
	},
	Address: func(netlink.AddrUpdate) bool { return true },
	Route:   func(u netlink.RouteUpdate) bool { return u.Type == unix.RTM_DELROUTE && u.Route.Protocol == protocol },
}

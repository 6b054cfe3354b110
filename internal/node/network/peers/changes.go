package peers

import (
	"context"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/node/network"
)

// Changes receives when links, addresses or this package's own routes may have changed, until ctx ends. Should the kernel lose notices,
// that is taken for a change.
func Changes(ctx context.Context) <-chan struct{} {
	out := make(chan struct{}, 1)
	go func() {
		for ctx.Err() == nil {
			follow(ctx, out)
			notify(out)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}()
	return out
}

func follow(ctx context.Context, out chan<- struct{}) {
	links, linksDone := make(chan netlink.LinkUpdate, 16), make(chan struct{})
	if err := netlink.LinkSubscribe(links, linksDone); err != nil {
		return
	}
	defer drain(links, linksDone)
	addrs, addrsDone := make(chan netlink.AddrUpdate, 16), make(chan struct{})
	if err := netlink.AddrSubscribe(addrs, addrsDone); err != nil {
		return
	}
	defer drain(addrs, addrsDone)
	routes, routesDone := make(chan netlink.RouteUpdate, 16), make(chan struct{})
	if err := netlink.RouteSubscribe(routes, routesDone); err != nil {
		return
	}
	defer drain(routes, routesDone)
	notify(out) // nobody was told of what changed until now
	for {
		select {
		case <-ctx.Done():
			return
		case u, open := <-links:
			if !open {
				return
			}
			// Pods come and go.
			if u.Link == nil || !strings.HasPrefix(u.Link.Attrs().Name, network.InterfacePrefix) {
				notify(out)
			}
		case _, open := <-addrs:
			if !open {
				return
			}
			notify(out)
		case u, open := <-routes:
			if !open {
				return
			}
			if u.Type == unix.RTM_DELROUTE && u.Route.Protocol == protocol {
				notify(out)
			}
		}
	}
}

// drain ends a subscription, which must not be stuck with a last notice.
func drain[T any](updates <-chan T, done chan struct{}) {
	close(done)
	for range updates {
	}
}

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

package proxy

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// LocalAddrs knows the addresses of the node's interfaces.
type LocalAddrs interface {
	List() ([]netip.Addr, error)
	// Changes receives when they may have changed, until the context ends.
	Changes(context.Context) <-chan struct{}
}

// Interfaces are the addresses of the network namespace that the process is in.
type Interfaces struct{}

// List returns all addresses in the order of their interfaces.
func (Interfaces) List() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the addresses of this machine: %w", err)
	}
	var out []netip.Addr
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr().Unmap())
		}
	}
	return out, nil
}

// Changes follows the kernel's notices. Should it lose some (it says so when too many come at once), it takes that for a
// change and subscribes anew.
func (i Interfaces) Changes(ctx context.Context) <-chan struct{} {
	out := make(chan struct{}, 1)
	go func() {
		for ctx.Err() == nil {
			i.follow(ctx, out)
			tell(out)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}()
	return out
}

func (Interfaces) follow(ctx context.Context, out chan<- struct{}) {
	updates, done := make(chan netlink.AddrUpdate, 16), make(chan struct{})
	if err := netlink.AddrSubscribe(updates, done); err != nil {
		return
	}
	defer func() {
		close(done)
		for range updates { // so that the subscription isn't stuck with a last notice
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case _, open := <-updates:
			if !open {
				return
			}
			tell(out)
		}
	}
}

func tell(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

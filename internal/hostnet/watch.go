package hostnet

import (
	"context"
	"time"

	"github.com/vishvananda/netlink"
)

// Interest is which of the kernel's notices matter. Those of a kind without a function are not asked for.
type Interest struct {
	Link    func(netlink.LinkUpdate) bool
	Address func(netlink.AddrUpdate) bool
	Route   func(netlink.RouteUpdate) bool
}

// Watch receives when something of interest may have changed in the network namespace that the process is in, until the context ends.
// Should the kernel lose notices (it says so when too many come at once), that is taken for a change. The first receipt needs none: what
// was listed before the kernel sends notices may be out of date.
func Watch(ctx context.Context, of Interest) <-chan struct{} {
	out := make(chan struct{}, 1)
	go func() {
		for ctx.Err() == nil {
			of.Follow(ctx, out)
			notify(out)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}()
	return out
}

// Follow passes notices of the calling thread's network namespace on, until the context ends or a subscription does.
func (of Interest) Follow(ctx context.Context, out chan<- struct{}) {
	links, done, err := subscribe(netlink.LinkSubscribe, of.Link)
	defer drain(links, done)
	if err != nil {
		return
	}
	addrs, done, err := subscribe(netlink.AddrSubscribe, of.Address)
	defer drain(addrs, done)
	if err != nil {
		return
	}
	routes, done, err := subscribe(netlink.RouteSubscribe, of.Route)
	defer drain(routes, done)
	if err != nil {
		return
	}
	notify(out) // what changed until now came without a notice
	for open := true; open; {
		var matters bool
		select {
		case <-ctx.Done():
			return
		case u, ok := <-links:
			open, matters = ok, ok && of.Link(u)
		case u, ok := <-addrs:
			open, matters = ok, ok && of.Address(u)
		case u, ok := <-routes:
			open, matters = ok, ok && of.Route(u)
		}
		if matters {
			notify(out)
		}
	}
}

// subscribe asks the kernel for the notices of one kind, if they are of interest. Without, the channels are nil: nothing comes.
func subscribe[T any](to func(chan<- T, <-chan struct{}) error, interest func(T) bool) (updates chan T, done chan struct{}, err error) {
	if interest == nil {
		return nil, nil, nil
	}
	updates, done = make(chan T, 16), make(chan struct{})
	if err := to(updates, done); err != nil {
		return nil, nil, err
	}
	return updates, done, nil
}

// drain ends a subscription, which must not be stuck with a last notice.
func drain[T any](updates <-chan T, done chan struct{}) {
	if updates == nil {
		return
	}
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

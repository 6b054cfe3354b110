package network

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// Sweep detaches all Pods but those that are kept: what an earlier process left in the middle.
func (n *Bridge) Sweep(ctx context.Context, keep map[string]bool) error {
	all, err := n.addresses.all()
	if err != nil {
		return err
	}
	var errs []error
	names := map[string]bool{}
	for pod := range keep {
		names[HostInterface(pod)] = true
	}
	for pod := range all {
		if !keep[pod] {
			errs = append(errs, n.Detach(ctx, pod))
		}
	}
	links, err := podLinks(n.Bridge)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, l := range links {
		if !names[l.Attrs().Name] {
			errs = append(errs, netlink.LinkDel(l))
		}
	}
	return errors.Join(errs...)
}

// podLinks are the interfaces of Pods that a bridge has: none if there is no such bridge.
func podLinks(bridge string) (out []netlink.Link, err error) {
	master, err := netlink.LinkByName(bridge)
	if _, missing := err.(netlink.LinkNotFoundError); missing {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	links, err := netlink.LinkList()
	for _, l := range links {
		if a := l.Attrs(); a.MasterIndex == master.Attrs().Index && strings.HasPrefix(a.Name, InterfacePrefix) {
			out = append(out, l)
		}
	}
	return out, err
}

// Attached is how many Pods are connected to a bridge, whoever runs them.
func Attached(bridge string) (int, error) {
	links, err := podLinks(bridge)
	return len(links), err
}

// Remove takes all of it away again: bridge and interfaces. Addresses are given back.
func (n *Bridge) Remove() error {
	if link, err := netlink.LinkByName(n.Bridge); err == nil && link.Type() != "bridge" {
		return fmt.Errorf("the interface %s is a %s, not a bridge", n.Bridge, link.Type())
	}
	errs := []error{n.Sweep(context.Background(), nil)}
	if link, err := netlink.LinkByName(n.Bridge); err == nil {
		errs = append(errs, netlink.LinkDel(link))
	}
	return errors.Join(append(errs, n.guard.Remove())...)
}

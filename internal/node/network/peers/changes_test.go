package peers

import (
	"context"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// TestChanges: links and addresses that come and go are noticed, and routes of ours that somebody removes; Pods' interfaces are not.
func TestChanges(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	made := make(chan netns.NsHandle)
	out, ended := make(chan struct{}, 1), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the thread ends with the goroutine
		ns, err := netns.New()
		if err != nil {
			t.Error(err)
		}
		// An interface's own IPv6 address becomes valid a second or two after it is up, which is a change at any moment.
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0); err != nil {
			t.Error(err)
		}
		made <- ns
		interest.Follow(ctx, out)
	}()
	ns := <-made
	defer ns.Close()
	defer func() { cancel(); <-ended }()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	told := func() bool {
		select {
		case <-out:
			return true
		case <-time.After(30 * time.Second):
			return false
		}
	}
	quiet := func() {
		for {
			select {
			case <-out:
			case <-time.After(200 * time.Millisecond):
				return
			}
		}
	}
	if !told() {
		t.Fatal("the beginning is not told")
	}
	quiet()
	var lan netlink.Link
	for _, step := range []struct {
		what string
		do   func() error
		want bool
	}{
		{"a link", func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "lan"
			lan = &netlink.Bridge{LinkAttrs: attrs}
			return h.LinkAdd(lan)
		}, true},
		{"up", func() error { return h.LinkSetUp(lan) }, true},
		{"an address", func() error {
			a, _ := netlink.ParseAddr("192.0.2.1/24")
			return h.AddrAdd(lan, a)
		}, true},
		{"our route", func() error {
			return h.RouteAdd(&netlink.Route{Dst: ipNet(prefixes("10.0.0.0/24")[0]), Gw: addrs("192.0.2.2")[0].AsSlice(), Protocol: protocol})
		}, false},
		{"our route removed", func() error {
			return h.RouteDel(&netlink.Route{Dst: ipNet(prefixes("10.0.0.0/24")[0])})
		}, true},
		{"a Pod", func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "pod0123"
			return h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
		}, false},
		{"down", func() error { return h.LinkSetDown(lan) }, true},
	} {
		quiet()
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		if step.want && !told() {
			t.Errorf("%s is not told", step.what)
		}
		if !step.want {
			select {
			case <-out:
				t.Errorf("%s is told", step.what)
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

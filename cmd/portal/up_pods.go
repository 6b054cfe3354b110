package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/node"
	"portal/internal/node/network"
	"portal/internal/reports"
	"portal/internal/server"
)

// upPods is the node of `portal up`.
type upPods struct {
	cidrs []netip.Prefix
	note  string // why there is none
	dns   bool   // it serves names where its Pods reach them
}

func (p upPods) String() string {
	if p.note != "" {
		return p.note
	}
	var out []string
	for _, c := range p.cidrs {
		out = append(out, c.String())
	}
	return strings.Join(out, ", ")
}

// upPodCIDRs are the ranges of Pods' addresses that `portal up` uses by default.
func upPodCIDRs() []string {
	out := []string{"10.244.0.0/16"}
	if len(kernelFamilies()) > 1 {
		out = append(out, "fd00:244::/56")
	}
	return out
}

// claimPods finds out whether this process may run Pods, and by which addresses they reach this machine.
func (o *upOptions) claimPods(ctx context.Context, p *parts, waiting func(instance.Holder)) (addrs []netip.Addr, note string) {
	if o.pods == "none" {
		return nil, "none"
	}
	if err := mayRunPods(); err != nil {
		return nil, "none: needs root"
	}
	addrs, err := ownAddresses()
	if err != nil {
		return nil, "none: this machine has no address by which others reach it"
	}
	l, err := instance.Acquire(ctx, instance.Node+network.DefaultBridge, handover, waiting)
	if err != nil {
		return nil, "none: " + short(err)
	}
	p.locks = append(p.locks, l)
	return addrs, ""
}

// streamPort is where nodes serve logs, exec and port-forward.
const streamPort = 10250

// atLoopback leads to this machine's own node, which serves at loopback: nothing else should reach it.
func atLoopback(own []netip.Addr) func(string) string {
	return func(address string) string {
		if a, err := netip.ParseAddrPort(address); err == nil && a.Port() == streamPort && slices.Contains(own, a.Addr().Unmap()) {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), streamPort).String()
		}
		return address
	}
}

// podsStart is how long `portal up` waits for its node before it says that it is up.
const podsStart = 20 * time.Second

// startPods runs the node agent on this machine. Its failure leaves the rest running. When the context ends, so do the Pods, and what
// the node changed is as it was before.
func (o *upOptions) startPods(cmd *cobra.Command, log *slog.Logger, info server.Info, may *parts, addrs []netip.Addr, beside *sync.WaitGroup) upPods {
	fail := func(err error) upPods { return upPods{note: "none: " + err.Error()} }
	machine, err := machineName("")
	if err == nil {
		err = identity.ValidMachine(machine)
	}
	if err != nil {
		return fail(err)
	}
	own, err := networkNamespace()
	if err != nil {
		return fail(err)
	}
	var usual nodeOptions
	usual.command()
	options, err := usual.options()
	if err != nil {
		return fail(err)
	}
	options.CgroupRoot = fmt.Sprintf("portal/up-%d", own) // they end with it, and another namespace's must not
	options.Name, options.NodeIPs, options.DataDir, options.Log = machine, addrs, filepath.Join(info.DataDir, string(identity.Node)), log
	options.ClusterDomain, options.Hidden = upZone, []string{info.DataDir}
	options.Stream = node.StreamOptions{
		Port: streamPort, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}, Authorities: func() ([]byte, error) { return info.RootCA(), nil },
	}
	if options.Images.Mappings, err = withOwnImage(nil, options.DataDir); err != nil {
		return fail(err)
	}
	if options.Client, err = client(info.As(identity.Node.User(machine), identity.Node.Group())); err != nil {
		return fail(err)
	}
	if options.NodesClient, err = client(info.As(identity.Proxy.User(machine), identity.Proxy.Group())); err != nil {
		return fail(err)
	}
	started, ended := make(chan []netip.Prefix, 1), make(chan error, 1)
	options.Started = func(cidrs []netip.Prefix) { started <- cidrs }
	pods := upPods{dns: o.bridgedDNS(may)}
	if pods.dns {
		options.DNS = o.parts.nodeDNS(cmd, log, info.As(identity.DNS.User(machine), identity.DNS.Group()), machine, upZone, may)
	}
	if may.noProxy == "" {
		options.Drained = o.running.drained
	}
	options.Stream.State = nodeState(options, &o.running, may, &o.parts.balancers.balancingOptions)
	options.Stream.Traffic = nodeTraffic(cmd.Context(), &o.running, beside)
	agent, err := node.New(options)
	if err != nil {
		return fail(err)
	}
	var settings hostnet.Configured
	if err := settings.RememberIn(filepath.Join(options.DataDir, "settings.json"), "net/ipv4/ip_forward", "net/ipv4/conf/all/send_redirects", "net/ipv6/conf/all/forwarding"); err != nil {
		log.Warn("if this process is killed, settings that it changes for Pods will not be restored", "err", err)
	}
	startReport(cmd.Context(), o.parts.report, log, info.As(identity.Node.User(machine), identity.Node.Group()), machine, reports.Agent, agentReport(agent), beside)
	beside.Go(func() {
		err := agent.Run(cmd.Context())
		if stopped(cmd.Context(), err) {
			err = nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		ended <- errors.Join(err, agent.End(ctx), settings.Restore())
	})
	select {
	case pods.cidrs = <-started:
	case err := <-ended:
		return fail(fmt.Errorf("%w", err))
	case <-cmd.Context().Done():
	case <-time.After(podsStart):
		pods.note = "not ready yet"
	}
	beside.Go(func() {
		if err := <-ended; err != nil {
			log.Error("the node stopped", "err", err)
		}
	})
	return pods
}

// networkNamespace is the number of this process's.
func networkNamespace() (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat("/proc/self/ns/net", &st)
	return st.Ino, err
}

// bridgedDNS says whether names are served where Pods reach them: at an endpoint that the proxy forwards the cluster IP to.
func (o *upOptions) bridgedDNS(may *parts) bool {
	return o.parts.dns == "auto" && may.noProxy == "" && may.noVIP == ""
}

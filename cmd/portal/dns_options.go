package main

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"portal/internal/dns/corefile"
	"portal/internal/dns/forward"
	"portal/internal/dns/hosts"
	"portal/internal/dns/server"
	"portal/internal/dns/zone"
)

// serverOptions turns flags into options of the server. Its errors name the flag.
func (o *dnsOptions) serverOptions(stdout io.Writer, log *slog.Logger) (out server.Options, err error) {
	check := func(flag string, e error) {
		if e != nil && err == nil {
			err = fmt.Errorf("--%s: %w", flag, e)
		}
	}
	within := func(flag string, v, least, most int) {
		if v < least || v > most {
			check(flag, fmt.Errorf("%d is not from %d to %d", v, least, most))
		}
	}
	within("ttl", o.ttl, 0, 3600)
	if o.maxUDPSize != 0 {
		within("max-udp-size", o.maxUDPSize, 512, 65507)
	}
	within("max-connections", o.maxTCP, 1, 1<<20)
	within("rate-limit", o.rateLimit, 0, 1<<20)
	within("sockets", o.sockets, 0, 256)
	within("cache-size", o.cacheSize, 0, 1<<24)
	switch o.pods {
	case "insecure", "verified", "disabled":
	default:
		check("pods", fmt.Errorf("%q is not one of insecure, verified, disabled", o.pods))
	}
	if o.autopath && o.pods != "verified" {
		check("autopath", fmt.Errorf("needs --pods verified, to know the namespace of a client"))
	}
	out = server.Options{
		Zone: zone.Options{
			Zones: o.zones, Reverse: o.reverse, TTL: uint32(o.ttl), Pods: zone.PodMode(o.pods), Namespaces: o.namespaces,
			EndpointPodNames: o.endpointPodNames, NoEndpoints: o.noEndpoints, IgnoreEmpty: o.ignoreEmpty,
		},
		Fallthrough: o.fallthroughs, Autopath: o.autopath, Search: o.search, RateLimit: o.rateLimit,
		MaxUDPSize: o.maxUDPSize, MaxTCPConns: o.maxTCP, MaxWaiting: o.maxWaiting, Sockets: o.sockets, Log: log,
	}
	if len(o.listen) == 0 {
		check("listen", fmt.Errorf("no address"))
	}
	var e error
	out.Listen, e = addrPorts(o.listen)
	check("listen", e)
	out.ListenTLS, e = addrPorts(o.listenTLS)
	check("listen-tls", e)
	out.ListenHTTPS, e = addrPorts(o.listenHTTP)
	check("listen-https", e)
	out.AllowRecursion, out.AllowPrivate, e = recursionNetworks(o.allowRecursion)
	check("allow-recursion", e)
	out.AllowTransfer, e = parsePrefixes(o.allowTransfer)
	check("allow-transfer", e)
	if len(o.listenTLS)+len(o.listenHTTP) > 0 {
		pair, e := tls.LoadX509KeyPair(o.tlsCert, o.tlsKey)
		check("tls-cert", e)
		out.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	if e = o.forwarding(&out, log); e != nil && err == nil {
		err = e
	}
	out.Zone.Servers = serverAddrs(out.Listen)
	if o.logQueries {
		out.QueryLog = stdout
	}
	return out, err
}

// forwarding sets what resolves names outside the cluster: from a Corefile, or from flags.
func (o *dnsOptions) forwarding(out *server.Options, log *slog.Logger) error {
	metrics, own := forward.NewMetrics(), slices.Concat(out.Listen, out.ListenTLS)
	for _, h := range o.hosts {
		table, err := hosts.New(hosts.Options{File: h.File, Inline: h.Inline, Zones: h.Zones, TTL: uint32(h.TTL), NoReverse: h.NoReverse, Reload: h.Reload, Log: log})
		if err != nil {
			return fmt.Errorf("--corefile: hosts: %w", err)
		}
		out.Hosts = append(out.Hosts, table)
	}
	if o.forwards == nil {
		f, err := o.forwarder(own, metrics, log)
		if err != nil {
			return fmt.Errorf("--upstream: %w", err)
		}
		out.Forward = f
		return nil
	}
	out.Stubs = map[string]*forward.Forwarder{}
	for _, z := range o.refused {
		out.Stubs[z] = nil
	}
	for _, c := range o.forwards {
		f, err := o.forwarderOf(c, own, metrics, log)
		if err != nil {
			return fmt.Errorf("--corefile: forward %s: %w", c.Zones[0], err)
		}
		for _, z := range c.Zones {
			out.Stubs[z] = f
		}
	}
	return nil
}

// forwardingText describes for the log where other names are forwarded.
func (o *dnsOptions) forwardingText() string {
	if o.forwards == nil {
		return strings.Join(o.upstreams, " ")
	}
	var out []string
	for _, f := range o.forwards {
		out = append(out, strings.Join(f.Zones, " ")+" to "+strings.Join(f.To, " "))
	}
	return strings.Join(out, ", ")
}

// forwarder is what the flags describe; nil for none.
func (o *dnsOptions) forwarder(listen []netip.AddrPort, metrics *forward.Metrics, log *slog.Logger) (*forward.Forwarder, error) {
	if len(o.upstreams) == 0 || len(o.upstreams) == 1 && o.upstreams[0] == "none" {
		return nil, nil
	}
	f := forward.Defaults()
	f.Entries, f.Stale, f.Prefetch, f.Metrics = o.cacheSize, o.stale, !o.noPrefetch, metrics
	var err error
	if f.Upstreams, err = upstreams(o.upstreams, listen, log); err != nil {
		return nil, err
	}
	return forward.New(f), nil
}

// forwarderOf is what a forward plugin of a Corefile describes.
func (o *dnsOptions) forwarderOf(c corefile.Forward, listen []netip.AddrPort, metrics *forward.Metrics, log *slog.Logger) (*forward.Forwarder, error) {
	f := forward.Defaults()
	f.Zone, f.Sequential, f.Prefetch, f.Metrics = c.Zones[0], c.Sequential, !o.noPrefetch, metrics
	f.Entries, f.Stale = 0, 0
	if c.Cache != nil {
		f.Entries, f.Stale = cmp.Or(c.Cache.Entries, o.cacheSize), c.Cache.Stale
		f.MinTTL, f.MaxTTL, f.MinNegativeTTL, f.MaxNegativeTTL = c.Cache.MinTTL, c.Cache.MaxTTL, c.Cache.MinNegativeTTL, c.Cache.MaxNegativeTTL
	}
	list, err := upstreams(c.To, listen, log)
	if err != nil {
		return nil, err
	}
	for _, u := range list {
		if c.TCP && u.Transport == forward.UDP {
			u.Transport = forward.TCP
		}
		if u.Transport == forward.TLS && u.ServerName == "" {
			u.ServerName = c.ServerName
		}
		f.Upstreams = append(f.Upstreams, u)
	}
	return forward.New(f), nil
}

// upstreams parses a list of them, and leaves out this server itself.
func upstreams(list []string, listen []netip.AddrPort, log *slog.Logger) (out []forward.Upstream, err error) {
	local := machineAddrs()
	for _, s := range list {
		parsed, err := forward.ParseUpstream(s)
		if err != nil {
			return nil, err
		}
		for _, u := range parsed {
			if server.IsOwn(u.Addr, listen, local) {
				log.Warn("left out an upstream that is this server itself: queries to it would come back", "upstream", u.String(), "from", s)
				continue
			}
			out = append(out, u)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no server is left to forward to: all of %s are this server itself; give another one, or none", strings.Join(list, " "))
	}
	return out, nil
}

// serverAddrs are the addresses at which clients reach this server.
func serverAddrs(listen []netip.AddrPort) []netip.Addr {
	var out []netip.Addr
	for _, l := range listen {
		if !l.Addr().IsUnspecified() {
			if !l.Addr().IsLoopback() {
				out = append(out, l.Addr())
			}
			continue
		}
		for _, a := range machineAddrs() {
			if !a.IsLoopback() && !a.IsLinkLocalUnicast() {
				out = append(out, a)
			}
		}
	}
	return out
}

func machineAddrs() (out []netip.Addr) {
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out
}

// addrPorts parses address:port, where no address means all.
func addrPorts(list []string) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	for _, s := range list {
		if strings.HasPrefix(s, ":") {
			s = anyAddress() + s
		}
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			return nil, fmt.Errorf("%q is not ADDRESS:PORT", s)
		}
		out = append(out, a)
	}
	return out, nil
}

// anyAddress is the IPv6 wildcard, which covers IPv4, if the kernel has IPv6.
func anyAddress() string {
	if fd, err := syscall.Socket(syscall.AF_INET6, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0); err == nil {
		syscall.Close(fd)
		return "[::]"
	}
	return "0.0.0.0"
}

// recursionNetworks parses --allow-recursion; private stands for private networks and the cluster's.
func recursionNetworks(list []string) (out []netip.Prefix, private bool, err error) {
	out = []netip.Prefix{}
	for _, s := range list {
		switch s {
		case "private":
			private = true
		case "any":
			out = append(out, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"))
		default:
			p, err := parsePrefixes([]string{s})
			if err != nil {
				return nil, false, fmt.Errorf("%w, private or any", err)
			}
			out = append(out, p...)
		}
	}
	return out, private, nil
}

func parsePrefixes(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("%q is neither an address nor a prefix", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// Package nodereport is what a node of Portal's reports about itself when it is asked: what its proxy does, whether it serves
// names, where its Pods listen, and what of the machine matters to Services. It is data, and how the kernel's part of it is read.
package nodereport

import (
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"portal/internal/proxy"
)

// Path is where a node serves its report, among what it serves to those who may use nodes/proxy.
const Path = "/state"

// Report is a node's.
type Report struct {
	Node string    `json:"node"`
	Time time.Time `json:"time"`
	// Proxy is the proxy's own state, nil if none runs in this process; ProxyNote says why.
	Proxy     *proxy.State `json:"proxy,omitempty"`
	ProxyNote string       `json:"proxyNote,omitempty"`
	Conntrack *Usage       `json:"conntrack,omitempty"`
	// Dials and Lookup are attempts to connect to one Service, and to use DNS, if the report was asked for with them.
	Dials  []Dial  `json:"dials,omitempty"`
	Lookup *Lookup `json:"lookup,omitempty"`
	// Tries are attempts to connect to addresses that the request named, and Alias one to use the target of an alias.
	Tries []Dial `json:"tries,omitempty"`
	Alias *Alias `json:"alias,omitempty"`
	// Unhealthy are endpoints that this machine's load balancer sends nothing to, because its own health checks of them fail.
	Unhealthy []Unhealthy `json:"unhealthy,omitempty"`
	// Links are the machine's interfaces that have addresses.
	Links []Link `json:"links,omitempty"`
	// Listening has the sockets of each Pod that could be looked at, by the Pod's UID.
	Listening map[string][]Socket `json:"listening,omitempty"`
}

// Unhealthy is an endpoint that fails a load balancer's health checks.
type Unhealthy struct {
	// Namespace and Service are those that the endpoint belongs to.
	Namespace string         `json:"namespace"`
	Service   string         `json:"service"`
	Address   netip.AddrPort `json:"address"`
	// Error is what the last check said; empty: the endpoint was taken out because of failed requests.
	Error string `json:"error,omitempty"`
}

// Usage is how full a table is.
type Usage struct {
	Count int `json:"count"`
	Max   int `json:"max"`
}

// Socket is where a process waits for connections or packets.
type Socket struct {
	Protocol string     `json:"protocol"`
	Address  netip.Addr `json:"address"`
	Port     uint16     `json:"port"`
}

// Link is an interface that is up and has addresses.
type Link struct {
	Name      string       `json:"name"`
	MTU       int          `json:"mtu"`
	Addresses []netip.Addr `json:"addresses"`
}

// Links reads the interfaces of this network namespace, without the loopback one.
func Links() (out []Link) {
	all, _ := net.Interfaces() // without them nothing is said about them
	for i := range all {
		if all[i].Flags&net.FlagUp == 0 || all[i].Flags&net.FlagLoopback != 0 {
			continue
		}
		link := Link{Name: all[i].Name, MTU: all[i].MTU}
		addrs, _ := all[i].Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLinkLocalUnicast() {
				link.Addresses = append(link.Addresses, p.Addr())
			}
		}
		if len(link.Addresses) > 0 {
			out = append(out, link)
		}
	}
	return out
}

// Conntrack reads how full this network namespace's table of connections is.
func Conntrack() *Usage {
	count, err1 := number("/proc/sys/net/netfilter/nf_conntrack_count")
	most, err2 := number("/proc/sys/net/netfilter/nf_conntrack_max")
	if err1 != nil || err2 != nil {
		return nil
	}
	return &Usage{Count: count, Max: most}
}

func number(path string) (int, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(data)))
}

// Sockets reads where processes listen in the network namespace of a process.
func Sockets(pid int) (out []Socket, err error) {
	for _, t := range []struct{ file, protocol, state string }{
		{"tcp", "TCP", "0A"}, {"tcp6", "TCP", "0A"}, {"udp", "UDP", "07"}, {"udp6", "UDP", "07"},
	} {
		data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "net", t.file))
		if os.IsNotExist(err) && t.file != "tcp" {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		out = append(out, parse(string(data), t.protocol, t.state)...)
	}
	return out, nil
}

// parse reads a table of /proc/net: "sl local_address rem_address st …", with addresses as 32-bit words in the machine's order.
func parse(table, protocol, state string) (out []Socket) {
	seen := map[Socket]bool{}
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 4 || fields[3] != state {
			continue
		}
		host, port, ok := strings.Cut(fields[1], ":")
		if !ok {
			continue
		}
		number, err := strconv.ParseUint(port, 16, 16)
		addr, ok := address(host)
		if err != nil || !ok {
			continue
		}
		if s := (Socket{protocol, addr, uint16(number)}); !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}

func address(text string) (netip.Addr, bool) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw)%4 != 0 {
		return netip.Addr{}, false
	}
	for i := 0; i < len(raw); i += 4 { // little-endian, as every machine that Portal is built for
		raw[i], raw[i+1], raw[i+2], raw[i+3] = raw[i+3], raw[i+2], raw[i+1], raw[i]
	}
	return netip.AddrFromSlice(raw)
}

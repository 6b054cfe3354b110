package server

import (
	"net/netip"
	"slices"
	"sync/atomic"
)

// networks is a set of addresses: prefixes in order, none within another.
type networks []netip.Prefix

func newNetworks(list []netip.Prefix) networks {
	sorted := make([]netip.Prefix, 0, len(list))
	for _, p := range list {
		sorted = append(sorted, p.Masked())
	}
	slices.SortFunc(sorted, netip.Prefix.Compare)
	var out networks
	for _, p := range sorted {
		if n := len(out); n == 0 || !out[n-1].Contains(p.Addr()) {
			out = append(out, p)
		}
	}
	return out
}

func (n networks) contains(a netip.Addr) bool {
	a = a.WithZone("")
	i, exact := slices.BinarySearchFunc(n, a, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	if exact {
		return true
	}
	return i > 0 && n[i-1].Contains(a)
}

// PrivateNetworks are those that no client on the internet has an address of: loopback, private, shared (RFC 6598) and
// link-local ones.
func PrivateNetworks() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{
		"127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16",
		"::1/128", "fc00::/7", "fe80::/10",
	} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// recursionAccess decides for which clients names outside the cluster are resolved.
type recursionAccess struct {
	fixed networks
	// private: PrivateNetworks are among them, and those of the cluster are added as they become known.
	private bool
	cluster *atomic.Pointer[networks]
	refused chan struct{}
}

func newRecursionAccess(given []netip.Prefix, private bool) recursionAccess {
	a := recursionAccess{private: private || given == nil, cluster: new(atomic.Pointer[networks]), refused: make(chan struct{}, 1)}
	if a.private {
		given = slices.Concat(given, PrivateNetworks())
	}
	a.fixed = newNetworks(given)
	return a
}

// AllowClusterNetworks sets the networks that may recurse by default in addition to PrivateNetworks.
func (s *Server) AllowClusterNetworks(list []netip.Prefix) {
	n := newNetworks(list)
	s.access.cluster.Store(&n)
}

// RecursionRefused receives after a client was refused by default.
func (s *Server) RecursionRefused() <-chan struct{} { return s.access.refused }

func (s *Server) mayRecurse(from netip.Addr) bool {
	a := &s.access
	if a.fixed.contains(from) {
		return true
	}
	if a.private {
		if n := a.cluster.Load(); n != nil && n.contains(from) {
			return true
		}
		select {
		case a.refused <- struct{}{}:
		default:
		}
	}
	return false
}

func (s *Server) mayTransfer(from netip.Addr) bool { return s.transfers.contains(from) }

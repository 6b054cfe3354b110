package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// addresses gives out the addresses of the node's Pod CIDRs. Each that is in use is a file that names its owner, so another
// process can go on.
type addresses struct{ dir string }

const lastFile = "last-"

// lock lets one process at a time give out addresses.
func (a addresses) lock() (func(), error) {
	if err := os.MkdirAll(a.dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(a.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { _ = f.Close() }, nil
}

// all are the addresses in use, by owner.
func (a addresses) all() (map[string][]netip.Addr, error) {
	out := map[string][]netip.Addr{}
	entries, err := os.ReadDir(a.dir)
	if errors.Is(err, os.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		addr, err := netip.ParseAddr(e.Name())
		if err != nil {
			continue
		}
		owner, err := os.ReadFile(filepath.Join(a.dir, e.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue // given back meanwhile
		}
		if err != nil {
			return nil, err
		}
		out[string(owner)] = append(out[string(owner)], addr)
	}
	return out, nil
}

// acquire gives an owner one address of each prefix: those that it has already, or the next free ones.
func (a addresses) acquire(owner string, prefixes []netip.Prefix) ([]netip.Addr, error) {
	unlock, err := a.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	all, err := a.all()
	if err != nil {
		return nil, err
	}
	used := map[netip.Addr]bool{}
	for _, list := range all {
		for _, addr := range list {
			used[addr] = true
		}
	}
	var out, fresh []netip.Addr
	for _, prefix := range prefixes {
		addr, had := owned(all[owner], prefix)
		if !had {
			if addr, err = a.next(prefix, used); err == nil {
				err = a.take(addr, owner)
			}
			if err != nil {
				for _, f := range fresh {
					_ = os.Remove(filepath.Join(a.dir, f.String()))
				}
				return nil, err
			}
			fresh = append(fresh, addr)
			_ = os.WriteFile(a.last(prefix), []byte(addr.String()), 0o600)
		}
		out = append(out, addr)
	}
	return out, nil
}

// take writes down whose an address is. A disk that is full leaves no address without an owner.
func (a addresses) take(addr netip.Addr, owner string) error {
	part := filepath.Join(a.dir, "new")
	err := os.WriteFile(part, []byte(owner), 0o600)
	if err == nil {
		err = os.Rename(part, filepath.Join(a.dir, addr.String()))
	}
	if err != nil {
		_ = os.Remove(part)
	}
	return err
}

func owned(list []netip.Addr, prefix netip.Prefix) (netip.Addr, bool) {
	for _, addr := range list {
		if prefix.Contains(addr) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

func (a addresses) last(prefix netip.Prefix) string {
	return filepath.Join(a.dir, lastFile+strings.ReplaceAll(prefix.String(), "/", "_"))
}

// next is the free address after the one that was given out last: an address rests for as long as possible before it is used again,
// as others may still send to its last owner.
func (a addresses) next(prefix netip.Prefix, used map[netip.Addr]bool) (netip.Addr, error) {
	first := Gateway(prefix).Next()
	start := first
	if data, err := os.ReadFile(a.last(prefix)); err == nil {
		if addr, err := netip.ParseAddr(string(data)); err == nil && prefix.Contains(addr) {
			start = addr.Next()
		}
	}
	usable := func(addr netip.Addr) bool {
		// The last address of an IPv4 prefix is its broadcast address.
		return prefix.Contains(addr) && (addr.Is6() || prefix.Bits() > 30 || prefix.Contains(addr.Next()))
	}
	wrapped := false
	for addr := start; ; addr = addr.Next() {
		if !usable(addr) {
			if wrapped {
				return netip.Addr{}, fmt.Errorf("all addresses of %s are in use: %d Pods", prefix, len(used))
			}
			wrapped, addr = true, first
			if !usable(addr) {
				return netip.Addr{}, fmt.Errorf("%s has no address for a Pod: it is too small", prefix)
			}
		}
		if !used[addr] {
			return addr, nil
		}
		if wrapped && addr == start {
			return netip.Addr{}, fmt.Errorf("all addresses of %s are in use: %d Pods", prefix, len(used))
		}
	}
}

// Gateway is a prefix's first address: the node's own among its Pods.
func Gateway(prefix netip.Prefix) netip.Addr { return prefix.Masked().Addr().Next() }

// release gives an owner's addresses back.
func (a addresses) release(owner string) error {
	unlock, err := a.lock()
	if err != nil {
		return err
	}
	defer unlock()
	all, err := a.all()
	if err != nil {
		return err
	}
	for _, addr := range all[owner] {
		if err := os.Remove(filepath.Join(a.dir, addr.String())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

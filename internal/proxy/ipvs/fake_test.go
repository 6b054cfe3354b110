package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// fake is a kernel in memory. It refuses what the real one refuses.
type fake struct {
	table     map[key]*server
	addrs     map[netip.Addr]bool
	elsewhere map[netip.Addr]bool
	hasDevice bool
	nft       map[intent.Family]map[element]bool
	settings  map[string]string
	// refuse is an endpoint that can't be added; fail makes the next change of rules fail.
	refuse netip.Addr
	fail   bool
	ops    int
}

func newFake() *fake {
	return &fake{
		table: map[key]*server{}, addrs: map[netip.Addr]bool{}, elsewhere: map[netip.Addr]bool{},
		nft: map[intent.Family]map[element]bool{}, settings: map[string]string{},
	}
}

func (f *fake) kernel() *kernel {
	return &kernel{director: fakeDirector{f}, device: fakeDevice{f}, rules: fakeRules{f}, sysctl: fakeSysctl{f}}
}

type fakeSysctl struct{ *fake }

func (f fakeSysctl) get(name string) (string, error) { return f.settings[name], nil }
func (f fakeSysctl) set(name, value string) error    { f.settings[name] = value; return nil }

type fakeDirector struct{ *fake }

func (f fakeDirector) servers() (map[key]*server, error) {
	out := map[key]*server{}
	for at, s := range f.table {
		out[at] = &server{scheduler: s.scheduler, ports: s.ports, persistent: s.persistent}
	}
	return out, nil
}

func (f fakeDirector) dests(at key) (map[netip.AddrPort]*dest, error) {
	s := f.table[at]
	if s == nil {
		return nil, unix.ESRCH
	}
	out := map[netip.AddrPort]*dest{}
	for to, d := range s.dests {
		c := *d
		out[to] = &c
	}
	return out, nil
}

func (f fakeDirector) addServer(at key, s *server) error {
	f.ops++
	if f.table[at] != nil {
		return unix.EEXIST
	}
	f.table[at] = &server{scheduler: s.scheduler, ports: s.ports, persistent: s.persistent, dests: map[netip.AddrPort]*dest{}}
	return nil
}

func (f fakeDirector) setServer(at key, s *server) error {
	f.ops++
	have := f.table[at]
	if have == nil {
		return unix.ESRCH
	}
	have.scheduler, have.ports, have.persistent = s.scheduler, s.ports, s.persistent
	return nil
}

func (f fakeDirector) delServer(at key) error {
	f.ops++
	if f.table[at] == nil {
		return unix.ESRCH
	}
	delete(f.table, at)
	return nil
}

func (f fakeDirector) addDest(at key, to netip.AddrPort, weight int) error {
	f.ops++
	if to.Addr() == f.refuse {
		return unix.EINVAL
	}
	s := f.table[at]
	if s == nil || s.dests[to] != nil {
		return unix.EEXIST
	}
	s.dests[to] = &dest{weight: weight}
	return nil
}

func (f fakeDirector) setDest(at key, to netip.AddrPort, weight int) error {
	f.ops++
	s := f.table[at]
	if s == nil || s.dests[to] == nil {
		return unix.ENOENT
	}
	s.dests[to].weight = weight
	return nil
}

func (f fakeDirector) delDest(at key, to netip.AddrPort) error {
	f.ops++
	s := f.table[at]
	if s == nil || s.dests[to] == nil {
		return unix.ENOENT
	}
	delete(s.dests, to)
	return nil
}

func (f fakeDirector) configure(Options) error { return nil }
func (f fakeDirector) close()                  {}

type fakeDevice struct{ *fake }

func (f fakeDevice) probe() error                 { return nil }
func (f fakeDevice) ensure([]intent.Family) error { f.hasDevice = true; return nil }
func (f fakeDevice) routed([]intent.Family) error { return nil }

func (f fakeDevice) list() (map[netip.Addr]bool, error) { return maps.Clone(f.addrs), nil }

func (f fakeDevice) elsewhere(a netip.Addr) (bool, error) { return f.fake.elsewhere[a], nil }

func (f fakeDevice) add(a netip.Addr) error {
	f.ops++
	if !f.hasDevice || f.addrs[a] {
		return fmt.Errorf("%v can't be added", a)
	}
	f.addrs[a] = true
	return nil
}

func (f fakeDevice) del(a netip.Addr) error {
	f.ops++
	if !f.addrs[a] {
		return fmt.Errorf("%v is not there", a)
	}
	delete(f.addrs, a)
	return nil
}

func (f fakeDevice) remove() error { f.hasDevice = false; clear(f.addrs); return nil }
func (f fakeDevice) close()        {}

type fakeRules struct{ *fake }

func (f fakeRules) probe() error { return nil }
func (f fakeRules) check() error { return nil }
func (f fakeRules) close()       {}

func (f fakeRules) read() (*found, error) {
	out := &found{map[plan.FrontendKey][plan.Origins]uint32{}, map[netip.Addr]bool{}, map[key]map[netip.AddrPort]uint32{}}
	for family, list := range f.nft {
		for e := range list {
			switch e.set {
			case vipsSet:
				a, _ := netip.AddrFromSlice([]byte(e.key))
				out.addrs[a] = true
			case slotsSet:
				pool, to, _ := decodeSlot([]byte(e.key), family)
				if out.slots[pool] == nil {
					out.slots[pool] = map[netip.AddrPort]uint32{}
				}
				out.slots[pool][to] = e.mark & maxSlot
			}
			for o := range plan.Origins {
				if e.set == marksMap[o] {
					k, _ := decodeFrontend([]byte(e.key), family)
					m := out.marks[k]
					m[o] = e.mark
					out.marks[k] = m
				}
			}
		}
	}
	return out, nil
}

var errInjected = errors.New("injected")

func (f fakeRules) replace(_ *plan.Facts, _ uint32, all map[intent.Family]map[element]bool) error {
	if f.fail {
		f.fake.fail = false
		return errInjected
	}
	f.nft = all
	f.fake.nft = map[intent.Family]map[element]bool{}
	for family, list := range all {
		f.fake.nft[family] = maps.Clone(list)
	}
	return f.unique()
}

func (f fakeRules) change(del, add map[intent.Family]map[element]bool) error {
	if f.fail {
		f.fake.fail = false
		return errInjected
	}
	for family, list := range del {
		for e := range list {
			f.ops++
			if !f.nft[family][e] {
				return fmt.Errorf("no element %+v", e)
			}
			delete(f.nft[family], e)
		}
	}
	for family, list := range add {
		for e := range list {
			f.ops++
			if f.nft[family][e] {
				return fmt.Errorf("element %+v is there already", e)
			}
			f.nft[family][e] = true
		}
	}
	return f.unique()
}

// unique: a key is in a map once.
func (f fakeRules) unique() error {
	for family, list := range f.fake.nft {
		seen := map[[2]string]bool{}
		for e := range list {
			if at := [2]string{e.set, e.key}; seen[at] {
				return fmt.Errorf("two elements with one key in %s of IPv%d", e.set, family)
			} else {
				seen[at] = true
			}
		}
	}
	return nil
}

func (f fakeRules) remove() error { clear(f.nft); return nil }

// route follows a packet: the verdict on it, the endpoints that may get it, and for how long its client stays.
func (f *fake) route(k plan.FrontendKey, o plan.Origin) (v verdict, to map[netip.AddrPort]bool, stays time.Duration) {
	at := key{family: k.Family, addr: k.Addr, protocol: k.Protocol, port: k.Port}
	raw := string(frontendBytes(k))
	for e := range f.nft[k.Family] {
		if e.key != raw {
			continue
		}
		switch e.set {
		case routesMap[o]:
			v = e.verdict
		case marksMap[o]:
			at = marked(e.mark, k.Family)
		}
	}
	s := f.table[at]
	if s == nil || v != forward && v != masquerade {
		return v, nil, 0
	}
	led := f.nft[k.Family][element{set: ledSet, key: raw}]
	if at.mark == 0 && !f.addrs[k.Addr] || k.Addr.IsValid() && led == f.addrs[k.Addr] {
		return none, nil, 0
	}
	return v, s.open(), f.stays(at)
}

// open are the endpoints that get new connections.
func (s *server) open() map[netip.AddrPort]bool {
	to := map[netip.AddrPort]bool{}
	for e, d := range s.dests {
		if d.weight > 0 {
			to[e] = true
		}
	}
	return to
}

// stays is for how long clients of a pool keep their endpoint; -1 where the rules contradict each other.
func (f *fake) stays(pool key) time.Duration {
	var stick, learn time.Duration
	slots := 0
	for e := range f.nft[pool.family] {
		switch {
		case e.key == string(nf.Number(pool.mark)) && e.set == stickySet:
			stick = e.affinity
		case e.key == string(nf.Number(pool.mark)) && e.set == learnSet:
			learn = e.affinity
		case e.set == slotsSet:
			of, to, _ := decodeSlot([]byte(e.key), pool.family)
			if of != pool {
				continue
			}
			slots++
			own := f.table[marked(e.mark, pool.family)]
			if own == nil || !maps.Equal(own.open(), map[netip.AddrPort]bool{to: true}) || !f.nft[pool.family][element{set: membersSet, key: string(nf.Number(e.mark))}] {
				return -1
			}
		}
	}
	if stick != learn || stick > 0 && slots != len(f.table[pool].open()) || stick == 0 && slots > 0 {
		return -1
	}
	return stick
}

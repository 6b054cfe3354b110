package userspace

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// Clients' endpoints are saved in a map of the kernel's, whose elements expire, so that the next process knows them.

// affinityLimit is how many clients are saved in a family.
const affinityLimit = 1 << 18

// hashOf identifies a Service's port, also after a restart.
func hashOf(p plan.PortID) uint64 {
	b := append([]byte(p.Service.Namespace+"/"+p.Service.Name+":"+p.Port), 0, byte(p.Protocol), byte(p.Family))
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:])
}

func (t *table) endpoint(a netip.AddrPort) []byte {
	return nf.AppendPort(t.AppendAddr(nil, a.Addr()), a.Port())
}

// client is the key of a client in the map.
func (t *table) client(c client) []byte {
	return nf.AppendNumber(nf.AppendNumber(t.AppendAddr(nil, c.addr), uint32(c.port>>32)), uint32(c.port))
}

// decodeClient reads an element of the map.
func (t *table) decodeClient(e nf.Element) (c client, to netip.AddrPort, ok bool) {
	if len(e.Key) != t.Width+8 || len(e.Data) != t.Width+4 || e.Timeout <= 0 {
		return c, to, false
	}
	c.addr, _ = netip.AddrFromSlice(e.Key[:t.Width])
	c.port = uint64(binary.NativeEndian.Uint32(e.Key[t.Width:]))<<32 | uint64(binary.NativeEndian.Uint32(e.Key[t.Width+4:]))
	a, _ := netip.AddrFromSlice(e.Data[:t.Width])
	return c, netip.AddrPortFrom(a, binary.BigEndian.Uint16(e.Data[t.Width:])), true
}

// load reads what an earlier process saved. What can't be read is chosen anew.
func (s *server) load() {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	var found []*stuck
	for _, f := range families {
		t := newTable(f, s.Source)
		if there, err := s.socket.Exists(t.at); err != nil || !there {
			continue
		}
		_ = s.socket.Elements(t.affinity, func() {}, func(e nf.Element) {
			if c, to, ok := t.decodeClient(e); ok {
				found = append(found, &stuck{c, to, s.memory.now().Add(e.Timeout)})
			}
		})
	}
	s.memory.restore(found)
}

// save writes clients' endpoints, if they have changed since the last time.
func (s *server) save() error {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	if s.facts == nil {
		return nil
	}
	all := s.memory.changed()
	if all == nil {
		return nil
	}
	b := nf.NewBatch()
	for _, f := range s.facts.Families {
		t := newTable(f, s.Source)
		b.FlushDynamic(t.affinity)
		n := 0
		for _, to := range all {
			left := to.until.Sub(s.memory.now()).Truncate(time.Millisecond)
			if intent.FamilyOf(to.client.addr) == f && left > 0 && n < affinityLimit/2 {
				n++
				b.Add(t.affinity, nf.Element{Key: t.client(to.client), Data: t.endpoint(to.endpoint), Timeout: left})
			}
		}
	}
	err := s.socket.Commit(b)
	if err != nil {
		s.memory.setChanged()
	}
	return err
}

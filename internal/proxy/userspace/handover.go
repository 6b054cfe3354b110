package userspace

import (
	"fmt"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

const (
	// handoverSlots is the most endpoints of a pool that are used while the process is away.
	handoverSlots = 8
	// handoverMark is on packets whose source is to be rewritten then.
	handoverMark = 0x80000
)

// handover declares what the kernel does while this process is away, as on a restart: it sends new connections to endpoints by
// itself, at random and with the node's address as their source. The next process takes them back with its first Apply.
func (t *table) handover(b *nf.Batch, facts *plan.Facts, frontends []*frontend, present *nf.Present) {
	t.base(b, facts, nil, present)
	come := map[element]bool{}
	for o := range origins {
		for kind, withAddr := range []bool{true, false} {
			b.AddSet(t.pick[o][kind])
			b.AddSet(t.slots[o][kind])
			slot := reg0 + uint32(t.pick[o][kind].KeyLen()/4)
			for n := 1; n <= handoverSlots; n++ {
				b.AddChain(t.at, nf.Chain{Name: slotsChain(o, kind, n), Rules: []nf.Rule{nf.Concat(
					nf.MarkBit(handoverMark), t.key(withAddr),
					nf.Rule{
						nf.Random{Dst: slot, Below: uint32(n)}, nf.Lookup{Map: t.slots[o][kind], Key: reg0, Dst: reg0},
						nf.DNAT{Family: t.Family, Addr: reg0, Port: reg0 + t.Words()},
					})}})
			}
		}
		for _, f := range frontends {
			collect(come, t.choices(f.Frontend, o))
		}
	}
	b.AddChain(t.at, nf.Chain{
		Name: "leave", Hook: nf.Hook{Type: "nat", Point: unix.NF_INET_POST_ROUTING, Priority: 100},
		Rules: []nf.Rule{append(nf.HasBit(nf.Mark(reg0), handoverMark, false), nf.Masquerade{})},
	})
	for _, f := range frontends {
		collect(come, t.elements(f.Frontend))
	}
	change(b, nil, come)
	b.Prune(t.at)
}

func slotsChain(o, kind, n int) string {
	return fmt.Sprintf("%s-of%s-%d", origins[o], []string{"", "-ports"}[kind], n)
}

// choices are the elements by which a frontend's packets find an endpoint without us.
func (t *table) choices(f *plan.Frontend, o int) []element {
	r := &f.Routes[o]
	if r.Verdict != plan.Forward || f.Protocol == intent.SCTP {
		return nil
	}
	key, kind := t.frontendKey(f)
	list := r.Pool.Endpoints[:min(len(r.Pool.Endpoints), handoverSlots)]
	out := []element{{set: t.pick[o][kind], key: key, verdict: nf.Goto(slotsChain(o, kind, len(list)))}}
	for i, e := range list {
		out = append(out, element{set: t.slots[o][kind], key: key + string(nf.Number(uint32(i))), data: string(t.endpoint(e.Addr))})
	}
	return out
}

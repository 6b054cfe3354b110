package userspace

import (
	"fmt"
	"strings"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	// handoverSlots is the most endpoints of a pool that are used while the process is away.
	handoverSlots = 8
	// handoverMark is on packets whose source is to be rewritten then.
	handoverMark = 0x80000
)

// handover is what the kernel does while this process is away, as on a restart: it leads new connections to endpoints by
// itself, at random and with the node's address as their source. The next process takes them back with its first Apply.
func (t *table) handover(facts *plan.Facts, frontends []*frontend) string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	come := map[element]bool{}
	for o, name := range origins {
		for _, kind := range []string{"", "-ports"} {
			key := "meta l4proto . th dport"
			if kind == "" {
				key = t.key
			}
			say("add map %s %s %s-pick%s { typeof %s : verdict; }", t.ip, tableName, name, kind, key)
			say("add map %s %s %s-slots%s { typeof %s . numgen random mod 2 : %s daddr . th dport; }", t.ip, tableName, name, kind, key, t.ip)
			for n := 1; n <= handoverSlots; n++ {
				say("add chain %s %s %s-of%s-%d", t.ip, tableName, name, kind, n)
				say("add rule %s %s %s-of%s-%d meta mark set meta mark | %#x dnat %s to %s . numgen random mod %d map @%s-slots%s",
					t.ip, tableName, name, kind, n, handoverMark, t.ip, key, n, name, kind)
			}
			for _, way := range []string{"in", "out"} {
				say("add rule %s %s %s-%s %s vmap @%s-pick%s", t.ip, tableName, way, name, key, name, kind)
			}
		}
		for _, f := range frontends {
			collect(come, slots(f.Frontend, name, &f.Routes[o]))
		}
	}
	say("add chain %s %s leave { type nat hook postrouting priority 100; meta mark & %#x != 0 masquerade; }", t.ip, tableName, handoverMark)
	for _, f := range frontends {
		collect(come, t.elements(f.Frontend))
	}
	return t.remove() + t.base(facts, nil) + b.String() + t.change(nil, come)
}

// slots are the elements by which a frontend's packets find an endpoint without us.
func slots(f *plan.Frontend, origin string, r *plan.Route) []element {
	if r.Verdict != plan.Forward || f.Protocol == intent.SCTP {
		return nil
	}
	key, kind := vipKey(f)
	list := r.Pool.Endpoints[:min(len(r.Pool.Endpoints), handoverSlots)]
	out := []element{{origin + "-pick" + kind, key, fmt.Sprintf("goto %s-of%s-%d", origin, kind, len(list))}}
	for i, e := range list {
		out = append(out, element{origin + "-slots" + kind, fmt.Sprintf("%s . %d", key, i), fmt.Sprintf("%s . %d", e.Addr.Addr(), e.Addr.Port())})
	}
	return out
}

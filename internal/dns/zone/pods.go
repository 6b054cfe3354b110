package zone

import (
	"bytes"
	"maps"
	"net/netip"
	"strings"

	"portal/internal/intent"
)

// podIndex finds the Pods of an address. It is replaced, never changed.
type podIndex struct {
	byAddr map[netip.Addr][]intent.Key
}

// updatePods replaces the index. Pods change in bursts, which a feed coalesces: there is one copy for each burst.
func (z *Zones) updatePods(dirty map[intent.Key]struct{}) {
	next := &podIndex{byAddr: maps.Clone(z.pods.Load().byAddr)}
	if next.byAddr == nil {
		next.byAddr = map[netip.Addr][]intent.Key{}
	}
	for a, keys := range next.byAddr {
		kept := keys[:0:0]
		for _, k := range keys {
			if _, gone := dirty[k]; !gone {
				kept = append(kept, k)
			}
		}
		if len(kept) == 0 {
			delete(next.byAddr, a)
		} else if len(kept) != len(keys) {
			next.byAddr[a] = kept
		}
	}
	for k := range dirty {
		if p := z.cluster.Pod(k); p != nil {
			for _, a := range p.Addrs {
				next.byAddr[a] = append(next.byAddr[a], k)
			}
		}
	}
	z.pods.Store(next)
}

// NamespaceOf returns the namespace of the one Pod that has an address, empty if there is none or more than one: an
// answer must never be given for the wrong namespace.
func (z *Zones) NamespaceOf(a netip.Addr) string {
	keys := z.pods.Load().byAddr[a.Unmap()]
	if len(keys) != 1 {
		return ""
	}
	return keys[0].Namespace
}

// podAddr parses the address in a Pod's name.
func podAddr(label []byte) (netip.Addr, bool) {
	if bytes.IndexByte(label, '%') >= 0 || bytes.IndexByte(label, '.') >= 0 || bytes.IndexByte(label, ':') >= 0 {
		return netip.Addr{}, false
	}
	sep := ":"
	if bytes.Count(label, []byte("-")) == 3 && !bytes.Contains(label, []byte("--")) {
		sep = "."
	}
	a, err := netip.ParseAddr(strings.ReplaceAll(string(label), "-", sep))
	return a.Unmap(), err == nil
}

// pod makes the name <address>.<namespace>.pod, nil if it does not exist.
func (z *Zones) pod(owner, namespace, label []byte, g origin) *Name {
	if z.opts.Pods == PodsDisabled || z.get(branch(namespace, pod, g.wire)) == nil {
		return nil
	}
	a, ok := podAddr(label)
	if !ok {
		return nil
	}
	if z.opts.Pods == PodsVerified && !z.verified(a, label, string(namespace)) {
		return nil
	}
	base := string(appendTarget(nil, string(label), string(branch(namespace, pod, g.wire))))
	return newName(string(owner), base, z.opts.TTL, []record{{addr: a}})
}

func (z *Zones) verified(a netip.Addr, label []byte, namespace string) bool {
	// A Pod's name has its address in canonical form.
	if strings.NewReplacer(".", "-", ":", "-").Replace(a.String()) != string(label) {
		return false
	}
	for _, k := range z.pods.Load().byAddr[a] {
		if k.Namespace == namespace {
			return true
		}
	}
	return false
}

func branch(namespace []byte, kind, origin string) []byte {
	b := make([]byte, 0, 1+len(namespace)+len(kind)+len(origin))
	b = append(append(b, byte(len(namespace))), namespace...)
	return append(append(b, kind...), origin...)
}

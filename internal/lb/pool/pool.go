// Package pool has the addresses that balancers may have, and chooses among them: pools are read from flags and from a ConfigMap, and a
// Table says which Service has which address. It is pure: where the Table is kept, and who may write it, it does not know.
package pool

import (
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"portal/internal/configfile"
)

// DefaultName is that of a pool that was given by its addresses alone.
const DefaultName = "default"

// ConfigMap is the name of the ConfigMap with pools beside those of flags, in kube-system, and ConfigMapKey what it has them under.
const ConfigMap, ConfigMapKey = "portal-lb", "pools"

// Range is all addresses from the first to the last, of one family.
type Range struct{ First, Last netip.Addr }

func (r Range) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

// Contains says whether an address is in the range.
func (r Range) Contains(a netip.Addr) bool {
	return a.Is4() == r.First.Is4() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

func (r Range) overlaps(o Range) bool { return r.Contains(o.First) || o.Contains(r.First) }

// Pool is a set of addresses with one purpose.
type Pool struct {
	Name   string
	Ranges []Range
	// Internal pools are for Services that ask for an internal balancer; the others are for the rest.
	Internal bool
	// Manual: an address is given only to who asks for it, or for the pool by its name.
	Manual bool
	// Namespaces and the selectors say who may have an address; empty: everybody. With both Namespaces and NamespaceSelector
	// either is enough.
	Namespaces        []string
	NamespaceSelector labels.Selector
	ServiceSelector   labels.Selector
}

// Contains says whether an address is of the pool.
func (p *Pool) Contains(a netip.Addr) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.Contains(a) })
}

// Size is the number of addresses of the pool.
func (p *Pool) Size() *big.Int {
	out := new(big.Int)
	for _, r := range p.Ranges {
		n := new(big.Int).SetBytes(r.Last.AsSlice())
		out.Add(out, n.Sub(n, new(big.Int).SetBytes(r.First.AsSlice())).Add(n, big.NewInt(1)))
	}
	return out
}

// ParseRange reads an address, a prefix, or the first and last address with a hyphen between them.
func ParseRange(text string) (Range, error) {
	bad := func() (Range, error) {
		return Range{}, fmt.Errorf("%q is not an address, a prefix like 192.0.2.0/28, or a range like 192.0.2.10-192.0.2.20", text)
	}
	var r Range
	if first, last, found := strings.Cut(text, "-"); found {
		a, err1 := netip.ParseAddr(strings.TrimSpace(first))
		b, err2 := netip.ParseAddr(strings.TrimSpace(last))
		if err1 != nil || err2 != nil {
			return bad()
		}
		r = Range{a.Unmap(), b.Unmap()}
		if r.First.Is4() != r.Last.Is4() {
			return Range{}, fmt.Errorf("%q has addresses of two families", text)
		}
		if r.Last.Less(r.First) {
			return Range{}, fmt.Errorf("%q ends before it begins", text)
		}
	} else if p, err := netip.ParsePrefix(text); err == nil {
		if p.Masked().Addr() != p.Addr() {
			return Range{}, fmt.Errorf("%q has bits set beyond its prefix: perhaps %s is meant", text, p.Masked())
		}
		r = Range{p.Addr(), lastOf(p)}
	} else {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return bad()
		}
		r = Range{a.Unmap(), a.Unmap()}
	}
	for _, a := range []netip.Addr{r.First, r.Last} {
		if a.Zone() != "" || a.IsLoopback() || a.IsMulticast() || a.IsUnspecified() || a.IsLinkLocalUnicast() {
			return Range{}, fmt.Errorf("%q: %s is not an address that clients could reach", text, a)
		}
	}
	return r, nil
}

func lastOf(p netip.Prefix) netip.Addr {
	raw := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(raw)*8; bit++ {
		raw[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(raw)
	return a
}

// ParseFlag reads a pool like
//
//	192.0.2.10-192.0.2.20,2001:db8::/120
//	public=192.0.2.0/28
//	office=10.1.0.0/24;internal;manual;namespaces=a,b;namespace-selector=team=web;service-selector=app in (x,y)
func ParseFlag(text string) (*Pool, error) {
	parts := strings.Split(text, ";")
	p := &Pool{Name: DefaultName}
	addresses := parts[0]
	if name, rest, found := strings.Cut(addresses, "="); found {
		p.Name, addresses = strings.TrimSpace(name), rest
	}
	for _, item := range strings.Split(addresses, ",") {
		r, err := ParseRange(strings.TrimSpace(item))
		if err != nil {
			return nil, err
		}
		p.Ranges = append(p.Ranges, r)
	}
	for _, option := range parts[1:] {
		key, value, given := strings.Cut(strings.TrimSpace(option), "=")
		var err error
		switch {
		case key == "internal" && !given:
			p.Internal = true
		case key == "manual" && !given:
			p.Manual = true
		case key == "namespaces" && given:
			p.Namespaces = strings.Split(value, ",")
		case key == "namespace-selector" && given:
			p.NamespaceSelector, err = labels.Parse(value)
		case key == "service-selector" && given:
			p.ServiceSelector, err = labels.Parse(value)
		default:
			err = errors.New("it must be internal, manual, namespaces=…, namespace-selector=… or service-selector=…")
		}
		if err != nil {
			return nil, fmt.Errorf("option %q: %w", option, err)
		}
	}
	return p, p.validate()
}

func (p *Pool) validate() error {
	if problems := validation.IsDNS1123Subdomain(p.Name); len(problems) > 0 {
		return fmt.Errorf("name: %q can't be a pool's: %s", p.Name, problems[0])
	}
	if len(p.Ranges) == 0 {
		return errors.New("addresses: there must be at least one")
	}
	for _, n := range p.Namespaces {
		if problems := validation.IsDNS1123Label(n); len(problems) > 0 {
			return fmt.Errorf("namespaces: %q can't be a namespace's name: %s", n, problems[0])
		}
	}
	return nil
}

// written is a pool as it is written in a ConfigMap.
type written struct {
	Name              string                `json:"name"`
	Addresses         []string              `json:"addresses"`
	Internal          bool                  `json:"internal,omitempty"`
	Manual            bool                  `json:"manual,omitempty"`
	Namespaces        []string              `json:"namespaces,omitempty"`
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	ServiceSelector   *metav1.LabelSelector `json:"serviceSelector,omitempty"`
}

// ParseYAML reads a list of pools: the key pools of a ConfigMap, which source names.
func ParseYAML(source string, data []byte) ([]*Pool, error) {
	var list []written
	if err := yaml.UnmarshalStrict(data, &list); err != nil {
		return nil, configfile.Mistakes(source, data, err)
	}
	var out []*Pool
	for i, w := range list {
		at := func(field string, err error) error { return fmt.Errorf("%s: pools[%d].%s: %w", source, i, field, err) }
		p := &Pool{Name: w.Name, Internal: w.Internal, Manual: w.Manual, Namespaces: w.Namespaces}
		for j, text := range w.Addresses {
			r, err := ParseRange(text)
			if err != nil {
				return nil, at(fmt.Sprintf("addresses[%d]", j), err)
			}
			p.Ranges = append(p.Ranges, r)
		}
		var err error
		if w.NamespaceSelector != nil {
			if p.NamespaceSelector, err = metav1.LabelSelectorAsSelector(w.NamespaceSelector); err != nil {
				return nil, at("namespaceSelector", err)
			}
		}
		if w.ServiceSelector != nil {
			if p.ServiceSelector, err = metav1.LabelSelectorAsSelector(w.ServiceSelector); err != nil {
				return nil, at("serviceSelector", err)
			}
		}
		if err := p.validate(); err != nil {
			return nil, fmt.Errorf("%s: pools[%d].%w", source, i, err)
		}
		out = append(out, p)
	}
	return out, nil
}

// Set is all pools, in the order in which they are tried.
type Set []*Pool

// Validate says whether pools can be used together: no two have a name or an address in common.
func (s Set) Validate() error {
	for i, p := range s {
		for _, o := range s[:i] {
			if p.Name == o.Name {
				return fmt.Errorf("there are two pools named %s", p.Name)
			}
			for _, a := range p.Ranges {
				for _, b := range o.Ranges {
					if a.overlaps(b) {
						return fmt.Errorf("pool %s: %s overlaps %s of pool %s", p.Name, a, b, o.Name)
					}
				}
			}
		}
		for j, a := range p.Ranges {
			for _, b := range p.Ranges[:j] {
				if a.overlaps(b) {
					return fmt.Errorf("pool %s: %s overlaps %s", p.Name, a, b)
				}
			}
		}
	}
	return nil
}

// Of is the pool that an address is of, nil for none.
func (s Set) Of(a netip.Addr) *Pool {
	for _, p := range s {
		if p.Contains(a) {
			return p
		}
	}
	return nil
}

// Named is the pool of a name, nil for none.
func (s Set) Named(name string) *Pool {
	for _, p := range s {
		if p.Name == name {
			return p
		}
	}
	return nil
}

func (s Set) names() string {
	if len(s) == 0 {
		return "there are no pools"
	}
	var out []string
	for _, p := range s {
		kind := "external"
		if p.Internal {
			kind = "internal"
		}
		out = append(out, p.Name+" ("+kind+")")
	}
	return "the pools are " + strings.Join(out, ", ")
}

package console

import (
	"maps"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
)

func (f *feed) putRange(from *networkingv1.ServiceCIDR) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ranges[from.Name] = from.Spec.CIDRs
	f.setRanges()
}

func (f *feed) dropRange(from *networkingv1.ServiceCIDR) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.ranges, from.Name)
	f.setRanges()
}

func (f *feed) replaceRanges(_ string, list []*networkingv1.ServiceCIDR) {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.ranges)
	for _, one := range list {
		f.ranges[one.Name] = one.Spec.CIDRs
	}
	f.setRanges()
	f.listed("servicecidrs/")
}

func (f *feed) setRanges() {
	names := slices.Sorted(maps.Keys(f.ranges))
	// The cluster's own comes first.
	slices.SortStableFunc(names, func(a, b string) int {
		switch {
		case a == b:
			return 0
		case a == "kubernetes":
			return -1
		case b == "kubernetes":
			return 1
		}
		return 0
	})
	var all []string
	for _, name := range names {
		all = append(all, f.ranges[name]...)
	}
	if !slices.Equal(all, f.status.Ranges) {
		f.status.Ranges = all
		f.statusRev = f.bumpAll()
	}
}

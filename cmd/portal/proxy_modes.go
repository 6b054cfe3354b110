package main

import (
	"slices"

	"portal/internal/proxy/backend"
	"portal/internal/proxy/iptables"
	"portal/internal/proxy/ipvs"
	"portal/internal/proxy/nftables"
	"portal/internal/proxy/userspace"
)

// proxyModes are the modes that there are.
func proxyModes(o *proxyOptions) []backend.Mode {
	mark := uint32(1) << o.masqueradeBit
	overIPVS := o.ipvs
	overIPVS.Mark = mark
	return []backend.Mode{
		nftables.New(nftables.Options{Mark: mark}),
		iptables.New(iptables.Options{Mark: mark}),
		ipvs.New(overIPVS),
		userspace.New(o.userspace),
	}
}

func proxyModeNames() []string {
	var out []string
	for _, m := range proxyModes(&proxyOptions{}) {
		out = append(out, m.Name())
	}
	return out
}

func knownMode(name string) bool {
	return name == "" || name == "auto" || slices.Contains(proxyModeNames(), name)
}

package proxy

import (
	"net/netip"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

// Facts are what the proxy of a node with this configuration plans with, for those who ask about the node from elsewhere.
func (c *Config) Facts(node *intent.Node, have hostnet.Addresses, services []netip.Prefix, traits plan.Traits) *plan.Facts {
	return c.facts(node, have, services, traits)
}

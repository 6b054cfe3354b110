// Package plan decides what becomes of traffic to Services on one node. It is pure: intent and the node's facts go in, a
// Snapshot comes out, and nothing is read or done besides. Every rule about traffic (policies, terminating endpoints,
// topology, hairpin, source ranges, load-balancer short cuts, rejection) is settled here, once; a mode of the proxy only
// encodes a Snapshot, and package oracle says for any packet what a Snapshot means.
package plan

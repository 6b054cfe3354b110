package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
)

// workload is the shape of the Services of a round; the same for every subject.
type workload struct {
	name string
	// dualStack Services have addresses and endpoints of both families.
	dualStack bool
	service   func(i int) serviceSpec
}

// serviceSpec is what distinguishes one Service from another.
type serviceSpec struct {
	ports     int
	endpoints int
	affinity  bool
	// kind is ClusterIP, NodePort or LoadBalancer.
	kind string
	// local Services have the policy Local: for traffic from outside if they can have any, else for traffic inside.
	local bool
}

func uniform(endpoints int) workload {
	name := fmt.Sprintf("1 port × %d endpoints", endpoints)
	return workload{name: name, service: func(int) serviceSpec {
		return serviceSpec{ports: 1, endpoints: endpoints, kind: "ClusterIP"}
	}}
}

const maxEndpoints = 200

// mixed is a realistic mix: mostly small Services with one port, some with many endpoints, affinity, node ports, load
// balancers and Local policies, all of them dual stack.
func mixed(seed uint64) workload {
	return workload{name: "mixed Services", dualStack: true, service: func(i int) serviceSpec {
		r := rand.New(rand.NewPCG(seed, uint64(i))) // its own, so that a Service does not depend on how many there are
		var s serviceSpec
		s.ports = 1 + pick(r.Float64(), 0.60, 0.25, 0.10)
		// A Pareto distribution: half have one endpoint, one in a hundred more than 65.
		s.endpoints = int(min(math.Pow(1-r.Float64(), -1/1.1), maxEndpoints))
		s.affinity = r.Float64() < 0.10
		s.kind = []string{"NodePort", "LoadBalancer", "ClusterIP"}[pick(r.Float64(), 0.10, 0.10)]
		s.local = r.Float64() < 0.05
		return s
	}}
}

// pick is the number of the share that x, from 0 to 1, falls into; the last share is what remains.
func pick(x float64, shares ...float64) int {
	for i, share := range shares {
		if x -= share; x < 0 {
			return i
		}
	}
	return len(shares)
}

// freshFrom is the first number of Pods that replace others. Those below belong to Services, maxEndpoints to each.
const freshFrom = 7 << 20

// podAddr is the address of a Pod by its number.
func podAddr(i int) string { return fmt.Sprintf("10.%d.%d.%d", 128+i>>16&127, i>>8&255, i&255) }

func podAddr6(i int) string {
	return netip.MustParseAddr(fmt.Sprintf("fd00:80::%x:%x", i>>16, i&0xffff)).String() // in the canonical form
}

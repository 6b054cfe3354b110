//go:build peers

package test

import "testing"

// TestPeersLoadBalancer: `portal lb` gives addresses in Kubernetes' own API as in Portal's.
func TestPeersLoadBalancer(t *testing.T) { balancerLeaders(t, startKubernetes(t)) }

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// subset are tests from which a change that breaks Services for Pods can hardly hide, and that take a few minutes together: the way from a
// selector to what a Pod is answered, by address, name and variable, while Pods and Services change.
var subset = []string{
	"[sig-network] Services should serve a basic endpoint from pods [Conformance]",
	"[sig-network] Services should serve multiport endpoints from pods [Conformance]",
	"[sig-network] Services should be able to change the type from ExternalName to NodePort [Conformance]",
	"[sig-network] Services should have session affinity work for service with type clusterIP [LinuxOnly] [Conformance]",
	"[sig-network] Services should be able to create a functioning NodePort service [Conformance]",
	"[sig-network] Services should serve endpoints on same port and different protocols [Conformance]",
	"[sig-network] EndpointSlice should create Endpoints and EndpointSlices for Pods matching a Service [Conformance]",
	"[sig-network] DNS should provide DNS for services [Conformance]",
	"[sig-network] DNS should provide DNS for ExternalName services [Conformance]",
	"[sig-network] HostPort validates that there is no conflict between pods with same hostPort but different hostIP and protocol [LinuxOnly] [Conformance]",
	"[sig-network] Services should be able to switch session affinity for NodePort service [LinuxOnly] [Conformance]",
	"[sig-network] Services should allow pods to hairpin back to themselves through services",
	"[sig-network] Services should fallback to local terminating endpoints when there are no ready endpoints with internalTrafficPolicy=Local",
	"[sig-network] DNS should provide DNS for pods for Subdomain [Conformance]",
	"[sig-network] Networking Granular Checks: Pods should function for intra-pod communication: http [Conformance] [NodeConformance]",
	"[sig-network] Proxy version v1 A set of valid responses are returned for both pod and service Proxy [Conformance]",
	"[sig-node] Container Lifecycle Hook when create a pod with lifecycle hook should execute prestop http hook properly [Conformance] [NodeConformance]",
	"[sig-apps] Daemon set should run and stop simple daemon [Conformance] [Serial]",
	"[sig-node] Pods should contain environment variables for services [Conformance] [NodeConformance]",
	"[sig-apps] Deployment RollingUpdateDeployment should delete old pods and create new ones [Conformance]",
}

// TestSubset runs the subset in a lab: what `make test` has of `make test-e2e`.
func TestSubset(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("a lab needs root")
	}
	if _, err := os.Stat(suite()); err != nil {
		t.Fatalf("%v: run make %s", err, filepath.Join(".cache", "e2e", "e2e.test"))
	}
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	mode := modes[0]
	all = inMode(all, mode)
	var wanted []test
	for _, name := range subset {
		at := slices.IndexFunc(all, func(one test) bool { return one.name == name })
		if at < 0 || all[at].size() != labNodes {
			t.Errorf("tests.txt has no such test, or it does not run in the mode %s with %d nodes: %s", mode, labNodes, name)
			continue
		}
		wanted = append(wanted, all[at])
	}
	laboratory{mode, announcements[0], labNodes}.run(t, wanted)
}

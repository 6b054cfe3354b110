//go:build peers

package test

import (
	"testing"

	"portal/test/harness"
)

// TestPeersDNSConformance: `portal dns` answers the recorded queries from Kubernetes' own API as it does from Portal's.
func TestPeersDNSConformance(t *testing.T) { dnsConformance(t, startKubernetes(t)) }

// startKubernetes runs Kubernetes' own API server until the test ends.
func startKubernetes(t *testing.T) *harness.API {
	t.Helper()
	need(t, harness.Peer("kube-apiserver"), "peers")
	api, err := harness.StartKubeAPIServer(t.TempDir(), startEtcd(t, 1)[0].ClientURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	return api
}

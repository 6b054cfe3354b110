package test

import (
	"encoding/json"
	"net/http"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestSystemNamespaces: the namespaces that the system lives in can't be deleted, as in Kubernetes; that of nodes' Leases can,
// and comes back when it has gone.
func TestSystemNamespaces(t *testing.T) {
	t.Parallel()
	api := startPortal(t)
	who := admin(t, api)
	const all = "/api/v1/namespaces"
	get := func(name string) (ns corev1.Namespace, code int) {
		t.Helper()
		code, answer := who.ask(t, "GET", all+"/"+name, "")
		if code == http.StatusOK {
			if err := json.Unmarshal([]byte(answer), &ns); err != nil {
				t.Fatal(err)
			}
		}
		return ns, code
	}
	refused := func(path string, want int) {
		t.Helper()
		for _, query := range []string{"", "?gracePeriodSeconds=0", "?propagationPolicy=Orphan"} {
			if code, answer := who.ask(t, "DELETE", path+query, ""); code != want {
				t.Errorf("DELETE %s%s: %d %s", path, query, code, answer)
			}
		}
	}
	refused(all, http.StatusMethodNotAllowed)
	for _, name := range []string{"default", "kube-system", "kube-public"} {
		before, code := get(name)
		if code != http.StatusOK {
			t.Fatalf("%s: %d", name, code)
		}
		refused(all+"/"+name, http.StatusForbidden)
		if after, code := get(name); code != http.StatusOK || after.UID != before.UID || after.DeletionTimestamp != nil || after.Status.Phase != corev1.NamespaceActive {
			t.Errorf("%s: %d %+v", name, code, after)
		}
	}
	const leases = corev1.NamespaceNodeLease
	before, _ := get(leases)
	if code, answer := who.ask(t, "DELETE", all+"/"+leases, ""); code != http.StatusOK {
		t.Fatalf("DELETE %s: %d %s", leases, code, answer)
	}
	waitFor(t, leases+" is back", func() bool {
		after, code := get(leases)
		return code == http.StatusOK && after.UID != before.UID && after.Status.Phase == corev1.NamespaceActive
	})
}

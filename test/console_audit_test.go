package test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// TestConsoleInAuditLog: requests that the console makes for a session name the address that its user comes from, and those of what the
// sessions of an account share name nobody's.
func TestConsoleInAuditLog(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "audit.log")
	api, _ := auditedServer(t, "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata, users: [alice]}]\n", "--audit-log-path", log)
	page := api.URL + "/console/api/"
	users := []string{"127.0.0.2", "127.0.0.3"}
	for _, from := range users {
		alice := browse(t)
		alice.Transport.(*http.Transport).DialContext = (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext
		within(t, "sign-in from "+from, func() error { // the console may still be starting
			if code, answer := sendJSON(t, alice, page+"signin", `{"token":"alices"}`); code != http.StatusOK {
				return fmt.Errorf("%d %s", code, answer)
			}
			return nil
		})
		// It is made from what is shared, and asks for the settings of proxies itself.
		code, body := getText(t, alice, page+"trace/default?from=192.0.2.1&to=kubernetes:443")
		var traced struct{ Verdict string }
		if err := json.Unmarshal([]byte(body), &traced); err != nil || code != http.StatusOK || traced.Verdict == "" {
			t.Fatalf("a trace from %s: %d %s", from, code, body)
		}
	}
	// By resource: the addresses that requests of the console name, the server's own excepted.
	within(t, "the audit log names those whom the console asks for", func() error {
		named, seen := map[string][]string{}, map[string]bool{}
		for _, event := range readEvents(t, log) {
			if event.ObjectRef == nil || event.UserAgent != "portal-console" {
				continue
			}
			seen[event.ObjectRef.Resource] = true
			named[event.ObjectRef.Resource] = append(named[event.ObjectRef.Resource], others(event)...)
		}
		for _, resource := range []string{"deployments", "services", "endpointslices"} {
			if len(named[resource]) > 0 {
				t.Errorf("shared watches of %s are logged as of %v", resource, named[resource])
			}
		}
		for _, resource := range []string{"selfsubjectreviews", "configmaps"} {
			if got := slices.Compact(slices.Sorted(slices.Values(named[resource]))); !slices.Equal(got, users) {
				return fmt.Errorf("requests for %s are logged as of %v, want %v", resource, got, users)
			}
		}
		if !seen["deployments"] {
			return fmt.Errorf("no shared watch is in the log: %v", seen)
		}
		return nil
	})
}

func others(event auditv1.Event) (out []string) {
	for _, ip := range event.SourceIPs {
		if !strings.HasPrefix(ip, "127.0.0.1") {
			out = append(out, ip)
		}
	}
	return out
}

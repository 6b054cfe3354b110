package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"portal/internal/audit"
)

// auditServer answers with reports as Portal's server does, or not at all, and gives a kubeconfig for it.
func auditServer(t *testing.T, get, post *audit.Report) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		report := get
		if r.Method == http.MethodPost {
			report = post
		}
		if r.URL.Path != "/portal/v1/audit" || report == nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(report)
	}))
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], ` +
		`clusters: [{name: c, cluster: {server: "` + server.URL + `"}}]}`
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAudit(t *testing.T) {
	missing := audit.Finding{
		Problem: audit.PortNotAllocated, Service: "shop/web", Claim: "port 30010", Message: "it has no claim", Remedy: "claim it", Repairable: true,
	}
	odd := audit.Finding{Problem: audit.PortClaimUnreadable, Claim: "/registry/nodeports/x", Message: "it can't be read", Remedy: "delete it"}
	clean := audit.Report{Revision: 12, Services: 1, Addresses: 2, Findings: []audit.Finding{}}
	broken := audit.Report{Revision: 12, Services: 3, Addresses: 3, Ports: 1, Findings: []audit.Finding{missing, odd}}
	repaired := audit.Report{
		Revision: 13, Services: 3, Addresses: 3, Ports: 2, Findings: []audit.Finding{odd},
		Repairs: []audit.Repair{{Finding: missing, Outcome: audit.Repaired}},
	}
	for _, c := range []struct {
		name      string
		get, post *audit.Report
		args      []string
		out, err  string
		usage     bool
	}{
		{name: "all sound", get: &clean, out: "1 Service, 2 addresses and 0 ports claimed at revision 12: all sound\n"},
		{name: "findings", get: &broken, out: `3 Services, 3 addresses and 1 port claimed at revision 12: 2 problems

PROBLEM              SERVICE   CLAIM                  WHAT IS WRONG     WHAT TO DO
PortNotAllocated     shop/web  port 30010             it has no claim   portal audit --repair, to claim it
PortClaimUnreadable  -         /registry/nodeports/x  it can't be read  delete it
`, err: "2 problems are left, of which --repair can repair 1"},
		{name: "repair", get: &broken, post: &repaired, args: []string{"--repair"}, out: `it has no claim: repaired
3 Services, 3 addresses and 2 ports claimed at revision 13: 1 problem

PROBLEM              SERVICE  CLAIM                  WHAT IS WRONG     WHAT TO DO
PortClaimUnreadable  -        /registry/nodeports/x  it can't be read  delete it
`, err: "1 problem is left for the administrator to repair"},
		{name: "repair of what is sound", post: &clean, args: []string{"--repair"},
			out: "1 Service, 2 addresses and 0 ports claimed at revision 12: all sound\n"},
		{name: "for programs", get: &clean, args: []string{"-o", "json"},
			out: "{\n  \"revision\": 12,\n  \"services\": 1,\n  \"addresses\": 2,\n  \"ports\": 0,\n  \"findings\": []\n}\n"},
		{name: "a server of Kubernetes' own", err: "has no /portal/v1/audit: it is not Portal's"},
		{name: "another format", get: &clean, args: []string{"-o", "yaml"}, err: `--output "yaml": must be json, or left out`, usage: true},
		{name: "an argument", get: &clean, args: []string{"all"}, err: `takes no arguments, only flags: "all"`, usage: true},
		{name: "no such kubeconfig", args: []string{"--kubeconfig", "/nowhere/at/all"}, err: "/nowhere/at/all", usage: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("KUBECONFIG", auditServer(t, c.get, c.post))
			root := newRootCommand()
			var out bytes.Buffer
			root.SetOut(&out)
			root.SetArgs(append([]string{"audit"}, c.args...))
			err := root.ExecuteContext(t.Context())
			if got := out.String(); got != c.out {
				t.Errorf("printed\n%s\nwant\n%s", got, c.out)
			}
			switch {
			case c.err == "" && err != nil, c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
				t.Errorf("error %v, want %q", err, c.err)
			case err != nil && strings.Contains(err.Error(), "\n"):
				t.Errorf("an error of several lines: %v", err)
			}
			if usage := errors.As(err, &usageError{}); usage != c.usage {
				t.Errorf("a mistake of usage: %v, want %v", usage, c.usage)
			}
		})
	}
}

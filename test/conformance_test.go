package test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"portal/internal/controllers/aggregation"
	"portal/test/harness"
)

// recorded are the folders of answers recorded from the real components, each with how Portal is asked the same.
var recorded = []struct {
	folder  string
	checker string
	golden  string
	// run starts the server under test and returns the environment by which the checker finds it.
	run func(t *testing.T) (env []string)
	// allowed are differences that a case may have, and why.
	allowed map[string]*regexp.Regexp
}{
	{
		folder: "api", checker: "run.py", golden: "cases.json", run: apiAlone,
		// The one timestamp that the checker compares: when the recording server was started.
		allowed: map[string]*regexp.Regexp{
			"cidr/default": regexp.MustCompile(`^step\[0\]\.object\.status\.conditions\[0\]\.lastTransitionTime: want "[^"]+", got "[^"]+"$`),
		},
	},
	{folder: "controllers", checker: "check.py", golden: "golden.json", run: withControllers},
	{folder: "rbac", checker: "run.py", golden: "cases.json", run: withAggregation},
	{folder: "rbac", checker: "run.py", golden: "generated.json", run: withAggregation},
}

func apiAlone(t *testing.T) []string {
	return []string{"KUBECONFIG=" + startPortal(t, "--controllers", "none").Kubeconfig}
}

// withControllers runs many cases at a time: each waits until nothing has changed for a second.
func withControllers(t *testing.T) []string {
	return []string{"KUBECONFIG=" + startPortal(t).Kubeconfig, "JOBS=16"}
}

// withAggregation runs the one controller that the cases about roles wait for.
func withAggregation(t *testing.T) []string {
	return []string{"KUBECONFIG=" + startPortal(t, "--controllers", aggregation.Name).Kubeconfig}
}

// TestConformance asks what the real components were asked, and requires their answers.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, r := range recorded {
		t.Run(r.folder+"/"+r.golden, func(t *testing.T) {
			t.Parallel()
			folder := harness.Recorded(r.folder)
			if _, err := exec.LookPath("python3"); err != nil {
				t.Fatal("python3 is needed for the checkers of the recorded answers: ", err)
			}
			env := append(r.run(t), "PYTHONDONTWRITEBYTECODE=1")
			args := []string{filepath.Join(folder, r.checker), "check", filepath.Join(folder, r.golden)}
			// The checker's exit status says only what its lines say too.
			out, err := harness.Run(context.Background(), env, "python3", args...)
			failed, passed := harness.Failures(out)
			for _, f := range failed {
				if pattern := r.allowed[f.Name]; pattern == nil || !pattern.MatchString(strings.Join(f.Lines, "\n")) {
					t.Errorf("%s\n  %s", f.Name, strings.Join(f.Lines, "\n  "))
				}
			}
			if passed == 0 {
				t.Fatalf("nothing passed: %v\n%s", err, out)
			}
		})
	}
}

// TestRecordedFoldersAreKnown fails if no test uses a folder of recorded answers. Some are used elsewhere.
func TestRecordedFoldersAreKnown(t *testing.T) {
	elsewhere := map[string]string{
		"dns":       "TestDNSConformance",
		"env":       "TestNodeServiceVariables",
		"dataplane": "TestDataplaneConformance",
	}
	entries, err := os.ReadDir(harness.Recorded())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		known := !e.IsDir() || elsewhere[e.Name()] != "" || strings.HasPrefix(e.Name(), "_")
		for _, r := range recorded {
			known = known || r.folder == e.Name()
		}
		if !known {
			t.Errorf("test/recorded/%s is used by no test", e.Name())
		}
	}
}

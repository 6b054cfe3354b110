package e2e

import (
	"bytes"
	"context"
	"encoding/xml"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"portal/test/harness"
)

var (
	atOnce  = flag.Int("e2e.jobs", 4, "how many tests run at a time; those marked [Serial] run alone")
	reports = flag.String("e2e.reports", filepath.Join(harness.Root(), ".cache", "e2e", "reports"), "the folder for each test's log and JUnit report")
)

// suite is the program that `make` built from Kubernetes' sources.
func suite() string { return filepath.Join(harness.Root(), ".cache", "e2e", "e2e.test") }

// kubectl makes a program that is kubectl.
func kubectl(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubectl")
	script := fmt.Sprintf("#!/bin/sh\nexec %q kubectl \"$@\"\n", harness.Portal())
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// runner runs tests against one cluster.
type runner struct {
	// flags are those that say where the cluster is, and what it is like.
	flags []string
	// start runs a test's command in the right place.
	start func(test, *exec.Cmd) error
	// reports is the folder for logs and reports.
	reports string

	total  int
	done   atomic.Int32
	mu     sync.Mutex
	failed []string
}

// run runs tests, several at a time, and those that want to be alone after the others.
func (r *runner) run(t *testing.T, wanted []test) {
	t.Helper()
	for _, one := range wanted {
		if err := os.RemoveAll(r.folder(one)); err != nil {
			t.Fatal(err)
		}
	}
	r.total = len(wanted)
	alone := func(one test) bool {
		return strings.Contains(one.name, "[Serial]") || strings.Contains(one.name, "[Disruptive]")
	}
	jobs := make(chan test)
	var workers sync.WaitGroup
	for range *atOnce {
		workers.Go(func() {
			for one := range jobs {
				r.try(one)
			}
		})
	}
	for _, one := range wanted {
		if !alone(one) {
			jobs <- one
		}
	}
	close(jobs)
	workers.Wait()
	for _, one := range wanted {
		if alone(one) {
			r.try(one)
		}
	}
	for _, name := range r.failed {
		t.Errorf("failed: %s", name)
	}
}

// try runs one test and prints how it ended.
func (r *runner) try(one test) {
	start := time.Now()
	err := r.execute(one)
	took := time.Since(start).Round(100 * time.Millisecond)
	number := r.done.Add(1)
	if err == nil {
		fmt.Printf("%3d/%d ok    %6s  %s\n", number, r.total, took, one.name)
		return
	}
	fmt.Printf("%3d/%d FAIL  %6s  %s\n%v\n", number, r.total, took, one.name, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, one.name)
}

var (
	tags    = regexp.MustCompile(`\[[^]]*\]`)
	unusual = regexp.MustCompile(`[^a-zA-Z0-9]+`)
)

// folder is where a test's log and report are. No two tests differ in nothing but their tags.
func (r *runner) folder(one test) string {
	return filepath.Join(r.reports, strings.Trim(unusual.ReplaceAllString(tags.ReplaceAllString(one.name, ""), "-"), "-"))
}

// execute runs one test in a process. It is an error if the test did not run, or skipped itself.
func (r *runner) execute(one test) error {
	dir := r.folder(one)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// The suite leaves files behind.
	temp, err := os.MkdirTemp("", "e2e")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, suite(), append([]string{
		"--provider=skeleton", "--node-os-distro=custom",
		"--report-dir=" + dir, "--dump-logs-on-failure=false", "--e2e-output-dir=" + dir,
		"--ginkgo.no-color", "--ginkgo.v", "--ginkgo.timeout=25m", "--ginkgo.focus= " + regexp.QuoteMeta(one.name) + "$"}, r.flags...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG=", "TMPDIR="+temp)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, 10*time.Second
	failure := r.start(one, cmd)
	log := filepath.Join(dir, "log")
	if err := os.WriteFile(log, out.Bytes(), 0o644); err != nil {
		return err
	}
	state, message, err := outcome(dir)
	switch {
	case failure == nil && err == nil && state == "passed":
		return nil
	case err != nil:
		return fmt.Errorf("      %v\n      %s", err, log)
	default:
		return fmt.Errorf("      %s: %s\n      %s", state, message, log)
	}
}

// outcome reads a report of one test.
func outcome(dir string) (state, message string, err error) {
	data, err := os.ReadFile(filepath.Join(dir, "junit_01.xml"))
	if err != nil {
		return "", "", err
	}
	var report struct {
		Suites []struct {
			Cases []struct {
				Name    string `xml:"name,attr"`
				Status  string `xml:"status,attr"`
				Failure string `xml:"failure"`
				Skipped struct {
					Message string `xml:"message,attr"`
				} `xml:"skipped"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(data, &report); err != nil {
		return "", "", err
	}
	ran := 0
	for _, suite := range report.Suites {
		for _, one := range suite.Cases {
			switch {
			case !strings.HasPrefix(one.Name, "[It] ") && one.Status != "passed":
				return one.Status, one.Name + ": " + one.Failure, nil // of the suite itself
			case !strings.HasPrefix(one.Name, "[It] ") || one.Status == "skipped" && one.Skipped.Message == "skipped":
				// A test that was not asked for.
			default:
				ran++
				state, message = one.Status, one.Failure+one.Skipped.Message
			}
		}
	}
	if ran != 1 {
		return "", "", fmt.Errorf("%d tests ran instead of one", ran)
	}
	return state, message, nil
}

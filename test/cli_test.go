package test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"portal/test/harness"
)

// TestCLI runs transcripts of what a person types and what Portal prints. Besides testscript's own commands there are
// `ready PORT`, which waits for a server, `terminate`, which stops all programs in the background, and `mode MODE FILE`.
func TestCLI(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	bin := terminal(t, []string{harness.Portal(), "kubectl"})
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "cli"),
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", bin+":"+os.Getenv("PATH"))
			env.Setenv("HOME", env.WorkDir)
			for i := range 3 {
				env.Setenv(fmt.Sprintf("PORT%d", i+1), fmt.Sprint(harness.FreePort()))
			}
			return nil
		},
		Condition: func(condition string) (bool, error) {
			if condition != "root" {
				return false, fmt.Errorf("there is no condition %q", condition)
			}
			return os.Geteuid() == 0, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"ready": func(ts *testscript.TestScript, _ bool, args []string) {
				ts.Check(harness.WaitURL("https://127.0.0.1:"+args[0]+"/readyz", 30*time.Second))
			},
			"terminate": func(ts *testscript.TestScript, _ bool, _ []string) {
				for _, cmd := range ts.BackgroundCmds() {
					ts.Check(cmd.Process.Signal(syscall.SIGTERM))
				}
			},
			"mode": func(ts *testscript.TestScript, _ bool, args []string) {
				info, err := os.Stat(ts.MkAbs(args[1]))
				ts.Check(err)
				if found := fmt.Sprintf("%o", info.Mode().Perm()); found != args[0] {
					ts.Fatalf("%s has mode %s, want %s", args[1], found, args[0])
				}
			},
		},
	})
}

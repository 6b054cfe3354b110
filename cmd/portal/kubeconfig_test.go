package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestKubeconfigMistakes: the error names the flag or variable, and what is wrong with the file.
func TestKubeconfigMistakes(t *testing.T) {
	garbage, absent := write(t, "garbage", "nonsense"), filepath.Join(t.TempDir(), "absent")
	for _, c := range []struct{ flag, variable, want string }{
		{flag: garbage, want: "--kubeconfig " + garbage + ": it is not a kubeconfig"},
		{flag: absent, want: "--kubeconfig: stat " + absent},
		{variable: absent, want: "KUBECONFIG: stat " + absent},
		{variable: absent + string(filepath.ListSeparator) + absent + "2", want: "KUBECONFIG: stat " + absent},
	} {
		t.Setenv("KUBECONFIG", c.variable)
		t.Setenv("HOME", t.TempDir())
		if _, err := apiConfig(c.flag); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("--kubeconfig %q, KUBECONFIG=%q: %v; want %q", c.flag, c.variable, err, c.want)
		}
	}
}

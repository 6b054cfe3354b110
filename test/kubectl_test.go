package test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// TestKubectl runs transcripts with each kubectl. Every transcript has a namespace of its own.
func TestKubectl(t *testing.T) {
	t.Parallel()
	for variant, command := range kubectls(t) {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			api := startPortal(t, "--controllers", "none")
			bin := terminal(t, command)
			testscript.Run(t, testscript.Params{
				Dir:                 filepath.Join("testdata", "kubectl"),
				RequireExplicitExec: true,
				Setup: func(env *testscript.Env) error {
					return enter(t, env, api, bin)
				},
			})
		})
	}
}

// terminal makes a folder for PATH with the kubectl under test, and Portal.
func terminal(t *testing.T, kubectl []string) string {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\nexec " + strings.Join(kubectl, " ") + ` "$@"` + "\n"
	if err := os.WriteFile(filepath.Join(dir, "kubectl"), []byte(script), 0o700); err != nil { //nolint:gosec // it is to be run
		t.Fatal(err)
	}
	if err := os.Symlink(harness.Portal(), filepath.Join(dir, "portal")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// enter creates a transcript's namespace and a kubeconfig with that as its default.
func enter(t *testing.T, env *testscript.Env, api *harness.API, bin string) error {
	space := "ns-" + strings.ReplaceAll(strings.ToLower(filepath.Base(env.WorkDir)), "_", "-")
	_, err := connect(t, api.Kubeconfig).CoreV1().Namespaces().Create(context.Background(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: space}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	config, err := clientcmd.LoadFromFile(api.Kubeconfig)
	if err != nil {
		return err
	}
	for _, c := range config.Contexts {
		c.Namespace = space
	}
	path := filepath.Join(env.WorkDir, ".kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		return err
	}
	env.Setenv("PATH", fmt.Sprintf("%s:%s", bin, os.Getenv("PATH")))
	env.Setenv("HOME", env.WorkDir)
	env.Setenv("KUBECONFIG", path)
	env.Setenv("NS", space)
	env.Setenv("SERVER", api.URL)
	return nil
}

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
)

// TestStorageOfKubeconfig: the storage is that of $KUBECONFIG, as the server is that other commands ask.
func TestStorageOfKubeconfig(t *testing.T) {
	own, other := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(own, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv(dataDirVariable, other)
	for _, c := range []struct{ flag, kubeconfig, want string }{
		{"", "", other},
		{"", filepath.Join(own, adminKubeconfig), own},
		{other, filepath.Join(own, adminKubeconfig), other},
		{"", filepath.Join(own, "another"), other},
		{"", filepath.Join(other, adminKubeconfig), other},
	} {
		t.Setenv("KUBECONFIG", c.kubeconfig)
		o := storageOptions{dataDir: c.flag}
		if got := filepath.Clean(o.localDataDir()); got != c.want {
			t.Errorf("--data-dir %q, KUBECONFIG=%q: %s, want %s", c.flag, c.kubeconfig, got, c.want)
		}
	}
	// Of a server elsewhere there are no files here: it is asked.
	kubeconfig := filepath.Join(other, "elsewhere")
	text := `{"kind":"Config","apiVersion":"v1","clusters":[{"name":"a","cluster":{"server":"https://127.0.0.1:1"}}],"contexts":[{"name":"a","context":{"cluster":"a"}}],"current-context":"a"}`
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", kubeconfig)
	k, err := (&storageOptions{}).open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if s, ok := k.(serverStorage); !ok || s.host != "https://127.0.0.1:1" {
		t.Errorf("got %#v", k)
	}
}

// TestDataDirVariable: servers keep their data where other commands look for it.
func TestDataDirVariable(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(dataDirVariable, dir)
	for _, command := range []*cobra.Command{newUpCommand(), newServerCommand()} {
		if got := command.Flag("data-dir").DefValue; got != dir {
			t.Errorf("portal %s: --data-dir is %s, want %s", command.Name(), got, dir)
		}
	}
}

// Package test has the tests of the whole: the binary that `make build` made, run as a process and used as users do. They
// expect to run as root and to find .cache/bin/portal and .cache/peers/etcd.
package test

import (
	"os"
	"testing"

	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// need fails the test if a file is missing that `make` should have built: a skipped test would look like one that passed.
func need(t testing.TB, path, target string) {
	t.Helper()
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run `make %s` first", err, target)
	}
}

// shared is a path of the material beside the repository. A plain clone has none, and skips the test.
func shared(t testing.TB, path ...string) string {
	t.Helper()
	full := harness.Shared(path...)
	if full == "" {
		t.Skipf("../shared/%v does not exist: a plain clone has nothing to compare with", path)
	}
	return full
}

// startPortal runs a server in a folder of its own until the test ends.
func startPortal(t testing.TB, args ...string) *harness.API {
	t.Helper()
	need(t, harness.Portal(), "build")
	api, err := harness.StartPortal(t.TempDir(), args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	return api
}

// startEtcd runs an etcd cluster until the test ends.
func startEtcd(t testing.TB, members int) []*harness.Etcd {
	t.Helper()
	need(t, harness.Peer("etcd"), ".cache/peers/etcd")
	cluster, err := harness.StartEtcd(t.TempDir(), members)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range cluster {
		t.Cleanup(func() { m.Kill() })
	}
	return cluster
}

// connect returns a client of a server, without client-side rate limits.
func connect(t testing.TB, kubeconfig string) *kubernetes.Clientset {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1
	config.WarningHandler = restclient.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// Package test has the tests of the whole: the binary that `make build` made, run as a process and talked to as users
// do. They expect to be root and to find .cache/bin/portal and .cache/peers/etcd.
package test

import (
	"os"
	"testing"

	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// need ends the test when a file that `make` should have made is not there: a test that was skipped for want of it
// would look like one that passed.
func need(t testing.TB, path, target string) {
	t.Helper()
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run `make %s` first", err, target)
	}
}

// shared is a path of the material beside the repository. A clone that stands alone has none, and tests what it can.
func shared(t testing.TB, path ...string) string {
	t.Helper()
	full := harness.Shared(path...)
	if full == "" {
		t.Skipf("../shared/%v is not there: a clone that stands alone has nothing to compare with", path)
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

// connect is a client of a server, without the limits that a polite one has.
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

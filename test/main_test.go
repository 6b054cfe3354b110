// Package test has the tests of the whole: the binary that `make build` made, run as a process and used as users do. They
// expect to run as root and to find .cache/bin/portal and .cache/peers/etcd.
package test

import (
	"flag"
	"os"
	"runtime"
	"strconv"
	"testing"

	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// besideEachOther has more tests beside each other than there are processors, unless -parallel says how many: those that call t.Parallel
// wait for time-outs, Leases and other processes most of the time. A test that measures, or needs the processors for itself, doesn't call it.
func besideEachOther() {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(runtime.GOMAXPROCS(0)+2)); err != nil {
		panic(err)
	}
}

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

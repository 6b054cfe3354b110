package store

import (
	"io"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/storage"
)

// external runs an etcd that listens, on files of its own.
func external(t *testing.T, dir, address string) *embed.Etcd {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir, cfg.InitialCluster = memberName, dir, initialCluster
	cfg.ListenPeerUrls = nil
	listen := url.URL{Scheme: "http", Host: address}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{listen}, []url.URL{listen}
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	etcd, err := embed.StartEtcd(cfg)
	must(t, err)
	<-etcd.Server.ReadyNotify()
	return etcd
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

// An etcd that is restored to an older revision under a running server: caches start over and serve the new history,
// instead of keeping the lost one and waiting for revisions to come.
func TestRestoredUnderARunningServer(t *testing.T) {
	address := freeAddress(t)
	etcd := external(t, t.TempDir(), address)
	opts := DefaultOptions()
	opts.Servers = []string{"http://" + address}
	s, err := Open(t.Context(), opts)
	must(t, err)
	t.Cleanup(s.Close)
	cached := storageOf(t, options(t, s), configMaps)
	create := func(name string) error {
		return cached.Create(t.Context(), "/configmaps/"+name, object(name, name), &corev1.ConfigMap{}, 0)
	}
	names := func() (out []string, err error) {
		var list corev1.ConfigMapList
		err = cached.GetList(t.Context(), "/configmaps/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, &list)
		for i := range list.Items {
			out = append(out, list.Items[i].Name)
		}
		return out, err
	}
	must(t, create("kept"))
	file := filepath.Join(t.TempDir(), "backup")
	_, err = SaveSnapshot(file, func(w io.Writer) error { return s.Snapshot(t.Context(), w) })
	must(t, err)
	for _, name := range []string{"lost-1", "lost-2", "lost-3", "lost-4"} {
		must(t, create(name))
	}
	if got, err := names(); err != nil || len(got) != 5 {
		t.Fatalf("before: %v, %v", got, err)
	}
	history := s.History()
	// A watch of what is no object, from before the restore.
	watching := s.Client().Watch(t.Context(), Prefix+"/portal/", clientv3.WithPrefix())

	etcd.Close()
	dir := filepath.Join(t.TempDir(), "restored")
	// As etcd's own command does it without --bump-revision.
	must(t, snapshot.NewV3(zap.NewNop()).Restore(snapshot.RestoreConfig{
		SnapshotPath: file, OutputDataDir: dir, Name: memberName, InitialCluster: initialCluster, PeerURLs: []string{peerURL},
	}))
	etcd = external(t, dir, address)
	t.Cleanup(etcd.Close)

	want := []string{"kept", "new"}
	created := false
	var got []string
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if !created {
			created = create("new") == nil
		}
		got, err = names()
		if created && err == nil && slices.Equal(got, want) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the restore: %v, %v, want %v", got, err, want)
		}
	}
	if history.Err() == nil {
		t.Error("the old history did not end")
	}
	select {
	case event, open := <-watching:
		if open {
			t.Errorf("the watch of the old history brings %+v", event)
		}
	case <-time.After(10 * time.Second):
		t.Error("a watch of the old history goes on, and waits for revisions that may come in hours")
	}
}

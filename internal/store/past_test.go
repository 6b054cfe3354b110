package store

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// TestWatchAcrossRestart: who watched before a restart hears what happened since. Nobody is shown the state of before, and a version
// from before the last compaction has expired.
func TestWatchAcrossRestart(t *testing.T) {
	opts := DefaultOptions()
	opts.Dir = t.TempDir()
	before := openWith(t, opts)
	cached := storageOf(t, options(t, before.Store), configMaps)
	create(t, cached, "first")
	versions := map[string]string{"first": versionOf(t, cached, "first")}
	if _, err := before.Client().Compact(t.Context(), revisionOf(t, versions["first"])); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"second", "third"} {
		create(t, cached, name)
		versions[name] = versionOf(t, cached, name)
	}
	before.end()

	for range 2 { // also after a restart in which nothing was written
		after := openWith(t, opts)
		cached = storageOf(t, options(t, after.Store), configMaps)
		var list corev1.ConfigMapList
		must(t, cached.GetList(t.Context(), "/configmaps", storage.ListOptions{ResourceVersion: "0", Predicate: storage.Everything, Recursive: true}, &list))
		if len(list.Items) != 3 {
			t.Errorf("%d objects from the watch cache, want 3", len(list.Items))
		}
		events, err := cached.Watch(t.Context(), "/configmaps", storage.ListOptions{ResourceVersion: versions["first"], Predicate: storage.Everything, Recursive: true})
		must(t, err)
		for _, name := range []string{"second", "third"} {
			event := next(t, events)
			if got, ok := event.Object.(*corev1.ConfigMap); !ok || event.Type != watch.Added || got.Name != name || got.ResourceVersion != versions[name] {
				t.Fatalf("got %s %v, want %s", event.Type, event.Object, name)
			}
		}
		events.Stop()
		events, err = cached.Watch(t.Context(), "/configmaps", storage.ListOptions{ResourceVersion: fmt.Sprint(revisionOf(t, versions["first"]) - 1), Predicate: storage.Everything, Recursive: true})
		if err == nil {
			if event := next(t, events); event.Type != watch.Error {
				t.Errorf("from before the compaction: %s %v, want an error", event.Type, event.Object)
			}
			events.Stop()
		}
		after.end()
	}
}

func versionOf(t *testing.T, s storage.Interface, name string) string {
	t.Helper()
	var cm corev1.ConfigMap
	must(t, s.Get(t.Context(), "/configmaps/"+name, storage.GetOptions{}, &cm))
	return cm.ResourceVersion
}

func revisionOf(t *testing.T, version string) (out int64) {
	t.Helper()
	_, err := fmt.Sscan(version, &out)
	must(t, err)
	return out
}

func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	select {
	case event := <-w.ResultChan():
		return event
	case <-time.After(30 * time.Second):
		t.Fatal("no event")
		return watch.Event{}
	}
}

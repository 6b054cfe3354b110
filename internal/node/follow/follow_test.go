package follow

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

func await(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestFollow: many who hold one object share a watch, are told of changes and of nothing else, and the watch ends with the last of them.
func TestFollow(t *testing.T) {
	client := fake.NewClientset()
	var watches atomic.Int32
	client.PrependWatchReactor("*", func(a ktesting.Action) (bool, watch.Interface, error) {
		watches.Add(1)
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	f := New(ctx, client, slog.New(slog.DiscardHandler))
	key := Key{ConfigMap, "ns", "settings"}
	if _, known := f.Get(key); known {
		t.Error("nobody holds it")
	}
	var told atomic.Int32
	var releases []func()
	for range 200 {
		releases = append(releases, f.Hold(key, func() { told.Add(1) }))
	}
	await(t, "the object was not asked for", func() bool { _, known := f.Get(key); return known })
	if value, _ := f.Get(key); value != nil {
		t.Errorf("%v", value)
	}
	await(t, "no watch", func() bool { return watches.Load() == 1 })
	maps := client.CoreV1().ConfigMaps("ns")
	create := func(c *corev1.ConfigMap) {
		t.Helper()
		if _, err := maps.Create(ctx, c, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings", Namespace: "ns"}, Data: map[string]string{"a": "1"}})
	await(t, "it did not appear", func() bool { value, _ := f.Get(key); return value != nil && value.(*corev1.ConfigMap).Data["a"] == "1" })
	await(t, "not all were told", func() bool { return told.Load() == 400 })
	// A label changes nothing for those who hold it.
	if _, err := maps.Update(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings", Namespace: "ns", Labels: map[string]string{"x": "y"}}, Data: map[string]string{"a": "1"}}, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the label did not come", func() bool { value, _ := f.Get(key); return value.GetLabels()["x"] == "y" })
	if told.Load() != 400 {
		t.Errorf("told %d times", told.Load())
	}
	if err := maps.Delete(ctx, "settings", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "it did not go", func() bool { value, known := f.Get(key); return known && value == nil })
	if watches.Load() != 1 || f.Watching() != 1 {
		t.Errorf("%d watches of %d objects", watches.Load(), f.Watching())
	}
	for _, release := range releases {
		release()
		release() // twice does no harm
	}
	if f.Watching() != 0 {
		t.Error("it is still followed")
	}

	// What never changes is not watched.
	create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "fixed", Namespace: "ns"}, Immutable: ptr.To(true)})
	defer f.Hold(Key{ConfigMap, "ns", "fixed"}, func() {})()
	await(t, "it was not read", func() bool { value, _ := f.Get(Key{ConfigMap, "ns", "fixed"}); return value != nil })
	time.Sleep(50 * time.Millisecond)
	if watches.Load() != 1 {
		t.Errorf("%d watches", watches.Load())
	}
	// It may be another one by the time that somebody else comes, who must not be given the old one first.
	if err := maps.Delete(ctx, "fixed", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "fixed", Namespace: "ns"}, Immutable: ptr.To(true), Data: map[string]string{"a": "new"}})
	defer f.Hold(Key{ConfigMap, "ns", "fixed"}, func() {})()
	await(t, "the new one was not read", func() bool {
		value, known := f.Get(Key{ConfigMap, "ns", "fixed"})
		if known && value.(*corev1.ConfigMap).Data["a"] != "new" {
			t.Fatal("the old one was given to somebody who came later")
		}
		return known
	})
	cancel()
	f.Wait()
}

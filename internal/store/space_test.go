package store

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/klog/v2"
)

const smallQuota = 8 << 20

func small(t *testing.T) Options {
	opts := DefaultOptions()
	opts.Dir = t.TempDir()
	opts.QuotaBytes = smallQuota
	return opts
}

// large is an object of 300 kB with one claim of its own.
func large(name string) *corev1.ConfigMap {
	cm := object(name, name)
	cm.BinaryData = map[string][]byte{"data": make([]byte, 300_000)}
	return cm
}

func (f fixture) createLarge(t *testing.T, name string) error {
	return f.claiming.Create(t.Context(), "/configmaps/"+name, large(name), &corev1.ConfigMap{}, 0)
}

// fill creates objects until etcd refuses, and returns how many there are and the refusal.
func (f fixture) fill(t *testing.T) (int, error) {
	t.Helper()
	refusals := 0
	for i := 0; i < 1000 && refusals < 20; {
		err := f.createLarge(t, fmt.Sprint("large-", i))
		if err == nil {
			i++
			continue
		}
		// It may only have been history that took up the room.
		refusals++
		if f.space.look(t.Context(), 0); f.Writable() != nil {
			return i, f.createLarge(t, fmt.Sprint("large-", i))
		}
	}
	t.Fatalf("%d writes were refused, and yet the storage says that it accepts them", refusals)
	return 0, nil
}

func (f fixture) becomes(t *testing.T, writable bool) {
	t.Helper()
	eventually(t, func() error {
		if err := f.Writable(); (err == nil) != writable {
			return fmt.Errorf("writable should be %v, but: %v", writable, err)
		}
		return nil
	})
}

// log is what has been logged.
type log struct {
	mu sync.Mutex
	bytes.Buffer
}

// logged keeps what is logged until the test ends.
func logged(t *testing.T) *log {
	l := &log{}
	t.Cleanup(klog.CaptureState().Restore)
	klog.SetSlogLogger(slog.New(slog.NewTextHandler(l, nil)))
	return l
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(b)
}

// with are the lines that contain a text.
func (l *log) with(text string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			out = append(out, line)
		}
	}
	return out
}

// eventually polls until check has nothing to complain about.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// An etcd that is full of live data says so, serves reads and deletions, and accepts writes again when enough was
// deleted, without anybody's help.
func TestFullOfLiveData(t *testing.T) {
	log := logged(t)
	f := openWith(t, small(t))
	n, err := f.fill(t)
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Code != http.StatusInsufficientStorage || !strings.Contains(err.Error(), "quota") {
		t.Errorf("a write to a full storage: %v, want a 507 that names the quota", err)
	}
	f.becomes(t, false)
	if err := f.Writable(); !strings.Contains(err.Error(), "--etcd-quota-bytes") {
		t.Errorf("the reason does not say what to do: %v", err)
	}
	eventually(t, func() error {
		if lines := log.with("storage refuses writes"); len(lines) == 0 || !strings.Contains(lines[0], `reason="etcd is full`) || !strings.Contains(lines[0], "--etcd-quota-bytes") {
			return fmt.Errorf("the log does not say that writes are refused, and why: %q", lines)
		}
		return nil
	})
	if err := f.claiming.Get(t.Context(), "/configmaps/large-0", storage.GetOptions{}, &corev1.ConfigMap{}); err != nil {
		t.Errorf("a read: %v", err)
	}
	for i := range n {
		if err := f.remove(t, fmt.Sprint("large-", i)); err != nil {
			t.Fatalf("a deletion: %v", err)
		}
	}
	f.becomes(t, true)
	eventually(t, func() error {
		if refused, accepted := log.with("storage refuses writes"), log.with("storage accepts writes again"); len(accepted) != len(refused) {
			return fmt.Errorf("the log says %q and %q", refused, accepted)
		}
		return nil
	})
	if err := f.createLarge(t, "after"); err != nil {
		t.Errorf("a write after there was room again: %v", err)
	}
	f.want(t, "after:after")
}

// History alone never fills etcd for long: it is compacted and the file defragmented when that is what takes up the room.
func TestFullOfHistory(t *testing.T) {
	f := openWith(t, small(t))
	for i := range 60 {
		err := f.update(t.Context(), "one", func(cm *corev1.ConfigMap) {
			cm.BinaryData = map[string][]byte{"data": make([]byte, 300_000+i)}
		})
		if err != nil {
			t.Fatalf("write %d of 300 kB in place: %v", i, err)
		}
	}
	status, err := f.Status(t.Context())
	must(t, err)
	if got := status.Members[0].SizeBytes; got > smallQuota+2*reserve(smallQuota) {
		t.Errorf("the database has %d bytes", got)
	}
}

// An object that is larger than what is free gets in where defragmentation makes enough room, although etcd is not full.
func TestRoomForOneLargeObject(t *testing.T) {
	f := openWith(t, small(t))
	const objects = 14
	for i := range objects {
		must(t, f.createLarge(t, fmt.Sprint("large-", i)))
	}
	for i := range objects {
		must(t, f.remove(t, fmt.Sprint("large-", i)))
	}
	free := int(smallQuota - f.space.backend.Size())
	if free < smallQuota/roomShare || free > 3<<20 {
		t.Fatalf("%d bytes are free of %d: this tests nothing", free, smallQuota)
	}
	cm := object("larger", "larger")
	cm.BinaryData = map[string][]byte{"data": make([]byte, (free+100_000)/4*3)} // a third more when it is stored
	must(t, f.claiming.Create(t.Context(), "/configmaps/larger", cm, &corev1.ConfigMap{}, 0))
}

// Deletions that write before they remove (finalizers, grace periods, namespaces) work at the quota.
func TestDeletionMarksAtTheQuota(t *testing.T) {
	f := openWith(t, small(t))
	if err := f.create(t, "guarded"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.fill(t); err == nil {
		t.Fatal("not full")
	}
	if err := f.update(t.Context(), "guarded", func(cm *corev1.ConfigMap) { cm.Labels = map[string]string{"a": "b"} }); err == nil {
		t.Error("an ordinary update was accepted at the quota")
	}
	now := metav1.Now()
	if err := f.update(t.Context(), "guarded", func(cm *corev1.ConfigMap) { cm.DeletionTimestamp = &now }); err != nil {
		t.Errorf("marking an object as deleted: %v", err)
	}
}

// Writes that etcd has not committed yet count: many of them at once don't use up the reserve, which deletions need.
func TestUncommittedWritesCount(t *testing.T) {
	opts := small(t)
	opts.commitInterval = time.Hour
	f := openWith(t, opts)
	if err := f.create(t, "guarded"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.fill(t); err == nil {
		t.Fatal("not full")
	}
	if size := f.space.backend.Size(); size > smallQuota+1<<20 {
		t.Errorf("the database has %d bytes, with a quota of %d", size, smallQuota)
	}
	now := metav1.Now()
	if err := f.update(t.Context(), "guarded", func(cm *corev1.ConfigMap) { cm.DeletionTimestamp = &now }); err != nil {
		t.Errorf("marking an object as deleted: %v", err)
	}
}

// alarmed leaves a data directory whose etcd has raised the alarm and is full of live data.
func alarmedDir(t *testing.T) Options {
	t.Helper()
	opts := small(t)
	f := openWith(t, opts)
	// Past Portal's own checks, as an older version did.
	for i := range 1000 {
		_, err := f.space.client.Put(t.Context(), fmt.Sprint(Prefix, "/old/", i), string(make([]byte, 300_000)))
		if IsNoSpace(err) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	resp, err := f.Client().AlarmList(t.Context())
	if err != nil || len(resp.Alarms) != 1 || resp.Alarms[0].Alarm != etcdserverpb.AlarmType_NOSPACE {
		t.Fatalf("alarms: %v, %v", resp, err)
	}
	f.end()
	return opts
}

// A server starts on an etcd that has raised the alarm, and deletions end it.
func TestStartWithTheAlarm(t *testing.T) {
	f := openWith(t, alarmedDir(t))
	if f.Writable() == nil {
		t.Fatal("a full storage says that it is writable")
	}
	if err := f.create(t, "a"); err == nil {
		t.Fatal("a full storage accepts writes")
	}
	if _, err := f.Client().Delete(t.Context(), Prefix+"/old/", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	f.becomes(t, true)
	if err := f.create(t, "a", "1"); err != nil {
		t.Error(err)
	}
}

func TestRaisedQuotaHelpsAtOnce(t *testing.T) {
	opts := alarmedDir(t)
	opts.QuotaBytes = 64 << 20
	f := openWith(t, opts)
	if err := f.Writable(); err != nil {
		t.Errorf("with a raised quota: %v", err)
	}
	if err := f.createLarge(t, "a"); err != nil {
		t.Error(err)
	}
}

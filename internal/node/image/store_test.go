package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestInterrupted: what a killed process left is removed by the next, and what a living one works on is not.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	s := newTestStore(t)
	living, err := s.workspace(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(s.temporary(), "dead")
	if err := os.MkdirAll(filepath.Join(dead, "layer-0/usr"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dead, workspaceLock), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.layer("sha256-orphan"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := s.Clean(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the dead one's: %v", err)
	}
	if _, err := os.Stat(s.layer("sha256-orphan")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a layer of no image: %v", err)
	}
	if _, err := os.Stat(living.dir); err != nil {
		t.Errorf("the living one's: %v", err)
	}
	living.close()
	nothingHere(t, s)
}

// TestTogether has two processes' worth of stores pull, load, prune and remove in one folder at once: an image that is found is complete.
func TestTogether(t *testing.T) {
	t.Parallel()
	first, r := newTestStore(t), newRegistry(t)
	second := NewStore(first.Options)
	shared := testLayer(t, "gzip", base...)
	var refs []string
	for i := range 4 {
		refs = append(refs, r.push(t, fmt.Sprintf("many:%d", i), testImage(t, v1.Config{Cmd: []string{fmt.Sprint(i)}}, shared, testLayer(t, "gzip", file("n", fmt.Sprint(i))))))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var all sync.WaitGroup
	var pulled atomic.Int32
	for i, s := range []*Store{first, second, first, second} {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				ref := refs[(n+i)%len(refs)]
				rec, err := s.Pull(ctx, ref, Credentials{}, nil)
				if err != nil && ctx.Err() == nil {
					t.Errorf("pull: %v", err)
					return
				}
				if err == nil && len(rec.Layers) != 2 {
					t.Errorf("%+v", rec)
				}
				pulled.Add(1)
			}
		})
	}
	all.Go(func() {
		for ctx.Err() == nil {
			if _, err := second.Prune(ctx, 1<<40, time.Now().Add(time.Hour)); err != nil && ctx.Err() == nil {
				t.Errorf("prune: %v", err)
			}
			if err := first.Clean(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("clean: %v", err)
			}
		}
	})
	all.Wait()
	if pulled.Load() < 8 {
		t.Errorf("only %d pulls", pulled.Load())
	}
	if _, err := first.Prune(t.Context(), 1<<40, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	nothingHere(t, first)
}

func TestRemoveAndChoose(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	s, r := newTestStore(t, func(o *Options) { o.InUse = func() (map[string]bool, error) { return used, nil } }), newRegistry(t)
	img := testImage(t, v1.Config{}, testLayer(t, "gzip", base...))
	a, b := r.push(t, "web:1", img), r.push(t, "web:2", img)
	for _, ref := range []string{a, b} {
		if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err != nil {
			t.Fatal(err)
		}
	}
	found, err := s.Find(a)
	if err != nil {
		t.Fatal(err)
	}
	if gone, err := s.Remove(t.Context(), a); err != nil || gone {
		t.Errorf("the first of two names: %v, %v", gone, err)
	}
	used[found.ID] = true
	if _, err := s.Remove(t.Context(), b); !errors.As(err, new(*InUseError)) {
		t.Errorf("in use: %v", err)
	}
	if removed, err := s.Prune(t.Context(), 1<<40, time.Now().Add(time.Hour)); err != nil || len(removed) != 0 {
		t.Errorf("in use: %v, %v", removed, err)
	}
	delete(used, found.ID)
	list, _ := s.List()
	if gone, err := s.Remove(t.Context(), strings.TrimPrefix(list[0].ID, "sha256:")[:12]); err != nil || !gone {
		t.Errorf("by ID: %v, %v", gone, err)
	}
	if _, err := s.Remove(t.Context(), b); !errors.As(err, new(*UnknownError)) {
		t.Errorf("twice: %v", err)
	}

	now := time.Now()
	rec := func(id string, age time.Duration, pinned bool, layers ...Layer) *Record {
		return &Record{ID: id, Used: now.Add(-age), Pulled: now.Add(-age), Pinned: pinned, Layers: layers}
	}
	common, own := Layer{Dir: "common", Size: 100}, func(n string) Layer { return Layer{Dir: n, Size: 10} }
	all := []*Record{rec("new", time.Second, false, own("0")), rec("b", time.Hour, false, common, own("1")), rec("pinned", 2*time.Hour, true, own("2")), rec("used", 2*time.Hour, false, own("3")), rec("c", 3*time.Hour, false, common, own("4"))}
	for need, want := range map[int64]string{0: "", 5: "c", 10: "c", 11: "c b", 1000: "c b"} {
		var got []string
		for _, r := range Choose(all, map[string]bool{"used": true}, need, now.Add(-time.Minute)) {
			got = append(got, r.ID)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("need %d: %v, want %s", need, got, want)
		}
	}
	for _, c := range []struct{ capacity, available, want int64 }{{1000, 200, 0}, {1000, 151, 0}, {1000, 150, 50}, {1000, 0, 200}, {0, 0, 0}} {
		if got := excess(c.capacity, c.available, Thresholds{High: 85, Low: 80}); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestLookup(t *testing.T) {
	dir := t.TempDir()
	top, bottom := filepath.Join(dir, "top"), filepath.Join(dir, "bottom")
	for path, text := range map[string]string{
		bottom + "/etc/passwd": "root:x:0:0::/:\nweb:x:101:102::/:\n",
		top + "/etc/group":     "wheel:x:10:root,web\nweb:x:102:\n",
		bottom + "/etc/group":  "hidden:x:99:web\n",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	img := Image{Lower: []string{top, bottom}}
	for account, want := range map[string]string{
		"": "{0 0 [10] false}", "0": "{0 0 [10] false}", "web": "{101 102 [10] true}", "101": "{101 102 [10] false}", "web:wheel": "{101 10 [] true}",
		"web:7": "{101 7 [] true}", "5": "{5 0 [] false}", "5:6": "{5 6 [] false}",
	} {
		if got, err := img.Lookup(account); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v, %v, want %s", account, got, err, want)
		}
	}
	for _, account := range []string{"nobody", "web:nobody", "99999999999", "4294967295"} {
		if got, err := img.Lookup(account); err == nil {
			t.Errorf("%q: %v", account, got)
		}
	}
	if got, err := (Image{Lower: []string{dir}}).Lookup(""); err != nil || got.UID != 0 {
		t.Errorf("without /etc/passwd: %v, %v", got, err)
	}
}

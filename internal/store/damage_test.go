package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/storage"
)

// filledDir is a data directory with some objects, of a server that has ended.
func filledDir(t *testing.T) Options {
	t.Helper()
	opts := DefaultOptions()
	opts.Dir = filepath.Join(t.TempDir(), "etcd")
	f := openWith(t, opts)
	for i := range 50 {
		if err := f.create(t, fmt.Sprint("a", i), fmt.Sprint("claim-", i)); err != nil {
			t.Fatal(err)
		}
	}
	f.end()
	return opts
}

func theLog(t *testing.T, member string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(member, "wal", "*.wal"))
	if err != nil || len(files) == 0 {
		t.Fatal("there is no log", err)
	}
	return files[0]
}

func scribble(t *testing.T, file string, at int64) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xa5}, 100_000), at); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Whatever is wrong with etcd's files, the server says so in one line that names a remedy, and neither hangs nor panics.
func TestDamage(t *testing.T) {
	whole := filledDir(t)
	for _, c := range []struct {
		name        string
		damage      func(member string)
		salvageable bool
	}{
		{"log cut off", func(member string) { must(t, os.Truncate(theLog(t, member), 4000)) }, true},
		{"log empty", func(member string) { must(t, os.Truncate(theLog(t, member), 0)) }, true},
		{"log a few bytes", func(member string) { must(t, os.Truncate(theLog(t, member), 10)) }, true},
		{"log removed", func(member string) { must(t, os.RemoveAll(filepath.Join(member, "wal"))) }, true},
		{"log's files removed", func(member string) { must(t, os.Remove(theLog(t, member))) }, true},
		{"log overwritten", func(member string) { scribble(t, theLog(t, member), 3000) }, true},
		{"database cut off", func(member string) { must(t, os.Truncate(filepath.Join(member, "snap", "db"), 20_000)) }, false},
		{"database overwritten", func(member string) { scribble(t, filepath.Join(member, "snap", "db"), 9000) }, false},
		{"database is something else", func(member string) { scribble(t, filepath.Join(member, "snap", "db"), 0) }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := whole
			opts.Dir = filepath.Join(t.TempDir(), "etcd")
			must(t, os.CopyFS(opts.Dir, os.DirFS(whole.Dir)))
			c.damage(filepath.Join(opts.Dir, "member"))
			s, err := Open(t.Context(), opts)
			if err == nil {
				s.Close()
				t.Fatal("it was not noticed")
			}
			var damaged *DamagedError
			if !errors.As(err, &damaged) || !strings.Contains(err.Error(), "portal storage restore") || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v", err)
			}
			if damaged.Salvageable != c.salvageable {
				t.Errorf("salvageable: %v", err)
			}
			if c.salvageable {
				salvage(t, opts)
			}
		})
	}
}

// salvage does what the message of a DamagedError says.
func salvage(t *testing.T, opts Options) {
	t.Helper()
	must(t, os.Rename(opts.Dir, opts.Dir+".damaged"))
	if _, err := Restore(filepath.Join(opts.Dir+".damaged", "member", "snap", "db"), Target{Dir: opts.Dir}); err != nil {
		t.Fatal(err)
	}
	if n := len(openWith(t, opts).claims(t)); n != 50 {
		t.Errorf("%d of 50 claims are left", n)
	}
}

// A snapshot is private, checked, and restored with a revision that no client has seen; those that remember an older
// one are told to list again.
func TestSnapshotAndRestore(t *testing.T) {
	f := openWith(t, filledDir(t))
	file := filepath.Join(t.TempDir(), "backup")
	info, err := SaveSnapshot(file, func(w io.Writer) error { return f.Snapshot(t.Context(), w) })
	if err != nil {
		t.Fatal(err)
	}
	if stat, err := os.Stat(file); err != nil || stat.Mode().Perm() != 0o600 || !info.Checksum || info.Keys < 100 {
		t.Errorf("%v, %v, %+v", stat.Mode(), err, info)
	}
	// The server goes on, and clients see revisions that the snapshot has not.
	for i := range 20 {
		must(t, f.create(t, fmt.Sprint("later", i)))
	}
	later, err := f.Client().Get(t.Context(), "x")
	must(t, err)

	opts := DefaultOptions()
	opts.Dir = filepath.Join(t.TempDir(), "etcd")
	if _, err := Restore(file, Target{Dir: opts.Dir}); err != nil {
		t.Fatal(err)
	}
	if _, err := Restore(file, Target{Dir: opts.Dir}); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("a second restore to the same place: %v", err)
	}
	restored := openWith(t, opts)
	now, err := restored.Client().Get(t.Context(), "x")
	must(t, err)
	if now.Header.Revision <= later.Header.Revision {
		t.Errorf("the revision went back from %d to %d", later.Header.Revision, now.Header.Revision)
	}
	watching := <-restored.Client().Watch(t.Context(), Prefix, clientv3.WithPrefix(), clientv3.WithRev(later.Header.Revision))
	if !isCompacted(watching.Err()) {
		t.Errorf("a watch from a revision of before: %v", watching.Err())
	}
	if len(restored.claims(t)) != 50 {
		t.Errorf("%d claims, want 50", len(restored.claims(t)))
	}
	must(t, restored.create(t, "new", "new"))
}

func TestBrokenSnapshots(t *testing.T) {
	f := openWith(t, filledDir(t))
	file := filepath.Join(t.TempDir(), "backup")
	save := func(w io.Writer) error { return f.Snapshot(t.Context(), w) }
	_, err := SaveSnapshot(file, save)
	must(t, err)
	before, err := os.ReadFile(file)
	must(t, err)
	// One that ends early never takes the place of the last good one.
	_, err = SaveSnapshot(file, func(w io.Writer) error { return save(&cut{w, 30_000}) })
	if after, _ := os.ReadFile(file); err == nil || !bytes.Equal(before, after) {
		t.Errorf("a snapshot that ended early: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Dir(file)); len(left) != 1 {
		t.Errorf("something was left behind: %v", left)
	}
	before[len(before)/2] ^= 1
	must(t, os.WriteFile(file, before, 0o600))
	if _, err := Restore(file, Target{Dir: filepath.Join(t.TempDir(), "etcd")}); err == nil || !strings.Contains(err.Error(), "SHA-256") {
		t.Errorf("a damaged snapshot: %v", err)
	}
	other := filepath.Join(t.TempDir(), "other")
	must(t, os.WriteFile(other, bytes.Repeat([]byte("no snapshot\n"), 5000), 0o600))
	if _, err := Restore(other, Target{Dir: filepath.Join(t.TempDir(), "etcd")}); err == nil {
		t.Error("some file was restored")
	}
}

// cut drops everything after so many bytes.
type cut struct {
	io.Writer
	left int
}

func (c *cut) Write(data []byte) (int, error) {
	n := min(len(data), c.left)
	c.left -= n
	if _, err := c.Writer.Write(data[:n]); err != nil {
		return 0, err
	}
	return len(data), nil
}

// A watch resumed from a revision that a restored etcd has not reached is refused at once, instead of hearing nothing
// until the new history has grown that far.
func TestWatchFromTheFuture(t *testing.T) {
	f := open(t)
	must(t, f.create(t, "a"))
	_, err := f.claiming.Watch(t.Context(), "/configmaps/", storage.ListOptions{
		ResourceVersion: "100000", Predicate: storage.Everything, Recursive: true,
	})
	if err == nil || !strings.Contains(err.Error(), "list again") {
		t.Errorf("got %v", err)
	}
	var list corev1.ConfigMapList
	must(t, f.claiming.GetList(t.Context(), "/configmaps/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, &list))
	watching, err := f.claiming.Watch(t.Context(), "/configmaps/", storage.ListOptions{
		ResourceVersion: list.ResourceVersion, Predicate: storage.Everything, Recursive: true,
	})
	must(t, err)
	watching.Stop()
}

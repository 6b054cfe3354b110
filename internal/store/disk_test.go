package store

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"
)

// smallDisk is a file system of its own, a tmpfs with such options.
func smallDisk(t *testing.T, options string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can mount a small file system")
	}
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, options))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// useUpInodes leaves no inode of the file system free, as another program's cache does, and returns how to give them back.
func useUpInodes(t *testing.T, dir string) (giveBack func()) {
	t.Helper()
	others := filepath.Join(dir, "others")
	must(t, os.Mkdir(others, 0o700))
	for i := 0; ; i++ {
		f, err := os.Create(filepath.Join(others, fmt.Sprint(i)))
		if errors.Is(err, unix.ENOSPC) {
			return func() { must(t, os.RemoveAll(others)) }
		}
		must(t, err)
		must(t, f.Close())
	}
}

// useUp leaves no byte of the file system free, as another program's log does, and returns how to give it back.
func useUp(t *testing.T, dir string) (giveBack func()) {
	t.Helper()
	name := filepath.Join(dir, "other")
	f, err := os.Create(name)
	must(t, err)
	defer f.Close()
	for chunk := make([]byte, 1<<20); len(chunk) > 0; {
		if _, err := f.Write(chunk); errors.Is(err, unix.ENOSPC) {
			chunk = chunk[:len(chunk)/2]
		} else {
			must(t, err)
		}
	}
	return func() { must(t, os.Remove(name)) }
}

// With a full disk the storage refuses writes, serves reads and deletions, starts again, and accepts writes when there is room.
func TestFullDisk(t *testing.T) {
	for what, tc := range map[string]struct {
		use    func(*testing.T, string) func()
		reason string
	}{"space": {useUp, "B are free"}, "inodes": {useUpInodes, "0 inodes are free"}} {
		t.Run(what, func(t *testing.T) { testFullDisk(t, tc.use, tc.reason) })
	}
}

func testFullDisk(t *testing.T, use func(*testing.T, string) func(), reason string) {
	disk := smallDisk(t, "size=600m,nr_inodes=200")
	opts := DefaultOptions()
	opts.Dir = filepath.Join(disk, "etcd")
	f := openWith(t, opts)
	const objects = 40
	for i := range objects {
		must(t, f.createLarge(t, fmt.Sprint("large-", i)))
	}
	giveBack := use(t, disk)
	refused := func() {
		t.Helper()
		err := f.createLarge(t, "refused")
		var status apierrors.APIStatus
		if !errors.As(err, &status) || status.Status().Code != http.StatusInsufficientStorage || !strings.Contains(err.Error(), "disk is full") || !strings.Contains(err.Error(), reason) {
			t.Fatalf("a write to a full disk: %v, want a 507 that says %q", err, reason)
		}
		f.becomes(t, false)
		if err := f.Writable(); !strings.Contains(err.Error(), opts.Dir) || !strings.Contains(err.Error(), reason) {
			t.Errorf("the reason does not say where and what: %v", err)
		}
	}
	refused()
	for i := range objects / 2 {
		if err := f.remove(t, fmt.Sprint("large-", i)); err != nil {
			t.Fatalf("a deletion: %v", err)
		}
	}
	must(t, f.space.compact(t.Context()))
	if err := f.claiming.Get(t.Context(), fmt.Sprint("/configmaps/large-", objects-1), storage.GetOptions{}, &corev1.ConfigMap{}); err != nil {
		t.Errorf("a read: %v", err)
	}
	if _, err := f.Defragment(t.Context()); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("defragmenting without room for the copy: %v", err)
	}

	f.end()
	f = openWith(t, opts)
	refused()
	must(t, f.remove(t, fmt.Sprint("large-", objects-1)))
	giveBack()
	f.becomes(t, true)
	// It goes on beyond the segment of its log that it has now.
	for i := range 2 * walSegment / 400_000 {
		must(t, f.update(t.Context(), "after", func(cm *corev1.ConfigMap) {
			cm.BinaryData = map[string][]byte{"data": make([]byte, 300_000+i)}
		}))
	}
}

// Writes that a full disk still takes, such as renewals of Leases, do not end etcd when it makes its next snapshot.
func TestSnapshotOnAFullDisk(t *testing.T) {
	for what, use := range map[string]func(*testing.T, string) func(){"space": useUp, "inodes": useUpInodes} {
		t.Run(what, func(t *testing.T) {
			disk := smallDisk(t, "size=600m,nr_inodes=200")
			opts := DefaultOptions()
			opts.Dir = filepath.Join(disk, "etcd")
			f := openWith(t, opts)
			put := func(n int) {
				t.Helper()
				for range n {
					_, err := f.Client().Put(t.Context(), "/leases/a", "renewed")
					must(t, err)
				}
			}
			put(10)
			f.space.look(t.Context(), 0)
			use(t, disk)
			for range 3 {
				put(snapshotEvery - snapshotAhead + 100)
				f.space.look(t.Context(), 0) // as every two seconds
				put(snapshotAhead)
				eventually(t, func() error {
					if last := writesOf(f.embedded.disk.snapshots()); f.space.applied()-last > snapshotAhead {
						return fmt.Errorf("the last snapshot is of write %d, and there were %d", last, f.space.applied())
					}
					return nil
				})
				f.space.look(t.Context(), 0)
			}
			f.end()
			f = openWith(t, opts)
			put(1)
		})
	}
}

// A file system that is too small for a new storage is said to be before anything is made there.
func TestNewStorageOnAFullDisk(t *testing.T) {
	for _, options := range []string{"size=64m", "size=600m,nr_inodes=30"} {
		opts := DefaultOptions()
		opts.Dir = filepath.Join(smallDisk(t, options), "etcd")
		s, err := Open(t.Context(), opts)
		if err == nil {
			s.Close()
			t.Fatalf("%s: it was opened", options)
		}
		if !strings.Contains(err.Error(), "the disk is full") || !strings.Contains(err.Error(), "--data-dir") {
			t.Errorf("%s: %v", options, err)
		}
	}
}

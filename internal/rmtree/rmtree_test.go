package rmtree

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDeep: folders nested more deeply than a process may have files open, and longer than any path, are removed.
func TestDeep(t *testing.T) {
	top := filepath.Join(t.TempDir(), "top")
	if err := os.Mkdir(top, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(top, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	const depth = 5000
	for i := range depth {
		for _, name := range []string{"a folder with a longer name", "empty"} {
			if err := unix.Mkdirat(fd, name, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if i%100 == 0 {
			file, err := unix.Openat(fd, "file", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			_ = unix.Close(file)
		}
		next, err := openFolder(fd, "a folder with a longer name")
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fd)
		fd = next
	}
	_ = unix.Close(fd)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = 128
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	err = Remove(top)
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); e != nil {
		t.Fatal(e)
	}
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(top); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
}

// TestNothingElse: links are removed, not followed; many files are; what is not there is no error; what can't be removed is one.
func TestNothingElse(t *testing.T) {
	dir := t.TempDir()
	outside, top := filepath.Join(dir, "outside"), filepath.Join(dir, "top")
	for _, d := range []string{outside, filepath.Join(top, "a", "b")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	kept := filepath.Join(outside, "kept")
	if err := os.WriteFile(kept, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"folder": outside, "a/file": kept, "a/b/up": "../../..", "a/dangling": "nowhere"} {
		if err := os.Symlink(target, filepath.Join(top, name)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 * batch {
		if err := os.WriteFile(filepath.Join(top, "a", fmt.Sprint("file-", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := Remove(top); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(outside, link); err != nil {
		t.Fatal(err)
	}
	if err := Remove(link); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(link); err == nil {
		t.Error("the link is still there")
	}
	if data, err := os.ReadFile(kept); err != nil || string(data) != "x" {
		t.Errorf("what a link led to: %q, %v", data, err)
	}
	if err := Remove(filepath.Join(kept, "below")); err == nil {
		t.Error("something below a file was removed")
	}
	if err := Remove("/proc/self"); err == nil {
		t.Error("/proc/self was removed")
	}
}

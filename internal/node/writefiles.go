package node

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// The names in a volume that are not files: the link to the folder that is shown, and the one that replaces it.
const (
	dataLink = "..data"
	dataNext = "..data_tmp"
)

// filePath checks where a file is to be in a volume.
func filePath(path string) (string, error) {
	clean := filepath.Clean(path)
	if filepath.IsAbs(clean) || clean == "." || strings.HasPrefix(clean, "..") {
		return "", fmt.Errorf("file %q: must be below the volume", path)
	}
	return clean, nil
}

// effectiveMode is a file's mode: the group that the Pod's processes have may read it.
func effectiveMode(f file, pod *corev1.Pod) os.FileMode {
	if s := pod.Spec.SecurityContext; s != nil && s.FSGroup != nil {
		return f.mode | 0o040
	}
	return f.mode
}

// writeFiles puts files in a volume so that all change at once: they are links into a folder that is replaced as a whole.
func writeFiles(dir string, files map[string]file, pod *corev1.Pod) error {
	old, _ := os.Readlink(filepath.Join(dir, dataLink))
	if err := clearFailed(dir, old); err != nil {
		return err
	}
	fresh, err := os.MkdirTemp(dir, "..")
	if err != nil {
		return err
	}
	tops, err := writeFolder(fresh, files, pod)
	if err != nil {
		_ = os.RemoveAll(fresh)
		return err
	}
	if err := os.Symlink(filepath.Base(fresh), filepath.Join(dir, dataNext)); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(dir, dataNext), filepath.Join(dir, dataLink)); err != nil {
		return err
	}
	for top := range tops {
		link := filepath.Join(dir, top)
		if _, err := os.Lstat(link); err == nil {
			continue
		}
		if err := os.Symlink(dataLink+"/"+top, link); err != nil {
			return err
		}
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "..") && !tops[e.Name()] {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
	if old != "" {
		_ = os.RemoveAll(filepath.Join(dir, old))
	}
	return nil
}

// clearFailed removes what an attempt left that did not end: its folder would take up the volume's memory.
func clearFailed(dir, shown string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, "..") && name != dataLink && name != shown {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeFolder writes files to a folder, and returns the first parts of their paths.
func writeFolder(dir string, files map[string]file, pod *corev1.Pod) (map[string]bool, error) {
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	tops := map[string]bool{}
	for path, f := range files {
		clean, err := filePath(path)
		if err != nil {
			return nil, err
		}
		full := filepath.Join(dir, clean)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(full, f.data, 0o600); err != nil {
			return nil, err
		}
		if s := pod.Spec.SecurityContext; s != nil && s.FSGroup != nil {
			if err := os.Chown(full, -1, int(*s.FSGroup)); err != nil {
				return nil, err
			}
		}
		if err := os.Chmod(full, effectiveMode(f, pod)); err != nil {
			return nil, err
		}
		top, _, _ := strings.Cut(clean, "/")
		tops[top] = true
	}
	return tops, nil
}

// upToDate says whether a volume has these files already. Then nobody who watches it is woken.
func upToDate(dir string, files map[string]file, pod *corev1.Pod) bool {
	shown, err := os.Readlink(filepath.Join(dir, dataLink))
	if err != nil {
		return false
	}
	root := filepath.Join(dir, shown)
	count := 0
	if err := filepath.WalkDir(root, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			count++
		}
		return err
	}); err != nil || count != len(files) {
		return false
	}
	for path, f := range files {
		clean, err := filePath(path)
		if err != nil {
			return false
		}
		full := filepath.Join(root, clean)
		st, err := os.Lstat(full)
		if err != nil || !st.Mode().IsRegular() || st.Mode().Perm() != effectiveMode(f, pod) || st.Size() != int64(len(f.data)) {
			return false
		}
		if data, err := os.ReadFile(full); err != nil || !bytes.Equal(data, f.data) {
			return false
		}
	}
	return true
}

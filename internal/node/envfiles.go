package node

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"portal/internal/node/runtime"
	"portal/internal/node/spec"
)

// maxEnvFile is how long a file of variables may be: a process could not have them all.
const maxEnvFile = 1 << 20

// envFiles reads files of variables in a Pod's emptyDirs.
func (a *Agent) envFiles(pod *corev1.Pod, sandbox *runtime.Pod) func(volume, path string) (string, error) {
	return func(volume, path string) (string, error) {
		v := volumeOf(pod, volume)
		if v == nil || v.EmptyDir == nil {
			return "", fmt.Errorf("fileKeyRef: %s is no volume of the kind emptyDir", volume)
		}
		dir := a.volume(pod, volume)
		if v.EmptyDir.Medium == corev1.StorageMediumMemory {
			dir = sandbox.Inside(dir)
		}
		text, err := readBelow(dir, path, maxEnvFile)
		if errors.Is(err, fs.ErrNotExist) {
			return "", &spec.MissingError{Kind: "file in volume " + volume, Name: path}
		}
		if err != nil {
			return "", fmt.Errorf("file %s in volume %s: %w", path, volume, err)
		}
		return text, nil
	}
}

// readBelow reads a file of a folder that containers write to: what they put there may be a link out of it, or block whoever opens it.
func readBelow(dir, path string, most int64) (string, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !st.Mode().IsRegular() {
		return "", errors.New("is no regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("has more than %d bytes", most)
	}
	return string(data), err
}

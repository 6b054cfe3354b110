package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"portal/internal/node/spec"
)

// TestEnvFiles: a file of variables is read in an emptyDir and nowhere else, whatever a container has put there.
func TestEnvFiles(t *testing.T) {
	a := &Agent{Options: Options{DataDir: t.TempDir()}}
	pod := &corev1.Pod{Spec: corev1.PodSpec{Volumes: []corev1.Volume{
		{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}, {Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}},
	}}}
	pod.UID = "u"
	dir, outside := a.volume(pod, "v"), filepath.Join(a.DataDir, "secret")
	if err := errors.Join(
		os.MkdirAll(filepath.Join(dir, "d"), 0o755), os.WriteFile(outside, []byte("secret"), 0o600), os.WriteFile(filepath.Join(dir, "d", "env"), []byte("A='1'"), 0o600),
		os.WriteFile(filepath.Join(dir, "long"), make([]byte, maxEnvFile+1), 0o600), os.WriteFile(filepath.Join(dir, "just"), make([]byte, maxEnvFile), 0o600),
		os.Symlink("d/env", filepath.Join(dir, "link")), os.Symlink("../../../secret", filepath.Join(dir, "out")), os.Symlink(outside, filepath.Join(dir, "absolute")),
		os.Symlink(a.DataDir, filepath.Join(dir, "folder")), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	read := a.envFiles(pod, nil)
	for path, want := range map[string]string{"d/env": "A='1'", "link": "A='1'", "d/../link": "A='1'", "just": string(make([]byte, maxEnvFile))} {
		if got, err := read("v", path); got != want || err != nil {
			t.Errorf("%s: %.20q, %v", path, got, err)
		}
	}
	for path, want := range map[string]string{
		"out": "escapes", "absolute": "escapes", "folder/secret": "escapes", "../../../secret": "escapes", outside: "escapes", "fifo": "regular", "d": "regular", "long": "more than", "d/none": "not found", "none": "not found",
	} {
		got, err := read("v", path)
		var missing *spec.MissingError
		if err == nil || got != "" && path != "long" || !strings.Contains(err.Error(), want) || errors.As(err, &missing) != (want == "not found") {
			t.Errorf("%s: %.20q, %v", path, got, err)
		}
	}
	for _, volume := range []string{"host", "none"} {
		if _, err := read(volume, "etc/passwd"); err == nil {
			t.Errorf("a file in %s is read", volume)
		}
	}
}

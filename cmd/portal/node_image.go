package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"portal/internal/node/image"
)

// ownImageName is the image that is this program and nothing else.
const ownImageName = "portal"

// withOwnImage adds the image that is this program, unless the images have another of the name. It is for trying things: a machine
// without a registry has it.
func withOwnImage(images []image.Mapping, dataDir string) ([]image.Mapping, error) {
	if slices.ContainsFunc(images, func(m image.Mapping) bool { return image.Normalize(m.Name) == image.Normalize(ownImageName) }) {
		return images, nil
	}
	defer unix.Umask(unix.Umask(0o022))                 // every user may run it
	if err := os.MkdirAll(dataDir, 0o700); err != nil { // Pods' volumes are in it, which are open to all
		return nil, err
	}
	dir := filepath.Join(dataDir, "images", "own")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := placeProgram(filepath.Join(dir, "portal")); err != nil {
		return nil, fmt.Errorf("the image %s: %w", ownImageName, err)
	}
	return append(slices.Clone(images), image.Mapping{Name: ownImageName, Dir: dir, Config: image.Config{Entrypoint: []string{"/portal"}}}), nil
}

// placeProgram puts this program at a path: as a link if it is on the same file system, else as a copy.
func placeProgram(path string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	source, err := os.Stat(self)
	if err != nil {
		return err
	}
	have, err := os.Stat(path)
	if err == nil && (os.SameFile(have, source) || have.Size() == source.Size() && have.ModTime().Equal(source.ModTime())) {
		return nil
	}
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Link(self, next); err != nil {
		if err := copyProgram(self, next, source); err != nil {
			return err
		}
	}
	return os.Rename(next, path)
}

func copyProgram(from, to string, about os.FileInfo) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	return os.Chtimes(to, about.ModTime(), about.ModTime())
}

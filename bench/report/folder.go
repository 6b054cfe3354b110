package report

import (
	"errors"
	"os"
)

// InFolder runs a benchmark with a folder of its own, which is removed afterwards.
func InFolder(name string, run func(dir string) (met bool, err error)) (bool, error) {
	dir, err := os.MkdirTemp("", "bench-"+name)
	if err != nil {
		return false, err
	}
	met, err := run(dir)
	return met, errors.Join(err, os.RemoveAll(dir))
}

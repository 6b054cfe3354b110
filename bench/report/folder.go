package report

import (
	"errors"
	"os"
)

// InFolder runs something with a folder of its own, which is removed afterwards.
func InFolder(name string, run func(dir string) error) error {
	dir, err := os.MkdirTemp("", "bench-"+name)
	if err != nil {
		return err
	}
	return errors.Join(run(dir), os.RemoveAll(dir))
}

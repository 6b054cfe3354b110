// Package shortage recognises errors that say that this process or machine has no descriptors or memory left: whoever is at the
// other end of a connection has no part in them, and they pass.
package shortage

import (
	"errors"
	"slices"
	"syscall"
)

// Is reports whether an error is about a shortage of descriptors or memory here.
func Is(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM}, func(ours error) bool { return errors.Is(err, ours) })
}

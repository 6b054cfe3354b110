package hostnet

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Absent says whether an error about rules, routes or links means that there is none: no such thing, or a kernel that was
// booted without the family. Then nobody there answers about rules of the family (EAFNOSUPPORT) or about its routes (EOPNOTSUPP).
func Absent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

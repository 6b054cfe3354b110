// Package faults injects faults in a lab: of each, `portal explain` must name the cause in its first line, and its fix, typed as it is
// printed, must make the Service answer. A few are tried by every `make test`, all of them by `make test-faults`.
package faults

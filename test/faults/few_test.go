//go:build !faults

package faults

import "testing"

// further is empty: the rest takes minutes, and has a target of its own.
var further []fault

func (*cluster) more(*testing.T) {}

//go:build !faults

package faults

import "testing"

// further is empty: the rest takes minutes, and has a target of its own.
var further []fault

// pools is empty: load balancers take longer to start than all the rest.
var pools []string

func (*cluster) more(*testing.T) {}

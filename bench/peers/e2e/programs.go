//go:build programs

package suite

// The programs of the tests' images, which are built one by one. They are named here so that go.mod has what they need.
import (
	_ "k8s.io/kubernetes/test/images/agnhost"
	_ "k8s.io/kubernetes/test/images/nonewprivs"
	_ "k8s.io/kubernetes/test/images/regression-issue-74839"
)

// Package suite names Kubernetes' end-to-end tests, so that this module has all that they are built from. Nothing runs it: `make
// test-e2e-api` builds k8s.io/kubernetes/test/e2e as e2e.test.
package suite

import _ "k8s.io/kubernetes/test/e2e"

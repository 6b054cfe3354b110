// The CustomResourceDefinitions that tests install, from the modules of the projects that publish them. It is a module of its
// own so that Portal depends on neither.
module portal/test/crds

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.21.2
	sigs.k8s.io/gateway-api v1.6.3
)

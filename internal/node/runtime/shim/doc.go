// Package shim is the small process that stands beside each Pod. It holds the Pod's namespaces, starts its containers, writes their
// logs and records how they end, so that the agent can be killed and replaced without a Pod noticing. It knows nothing of the API,
// of images, or of how addresses are given out: it gets paths, arguments and limits.
//
// The same binary runs under three names: portal-shim for each Pod, portal-init for each container until that becomes the
// container's first process, and portal-exec for each further process in a container. They take over while the binary's packages are being
// initialised, before those of the other commands are: that saves 10 MB and 70 ms for each of these processes. So this package may only
// import what is initialised early: see early.go.
package shim

package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

// start starts a subject: the same three controllers of each.
func (c *cluster) start(name string) (*report.Subject, error) {
	switch name {
	case portal:
		return c.startPortal("--leader-elect=false")
	case kube:
		return c.startKube()
	case kubeUnlimited:
		return c.startKube("--kube-api-qps", "10000", "--kube-api-burst", "10000",
			"--concurrent-endpoint-syncs", "16", "--concurrent-service-endpoint-syncs", "16")
	}
	return nil, fmt.Errorf("-subjects %q: must be among %s, %s, %s", name, kube, kubeUnlimited, portal)
}

func (c *cluster) startPortal(args ...string) (*report.Subject, error) {
	return c.exec(c.portal, append([]string{"controllers", "--kubeconfig", c.kubeconfig, "--controllers", "endpoints,endpointslice,mirror"}, args...)...)
}

func (c *cluster) startKube(args ...string) (*report.Subject, error) {
	return c.exec(harness.Peer(kube), append([]string{
		"--kubeconfig", c.kubeconfig, "--leader-elect=false", "--cert-dir", filepath.Join(c.dir, "kcm"),
		"--controllers", "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller",
		"--secure-port", strconv.Itoa(harness.FreePort()), "--bind-address", "127.0.0.1",
	}, args...)...)
}

func (c *cluster) exec(path string, args ...string) (*report.Subject, error) {
	return report.Start(c.dir, fmt.Sprintf("%s-%d", filepath.Base(path), time.Now().UnixNano()), path, args...)
}

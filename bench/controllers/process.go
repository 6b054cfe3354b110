package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"portal/bench/report"
)

// process is a subject that runs.
type process struct {
	sampler *report.Sampler
	kill    func()
}

// start starts a subject: the same three controllers of each.
func (c *cluster) start(name string) (*process, error) {
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

func (c *cluster) startPortal(args ...string) (*process, error) {
	return c.exec(c.portal, append([]string{"controllers", "--kubeconfig", c.kubeconfig, "--controllers", "endpoints,endpointslice,mirror"}, args...)...)
}

func (c *cluster) startKube(args ...string) (*process, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	return c.exec(filepath.Join(c.peers, "kube-controller-manager"), append([]string{
		"--kubeconfig", c.kubeconfig, "--leader-elect=false", "--cert-dir", filepath.Join(c.dir, "kcm"),
		"--controllers", "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller",
		"--secure-port", strconv.Itoa(port), "--bind-address", "127.0.0.1",
	}, args...)...)
}

func (c *cluster) exec(path string, args ...string) (*process, error) {
	log, err := os.Create(filepath.Join(c.dir, fmt.Sprintf("%s-%d.log", filepath.Base(path), time.Now().UnixNano())))
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	sampler := report.Follow(cmd.Process.Pid)
	return &process{sampler, sync.OnceFunc(func() {
		sampler.Stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
	})}, nil
}

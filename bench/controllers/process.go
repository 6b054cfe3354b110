package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a contender that runs.
type process struct {
	*exec.Cmd
	kill func()
}

// start starts a contender: the same three controllers of each.
func (c *cluster) start(name string) (*process, error) {
	switch name {
	case "portal":
		return c.startPortal("--leader-elect=false")
	case "reference":
		return c.startReference()
	case "reference-unlimited":
		return c.startReference("--kube-api-qps", "10000", "--kube-api-burst", "10000",
			"--concurrent-endpoint-syncs", "16", "--concurrent-service-endpoint-syncs", "16")
	}
	return nil, fmt.Errorf("no such contender: %s", name)
}

func (c *cluster) startPortal(args ...string) (*process, error) {
	return c.exec(c.portal, append([]string{"controllers", "--kubeconfig", c.kubeconfig, "--controllers", "endpoints,endpointslice,mirror"}, args...)...)
}

func (c *cluster) startReference(args ...string) (*process, error) {
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
	return &process{cmd, sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
	})}, nil
}

// usage is the most memory a process has had, and its CPU time.
func (p *process) usage() (memory int64, cpu time.Duration, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Process.Pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, 0, err
			}
			memory = kb << 10
		}
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	if err != nil {
		return 0, 0, err
	}
	// The fields behind the name, which may itself hold spaces: user and system time are the 12th and 13th of them.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	for _, field := range fields[11:13] {
		ticks, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, 0, err
		}
		cpu += time.Duration(ticks) * (time.Second / 100)
	}
	return memory, cpu, nil
}

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/miekg/dns"

	"portal/bench/report"
)

// process is a server.
type process struct {
	cmd     *exec.Cmd
	log     *bytes.Buffer
	sampler *report.Sampler
}

func start(ctx context.Context, name string, args ...string) (*process, error) {
	p := &process{cmd: exec.CommandContext(ctx, name, args...), log: &bytes.Buffer{}}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.sampler = report.Follow(p.cmd.Process.Pid)
	return p, nil
}

func (p *process) stop() {
	p.sampler.Stop()
	p.cmd.Process.Signal(os.Interrupt)
	done := make(chan struct{})
	go func() { p.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		p.cmd.Process.Kill()
		<-done
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// startAPI runs the API server that both subjects read.
func startAPI(ctx context.Context, portal, dir string) (*process, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "server")
	p, err := start(ctx, portal, "server", "--data-dir", data, "--listen", fmt.Sprintf("127.0.0.1:%d", port), "--controllers", "none")
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if c, err := newClient(filepath.Join(data, "admin.kubeconfig")); err == nil {
			if _, err := c.CoreV1().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx); err == nil {
				return p, nil
			}
		}
	}
	p.stop()
	return nil, fmt.Errorf("the API server was not ready within a minute:\n%s", p.log)
}

// answers waits until a server resolves a name.
func answers(addr, name string, within time.Duration) error {
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	c := dns.Client{Timeout: time.Second}
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if r, _, err := c.Exchange(m, addr); err == nil && len(r.Answer) > 0 {
			return nil
		}
	}
	return fmt.Errorf("%s does not answer for %s after %v", addr, name, within)
}

// startStub is the upstream of both subjects: it answers every query with one address.
func startStub() (net.PacketConn, error) {
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go (&dns.Server{PacketConn: c, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(r)
		if r.Question[0].Qtype == dns.TypeA {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}, A: net.IPv4(192, 0, 2, 1)}}
		}
		w.WriteMsg(m)
	})}).ActivateAndServe()
	return c, nil
}

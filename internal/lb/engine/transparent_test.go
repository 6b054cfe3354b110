package engine

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/config"
	"portal/internal/nettest"
)

// TestTransparent: in a namespace where no interface has the address, listeners have it, and connections have it as their local end.
func TestTransparent(t *testing.T) {
	for _, address := range []string{"192.0.2.1:80", "[2001:db8::1]:80"} {
		at := netip.MustParseAddrPort(address)
		nettest.InNamespace(t, func() { serveTransparent(t, at) })
	}
}

func serveTransparent(t *testing.T, at netip.AddrPort) {
	cfg := config.Config{Listeners: []config.Listener{{Name: "l", Address: at, Protocol: config.HTTP}}}
	web := func(_ context.Context, c net.Conn, info *ConnInfo, ended func()) {
		defer ended()
		_, _ = io.WriteString(c, info.Local.String())
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Errorf("ip: %s %v", out, err)
		return
	}
	plain := New(Options{Web: web})
	defer plain.Close()
	if err := plain.Apply(cfg); err == nil || !strings.Contains(err.Error(), "no interface has this address") {
		t.Errorf("%v without being transparent: %v", at, err)
	}
	e := New(Options{Web: web, Transparent: true})
	defer e.Close()
	if err := e.Apply(cfg); err != nil {
		t.Error(err)
		return
	}
	// Lead packets to it.
	out, err := exec.Command("ip", "route", "add", "local", netip.PrefixFrom(at.Addr(), at.Addr().BitLen()).String(), "dev", "lo").CombinedOutput()
	if err != nil {
		t.Errorf("ip: %s %v", out, err)
		return
	}
	fd, err := connect(context.Background(), at, time.Now().Add(patience))
	if err != nil {
		t.Error(err)
		return
	}
	defer fd.Close()
	_ = fd.SetDeadline(time.Now().Add(patience))
	if got, err := io.ReadAll(fd); err != nil || string(got) != at.String() {
		t.Errorf("the local end is %q, %v; want %v", got, err, at)
	}
}

package server

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// names are the forms in which a Pod of the namespace my-ns may ask, and what they lead to.
var names = map[string][]string{
	// The forms of the Kubernetes documents.
	"my-service":                                {"10.0.171.239", "fd00:96::20"},
	"my-service.my-ns":                          {"10.0.171.239", "fd00:96::20"},
	"my-service.my-ns.svc":                      {"10.0.171.239", "fd00:96::20"},
	"my-service.my-ns.svc.cluster.local":        {"10.0.171.239", "fd00:96::20"},
	"my-service.my-ns.svc.cluster.local.":       {"10.0.171.239", "fd00:96::20"},
	"MY-Service.My-NS":                          {"10.0.171.239", "fd00:96::20"},
	"nginx-service":                             nil, // of another namespace
	"nginx-service.default":                     {"10.96.0.30"},
	"nginx-service.default.svc.cluster.local":   {"10.96.0.30"},
	"my-service.prod":                           {"192.0.2.7"}, // ExternalName my.database.example.com
	"my-service.prod.svc.cluster.local":         {"192.0.2.7"},
	"number.prod":                               nil,                           // ExternalName 192.0.2.9: a name, not an address
	"inside.prod":                               {"10.96.0.10", "fd00:96::10"}, // ExternalName of a Service
	"headless":                                  {"10.1.1.1", "10.1.1.2"},
	"headless.my-ns.svc.cluster.local":          {"10.1.1.1", "10.1.1.2"},
	"10-1-1-2.headless":                         {"10.1.1.2"},
	"10-1-1-2.headless.my-ns.svc.cluster.local": {"10.1.1.2"},
	"10-1-1-3.headless.my-ns.svc.cluster.local": nil,
	// And what else a Pod may write.
	"web.shop":                    {"10.96.0.10", "fd00:96::10"},
	"web.shop.svc":                {"10.96.0.10", "fd00:96::10"},
	"web.shop.svc.cluster.local.": {"10.96.0.10", "fd00:96::10"},
	"db.shop":                     {"10.1.0.1", "10.1.0.2", "10.1.0.3"},
	"db-1.db.shop":                {"10.1.0.2"},
	"db-1.db.shop.svc":            {"10.1.0.2"},
	"out.shop":                    {"192.0.2.1"},
	"www.example.com":             {"192.0.2.1"},
	"10-1-0-9.shop.pod":           {"10.1.0.9"},
	"no-such-service":             nil,
	"web":                         nil,
	"web.default":                 nil,
}

const podResolvConf = "nameserver 127.0.0.1\nsearch my-ns.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5 timeout:2\n"

// documented is the small cluster with the Services of the Kubernetes documents.
func documented() *intent.Cluster {
	c, addr := small(), netip.MustParseAddr
	for _, ns := range []string{"my-ns", "prod"} {
		c.SetNamespace(&intent.Namespace{Name: ns})
	}
	http := []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}}
	c.SetService(&intent.Service{Key: namespaced("my-ns", "my-service"), ClusterIPs: []netip.Addr{addr("10.0.171.239"), addr("fd00:96::20")}, Ports: http})
	c.SetService(&intent.Service{Key: namespaced("default", "nginx-service"), ClusterIPs: []netip.Addr{addr("10.96.0.30")}, Ports: http})
	for name, target := range map[string]string{"my-service": "my.database.example.com", "number": "192.0.2.9", "inside": "web.shop.svc.cluster.local"} {
		c.SetService(&intent.Service{Key: namespaced("prod", name), Type: intent.ExternalName, ExternalName: target})
	}
	c.SetService(&intent.Service{Key: namespaced("my-ns", "headless"), Headless: true, Ports: http})
	c.SetSlice(&intent.Slice{Key: namespaced("my-ns", "headless-1"), Service: "headless", Family: intent.IPv4,
		Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: 9376}},
		Endpoints: []intent.Endpoint{
			{Addr: addr("10.1.1.1"), Condition: intent.Ready}, {Addr: addr("10.1.1.2"), Condition: intent.Ready}, {Addr: addr("10.1.1.3")},
		}})
	return c
}

// inNamespace makes a network namespace whose programs see a Pod's resolv.conf, and runs open there.
func inNamespace(t *testing.T, open func()) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	ip := tool(t, "ip")
	name := fmt.Sprintf("dns-test-%d", os.Getpid())
	etc := filepath.Join("/etc/netns", name)
	if err := os.MkdirAll(etc, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(etc); os.Remove("/etc/netns") })
	if err := os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte(podResolvConf), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"netns", "add", name}, {"-n", name, "link", "set", "lo", "up"}} {
		if out, err := exec.Command(ip, args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() { exec.Command(ip, "netns", "del", name).Run() })
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, in its namespace
		f, err := os.Open("/var/run/netns/" + name)
		if err == nil {
			err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
			f.Close()
		}
		if err == nil {
			open()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return name
}

// Real resolvers, with a Pod's resolv.conf, must find every form of a name: glibc's, musl's, Go's, dig, and each of them
// through unbound as a forwarder in front.
func TestRealResolvers(t *testing.T) {
	tool(t, "getent")
	program := muslProgram(t)
	unboundPath, digPath := tool(t, "unbound"), tool(t, "dig")
	for _, front := range []bool{false, true} {
		t.Run(map[bool]string{false: "direct", true: "behind unbound"}[front], func(t *testing.T) {
			port := uint16(53)
			if front {
				port = 5353
			}
			world := upstream(t) // outside, where the server's questions come from
			ns := inNamespace(t, func() {
				started(t, documented(), Options{Listen: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)}, Forward: world})
			})
			if front {
				runUnbound(t, ns, unboundPath)
			}
			for name, want := range names {
				for resolver, got := range map[string][]string{"glibc": glibc(t, ns, name), "musl": musl(ns, program, name), "Go": golang(t, ns, name)} {
					if !slices.Equal(got, want) {
						t.Errorf("%s finds for %q: %v, want %v", resolver, name, got, want)
					}
				}
			}
			dig := func(args ...string) string {
				out, _ := exec.Command("ip", append([]string{"netns", "exec", ns, digPath, "+short", "+search"}, args...)...).CombinedOutput()
				return strings.TrimSpace(string(out))
			}
			for _, c := range [][3]string{
				{"SRV", "_http._tcp.my-service.my-ns", "0 50 80 my-service.my-ns.svc.cluster.local."},
				{"SRV", "_http._tcp.my-service", "0 50 80 my-service.my-ns.svc.cluster.local."},
				{"SRV", "_http._tcp.10-1-1-1.headless", ""},
				{"SRV", "10-1-1-1.headless", "0 100 9376 10-1-1-1.headless.my-ns.svc.cluster.local."},
				{"SRV", "_http._tcp.none", ""},
				{"A", "my-service.my-ns", "10.0.171.239"},
				{"AAAA", "my-service", "fd00:96::20"},
				{"A", "my-service.prod.svc.cluster.local", "my.database.example.com.\n192.0.2.7"},
				{"CNAME", "my-service.prod", "my.database.example.com."},
				{"CNAME", "out.shop", "www.example.com."},
				{"TXT", "dns-version.cluster.local", `"1.1.0"`},
			} {
				if got := dig(c[0], c[1]); got != c[2] {
					t.Errorf("dig %s %s: %q, want %q", c[0], c[1], got, c[2])
				}
			}
			if got := dig("-x", "10.96.0.10"); got != "web.shop.svc.cluster.local." {
				t.Errorf("dig -x: %q", got)
			}
		})
	}
}

// muslProgram is a program of musl's libc that looks names up, one a line.
func muslProgram(t *testing.T) string {
	compiler := tool(t, "musl-gcc")
	dir := t.TempDir()
	source, program := filepath.Join(dir, "lookup.c"), filepath.Join(dir, "lookup")
	text := `#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
int main(int argc, char **argv) {
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list, *a;
	char text[64];
	if (getaddrinfo(argv[1], 0, &hints, &list))
		return 1;
	for (a = list; a; a = a->ai_next)
		if (!getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof text, 0, 0, NI_NUMERICHOST))
			puts(text);
	return 0;
}
`
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(compiler, "-static", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("musl-gcc: %v\n%s", err, out)
	}
	return program
}

func musl(ns, program, name string) []string {
	out, _ := exec.Command("ip", "netns", "exec", ns, program, name).Output()
	return sorted(strings.Fields(string(out)))
}

func glibc(t *testing.T, ns, name string) []string {
	out, _ := exec.Command("ip", "netns", "exec", ns, "getent", "ahosts", name).Output()
	var found []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == "STREAM" {
			found = append(found, f[0])
		}
	}
	return sorted(found)
}

// golang asks Go's own resolver, in a process inside the namespace: this test binary, run again.
func golang(t *testing.T, ns, name string) []string {
	cmd := exec.Command("ip", "netns", "exec", ns, "/proc/self/exe", "-test.run", "^TestLookupHelper$", "-test.v")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Args[4] = exe
	cmd.Env = append(os.Environ(), "PORTAL_LOOKUP="+name, "GODEBUG=netdns=go")
	out, _ := cmd.Output()
	var found []string
	for line := range strings.Lines(string(out)) {
		if a, ok := strings.CutPrefix(line, "FOUND "); ok {
			found = append(found, strings.TrimSpace(a))
		}
	}
	return sorted(found)
}

func sorted(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}

// TestLookupHelper is the part of golang that runs in the namespace.
func TestLookupHelper(t *testing.T) {
	name := os.Getenv("PORTAL_LOOKUP")
	if name == "" {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	addrs, err := (&net.Resolver{PreferGo: true}).LookupHost(ctx, name)
	if err != nil {
		return
	}
	for _, a := range addrs {
		fmt.Println("FOUND", a)
	}
}

// runUnbound runs unbound in front of the server: everything is forwarded, as on many nodes.
func runUnbound(t *testing.T, ns, path string) {
	dir := t.TempDir()
	conf := filepath.Join(dir, "unbound.conf")
	text := `server:
  interface: 127.0.0.1
  do-not-query-localhost: no
  module-config: "iterator"
  chroot: ""
  username: ""
  directory: "` + dir + `"
  pidfile: ""
  use-syslog: no
  local-zone: "10.in-addr.arpa." nodefault
  unblock-lan-zones: yes
  insecure-lan-zones: yes
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: 127.0.0.1@5353
`
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("ip", "netns", "exec", ns, path, "-d", "-c", conf)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	for end := time.Now().Add(5 * time.Second); len(glibc(t, ns, "web.shop.svc.cluster.local.")) == 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("unbound does not answer:\n%s", log.String())
		}
	}
}

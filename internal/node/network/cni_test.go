package network_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"portal/internal/node/network"
	"portal/internal/node/network/cni"
)

// plugin is a CNI plugin that connects a Pod by a pair of interfaces. It writes down how it was called, and fails if it finds a file "fail".
const plugin = `#!/bin/sh
dir=$(dirname "$0")
config=$(cat)
echo "$CNI_COMMAND $CNI_CONTAINERID ns=${CNI_NETNS:+given} args=$CNI_ARGS config=$(echo $config)" >> "$dir/calls"
version=$(echo "$config" | sed -n 's/.*"cniVersion": *"\([^"]*\)".*/\1/p' | head -1)
host="wire$(echo "$CNI_CONTAINERID" | cut -c1-8)"
case "$CNI_COMMAND" in
VERSION)
	echo '{"cniVersion": "1.1.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}' ;;
ADD)
	n=$(cat "$dir/next" 2>/dev/null || echo 2)
	echo $((n + 1)) > "$dir/next"
	ip link add "$host" type veth peer name "$CNI_IFNAME" && nsenter "--net=$CNI_NETNS" sleep 0 && ip link set "$CNI_IFNAME" netns "$CNI_NETNS" || exit 1
	if [ -e "$dir/fail" ]; then echo '{"cniVersion": "1.0.0", "code": 100, "msg": "no more wire"}'; exit 1; fi
	ip link set "$host" up
	ip route add "10.77.0.$n" dev "$host"
	ip address add 169.254.1.1/32 dev "$host"
	nsenter "--net=$CNI_NETNS" sh -c "ip address add 10.77.0.$n/32 dev $CNI_IFNAME && ip link set $CNI_IFNAME up && ip route add 169.254.1.1 dev $CNI_IFNAME && ip route add default via 169.254.1.1" >&2
	echo "{\"cniVersion\": \"$version\", \"interfaces\": [{\"name\": \"$host\"}, {\"name\": \"$CNI_IFNAME\", \"sandbox\": \"$CNI_NETNS\"}],
		\"ips\": [{\"address\": \"169.254.1.1/32\", \"interface\": 0}, {\"address\": \"10.77.0.$n/32\", \"interface\": 1}]}" ;;
CHECK)
	nsenter "--net=$CNI_NETNS" ip address show dev "$CNI_IFNAME" 2>/dev/null | grep -q 10.77.0 || { echo '{"cniVersion": "1.0.0", "code": 101, "msg": "no address"}'; exit 1; } ;;
DEL)
	ip link del "$host" 2>/dev/null
	exit 0 ;;
esac
`

type cniNode struct {
	machine
	dir, bin, conf string
}

func newCNI(t *testing.T, version string) *cniNode {
	t.Helper()
	n := &cniNode{machine: newMachine(t), dir: t.TempDir(), bin: t.TempDir(), conf: t.TempDir()}
	if err := os.WriteFile(filepath.Join(n.bin, "wire"), []byte(plugin), 0o755); err != nil {
		t.Fatal(err)
	}
	n.configure(t, fmt.Sprintf(`{"cniVersion": %q, "name": "wires", "plugins": [{"type": "wire", "capabilities": {"portMappings": true}}]}`, version))
	return n
}

func (n *cniNode) configure(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(n.conf, "10-wires.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (n *cniNode) network() *cni.Network {
	return cni.New(cni.Options{ConfDir: n.conf, BinDirs: []string{n.bin}, Dir: n.dir})
}

// calls are how the plugin was called since the last time.
func (n *cniNode) calls(t *testing.T) string {
	t.Helper()
	path := filepath.Join(n.bin, "calls")
	data, _ := os.ReadFile(path)
	_ = os.Remove(path)
	return string(data)
}

func commands(calls string) string {
	var out []string
	for _, line := range strings.Split(strings.TrimSpace(calls), "\n") {
		out = append(out, strings.Fields(line + " ?")[0])
	}
	return strings.Join(out, " ")
}

func namespacePath(p machine) string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.Handle)
}

func TestCNI(t *testing.T) {
	for _, version := range []string{"0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			n := newCNI(t, version)
			p, q := machine{network.NewNamespace(t)}, machine{network.NewNamespace(t)}
			port := network.Port{Protocol: "UDP", HostPort: 53, Pod: 5353, Host: netip.MustParseAddr("192.0.2.1")}
			n.Do(func() {
				w := n.network()
				if err := w.Setup(); err != nil {
					t.Fatal(err)
				}
				if !w.MapsPorts() {
					t.Error("the capability portMappings is not seen")
				}
				got, err := w.Attach(t.Context(), network.Pod{UID: "11111111-p", Namespace: "ns", Name: "p", Ports: []network.Port{port}}, namespacePath(p))
				if err != nil || fmt.Sprint(got) != "[10.77.0.2]" {
					t.Fatalf("%v, %v", got, err)
				}
				calls := n.calls(t)
				for _, want := range []string{"ADD 11111111-p ns=given", "K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;", `"portMappings":[{"hostPort":53,"containerPort":5353,"protocol":"udp","hostIP":"192.0.2.1"}]`} {
					if !strings.Contains(calls, want) {
						t.Errorf("the plugin did not get %s:\n%s", want, calls)
					}
				}
				if got, err := w.Attach(t.Context(), network.Pod{UID: "22222222-q", Namespace: "ns", Name: "q"}, namespacePath(q)); err != nil || fmt.Sprint(got) != "[10.77.0.3]" {
					t.Fatalf("%v, %v", got, err)
				}
			})
			p.Serve(t, ":8080")
			expect(t, "the node", n.machine, "10.77.0.2:8080", netip.MustParseAddr("169.254.1.1"))
			if got := p.ip(t, "-br link show lo"); !strings.Contains(got, "UP") {
				t.Errorf("the Pod's loopback: %s", got)
			}
			n.calls(t)

			n.Do(func() {
				// Another process finds what was attached, also if the configuration is another.
				n.configure(t, fmt.Sprintf(`{"cniVersion": %q, "name": "others", "plugins": [{"type": "wire"}]}`, version))
				w := n.network()
				if got, err := w.Addresses("11111111-p"); err != nil || fmt.Sprint(got) != "[10.77.0.2]" {
					t.Errorf("%v, %v", got, err)
				}
				if got, err := w.Attach(t.Context(), network.Pod{UID: "11111111-p"}, namespacePath(p)); err != nil || fmt.Sprint(got) != "[10.77.0.2]" {
					t.Errorf("again: %v, %v", got, err)
				}
				if got := commands(n.calls(t)); got != "CHECK" {
					t.Errorf("for a Pod that is attached: %s", got)
				}
				if err := w.Sweep(t.Context(), map[string]bool{"22222222-q": true}); err != nil {
					t.Error(err)
				}
				calls := n.calls(t)
				want := "DEL"
				if version == "1.1.0" {
					want = "DEL GC"
				}
				if got := commands(calls); got != want || !strings.Contains(calls, "DEL 11111111-p ns=given") || !strings.Contains(calls, `"name":"wires"`) {
					t.Errorf("sweep: %s\n%s", got, calls)
				}
				if got, err := w.Addresses("11111111-p"); err != nil || len(got) != 0 {
					t.Errorf("after a sweep: %v, %v", got, err)
				}
			})
			// The other Pod's network namespace is gone, and its path is another's.
			n.Do(func() {
				w := n.network()
				if err := os.WriteFile(filepath.Join(n.dir, "namespaces", "22222222-q"), []byte("1:2"), 0o600); err != nil {
					t.Fatal(err)
				}
				for range 2 {
					if err := w.Detach(t.Context(), "22222222-q"); err != nil {
						t.Fatal(err)
					}
				}
				if calls := n.calls(t); commands(calls) != "DEL" || !strings.Contains(calls, "DEL 22222222-q ns= ") {
					t.Error(calls)
				}
			})
			if left := n.Run(t, "sh", "-c", "ip -br link | grep wire"); left != "" {
				t.Errorf("left: %s", left)
			}
		})
	}
}

// TestCNIFails: what a plugin made before it failed is taken back, and its own words are the error.
func TestCNIFails(t *testing.T) {
	n := newCNI(t, "1.0.0")
	p := machine{network.NewNamespace(t)}
	if err := os.WriteFile(filepath.Join(n.bin, "fail"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.Do(func() {
		w := n.network()
		_, err := w.Attach(t.Context(), network.Pod{UID: "33333333-p"}, namespacePath(p))
		if err == nil || !strings.Contains(err.Error(), "the CNI network wires") || !strings.Contains(err.Error(), "no more wire") {
			t.Error(err)
		}
		if got := commands(n.calls(t)); got != "ADD DEL" {
			t.Error(got)
		}
		_ = os.Remove(filepath.Join(n.bin, "fail"))
		if _, err := w.Attach(t.Context(), network.Pod{UID: "33333333-p"}, namespacePath(p)); err != nil {
			t.Errorf("the next attempt: %v", err)
		}
	})
}

// TestCNIMistakes: a person learns which file is wrong, and how.
func TestCNIMistakes(t *testing.T) {
	for name, c := range map[string]struct{ config, want string }{
		"not JSON":     {`{`, "10-wires.conflist: "},
		"no name":      {`{"cniVersion": "1.0.0", "plugins": [{"type": "wire"}]}`, "no name"},
		"no plugin":    {`{"cniVersion": "1.0.0", "name": "x", "plugins": []}`, "plugin"},
		"not there":    {`{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "missing"}]}`, "the plugin missing is not in "},
		"no such file": {"", "there is no CNI configuration"},
	} {
		conf, bin := t.TempDir(), t.TempDir()
		if err := os.WriteFile(filepath.Join(bin, "wire"), []byte(plugin), 0o755); err != nil {
			t.Fatal(err)
		}
		if c.config != "" {
			if err := os.WriteFile(filepath.Join(conf, "10-wires.conflist"), []byte(c.config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		err := cni.New(cni.Options{ConfDir: conf, BinDirs: []string{bin}, Dir: t.TempDir()}).Setup()
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), conf) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

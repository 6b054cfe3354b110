package test

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

const services = "/api/v1/namespaces/default/services"

func serviceBody(name, spec string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":%q},"spec":%s}`, name, spec)
}

// TestAccess: who has no credentials sees whether the server is well and which it is; who has some but no role sees also what
// the API has; a wrong token is worse than none.
func TestAccess(t *testing.T) {
	t.Parallel()
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	if err := os.WriteFile(tokens, []byte("good,alice,1,\"system:masters\"\nplain,bob,2,\"friends\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--controllers", "none", "--token-auth-file", tokens)
	everybody := []string{"/healthz", "/livez", "/readyz", "/version"}
	known := []string{"/api", "/apis", "/openapi/v2", "/openapi/v3"}
	masters := []string{"/metrics", "/api/v1/services", services, "/", "/healthz/etcd"}
	for name, who := range map[string]struct {
		caller                 *caller
		open, discovery, other int
	}{
		"nobody":           {somebody(api, ""), 200, 403, 403},
		"wrong token":      {somebody(api, "nonsense"), 401, 401, 401},
		"bob":              {somebody(api, "plain"), 200, 200, 403},
		"alice":            {somebody(api, "good"), 200, 200, 200},
		"by a certificate": {admin(t, api), 200, 200, 200},
	} {
		t.Run(name, func(t *testing.T) {
			for _, path := range everybody {
				if code, answer := who.caller.ask(t, "GET", path, ""); code != who.open {
					t.Errorf("GET %s: %d, want %d: %s", path, code, who.open, answer)
				}
			}
			for _, path := range known {
				if code, answer := who.caller.ask(t, "GET", path, ""); code != who.discovery {
					t.Errorf("GET %s: %d, want %d: %.200s", path, code, who.discovery, answer)
				}
			}
			for _, path := range masters {
				if code, answer := who.caller.ask(t, "GET", path, ""); code != who.other {
					t.Errorf("GET %s: %d, want %d: %.200s", path, code, who.other, answer)
				}
			}
			code, _ := who.caller.ask(t, "POST", services+"?dryRun=All", serviceBody("x", `{"ports":[{"port":80}]}`))
			if want := max(who.other, 201); who.other == 200 && code != want || who.other != 200 && code != who.other {
				t.Errorf("POST: %d", code)
			}
		})
	}
	if _, metrics := admin(t, api).ask(t, "GET", "/metrics", ""); !strings.Contains(metrics, "\napiserver_request_total{") {
		t.Error("/metrics has no apiserver_request_total")
	}
}

// TestFilesAndSockets: keys are their owner's alone, and nothing listens where others could reach it.
func TestFilesAndSockets(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	data := filepath.Dir(api.Kubeconfig)
	err := filepath.WalkDir(data, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm()
		if secret := !strings.HasSuffix(path, ".crt"); secret && mode&0o077 != 0 {
			t.Errorf("%s has mode %o: others may read it", path, mode)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"admin.kubeconfig", "pki/ca.key", "pki/server.key", "pki/admin.key"} {
		if info, err := os.Stat(filepath.Join(data, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v: want mode 600", name, info.Mode(), err)
		}
	}
	open := listening(t, api.Pid())
	if len(open) != 1 {
		t.Errorf("it listens at %v: want its one port", open)
	}
	for _, at := range open {
		if !at.Addr().IsLoopback() {
			t.Errorf("it listens at %s, beyond loopback", at)
		}
	}
}

// listening are the addresses at which a process accepts connections: those sockets of the kernel's table that are
// among its files.
func listening(t *testing.T, pid int) (out []netip.AddrPort) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	mine := map[string]bool{}
	for _, f := range files {
		if target, err := os.Readlink(f); err == nil {
			mine[strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]")] = true
		}
	}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		f, err := os.Open(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // a kernel without IPv6
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			columns := strings.Fields(lines.Text())
			// 0A is LISTEN; a UDP socket that is open for all is 07.
			if len(columns) > 9 && mine[columns[9]] && (columns[3] == "0A" || columns[3] == "07" && strings.HasPrefix(table, "udp")) {
				out = append(out, parseSocket(t, columns[1]))
			}
		}
	}
	return out
}

// parseSocket reads the kernel's way of writing an address: words of four bytes, each in the machine's order.
func parseSocket(t *testing.T, text string) netip.AddrPort {
	t.Helper()
	host, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+4 <= len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	addr, _ := netip.AddrFromSlice(raw)
	var number uint16
	if _, err := fmt.Sscanf(port, "%X", &number); err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(addr.Unmap(), number)
}

// TestDrain: a server that is asked to end answers what it has begun, ends watches, and is gone with status 0.
func TestDrain(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	client := connect(t, api.Kubeconfig)
	watch, err := client.CoreV1().Services("").Watch(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()

	// A request whose body comes in two halves, with the signal between them.
	body := serviceBody("late", `{"ports":[{"port":80}]}`)
	reader, writer := io.Pipe()
	answered := make(chan string, 1)
	go func() {
		who := admin(t, api)
		resp, err := who.client.Post(who.url+services, "application/json", reader)
		if err != nil {
			answered <- err.Error()
			return
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		answered <- resp.Status
	}()
	if _, err := io.WriteString(writer, body[:20]); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // the server has begun with it
	started := time.Now()
	if err := syscall.Kill(api.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	if _, err := io.WriteString(writer, body[20:]); err != nil {
		t.Error(err)
	}
	_ = writer.Close()
	if status := <-answered; !strings.HasPrefix(status, "201") {
		t.Errorf("the request that was under way: %s", status)
	}
	if err := api.Wait(10 * time.Second); err != nil {
		t.Errorf("after SIGTERM: %v\n%s", err, api.Tail())
	}
	t.Logf("it took %s", time.Since(started).Round(time.Millisecond))
	for range watch.ResultChan() { //nolint:revive // it must end, or the test does not
	}
	// It comes back with what it answered last.
	again, err := harness.StartPortalAt(filepath.Dir(filepath.Dir(api.Kubeconfig)), harness.FreePort(), "--controllers", "none")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Kill()
	if code, answer := admin(t, again).ask(t, "GET", services+"/late", ""); code != 200 {
		t.Errorf("after a restart: %d %s", code, answer)
	}
}

// TestLimits: what is too large is refused before it is read, and what is not allowed is said to be.
func TestLimits(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none", "--deny-service-external-ips", "--max-request-bytes", "100000")
	who := admin(t, api)
	large := serviceBody("large", fmt.Sprintf(`{"externalName":%q,"type":"ExternalName"}`, strings.Repeat("a", 100_000)))
	kinds := map[string]string{"POST": "application/json", "PUT": "application/json", "PATCH": "application/merge-patch+json"}
	for method := range kinds {
		path := services
		if method != "POST" {
			path += "/large"
		}
		code, answer, err := who.try(method, path, kinds[method], large)
		if err != nil || code != 413 {
			t.Errorf("%s of %d bytes: %d %v %.200s", method, len(large), code, err, answer)
		}
	}
	code, answer := who.ask(t, "POST", services, serviceBody("thief", `{"externalIPs":["80.11.12.10"],"ports":[{"port":80}]}`))
	if code != 403 || !strings.Contains(answer, "80.11.12.10") {
		t.Errorf("a new external IP: %d %s", code, answer)
	}
	if code, answer := who.ask(t, "POST", services, serviceBody("honest", `{"ports":[{"port":80}]}`)); code != 201 {
		t.Errorf("without one: %d %s", code, answer)
	}
	code, answer, err := who.try("PATCH", services+"/honest", "application/merge-patch+json", `{"spec":{"externalIPs":["80.11.12.10"]}}`)
	if err != nil || code != 403 {
		t.Errorf("a new external IP by patch: %d %v %s", code, err, answer)
	}
	for _, wrong := range []string{"{", "[]", "null", `{"kind":"Service"}`, `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x"}}`, "\x00\x01", strings.Repeat("[", 90_000)} {
		if code, answer := who.ask(t, "POST", services, wrong); code < 400 || code >= 500 {
			t.Errorf("a body of %.30q: %d %.200s", wrong, code, answer)
		}
	}
}

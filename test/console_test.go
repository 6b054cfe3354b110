package test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// consoleServer is a server with the objects of testdata/console, and the tokens of two users: alice may do everything, bob may
// read the namespace billing.
func consoleServer(t *testing.T) (*harness.API, string) {
	t.Helper()
	need(t, harness.Portal(), "build")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tokens.csv"), []byte("alice-token,alice,1,\"system:masters\"\nbob-token,bob,2,\"friends\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	api, err := harness.StartPortal(dir, consoleFlags(dir)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	data := filepath.Join(harness.Root(), "test", "testdata", "console")
	for _, args := range [][]string{
		{"apply", "-f", filepath.Join(data, "nodes.yaml")},
		{"apply", "--server-side", "--force-conflicts", "--subresource=status", "-f", filepath.Join(data, "nodes.yaml")},
		{"apply", "-f", filepath.Join(data, "objects.yaml")},
		{"apply", "-f", filepath.Join(data, "rights.yaml")},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		out, err := harness.Run(ctx, nil, harness.Portal(), append([]string{"kubectl", "--kubeconfig", api.Kubeconfig}, args...)...)
		cancel()
		if err != nil {
			t.Fatalf("kubectl %v: %v\n%s", args, err, out)
		}
	}
	return api, dir
}

// consoleFlags have the nodes' conditions stay as the test wrote them.
func consoleFlags(dir string) []string {
	return []string{"--token-auth-file", filepath.Join(dir, "tokens.csv"), "--node-monitor-grace-period", "24h"}
}

// browse is somebody's browser, without the browser.
func browse(t *testing.T) *http.Client {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &http.Client{Jar: jar, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // loopback
}

func sendJSON(t *testing.T, who *http.Client, url, body string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := who.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(answer)
}

// firstEvent is the data of the first event of a stream.
func firstEvent(t *testing.T, who *http.Client, url string) (int, string) {
	t.Helper()
	return streamEvent(t, who, url, "data: ")
}

// streamEvent is the data of the first event of a stream that has a text in it.
func streamEvent(t *testing.T, who *http.Client, url, text string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := who.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var got bytes.Buffer
	for {
		piece := make([]byte, 64<<10)
		n, err := response.Body.Read(piece)
		got.Write(piece[:n])
		all := strings.Split(got.String(), "\n\n")
		for _, event := range all[:len(all)-1] {
			if strings.Contains(event, text) {
				_, data, _ := strings.Cut(event, "data: ")
				return response.StatusCode, data
			}
		}
		if err != nil {
			return response.StatusCode, ""
		}
	}
}

func getText(t *testing.T, who *http.Client, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := who.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// checkConsoleTrace: the console's trace is that of the command, word by word; somebody with few rights gets one of what they may see.
func checkConsoleTrace(t *testing.T, api *harness.API, alice, bob *http.Client) {
	t.Helper()
	at := api.URL + "/console/api/trace/"
	for _, to := range []string{"web.shop:80", "search.shop:80", "nobody.shop:80", "192.0.2.200:443"} {
		code, body := getText(t, alice, at+"shop?from=10.9.9.9&via=node-1&to="+to)
		var got struct{ Text, Verdict string }
		if err := json.Unmarshal([]byte(body), &got); err != nil || code != http.StatusOK {
			t.Errorf("to %s: %d %s", to, code, body)
			continue
		}
		want, err := harness.Run(t.Context(), nil, harness.Portal(), "trace", "--kubeconfig", api.Kubeconfig, "-n", "shop", "--from", "10.9.9.9", "--via", "node-1", "--to", to)
		// The command also says by its exit status, and a last line, that a packet does not arrive.
		if !strings.HasPrefix(want, got.Text) || (err == nil) != (got.Verdict == "arrives" || got.Verdict == "leaves") {
			t.Errorf("to %s, the console says\n%s\nand the command (%v)\n%s", to, got.Text, err, want)
		}
	}
	for query, want := range map[string]string{
		"shop?from=nobody&to=web.shop:80":             `"field":"from"`,
		"shop?from=client&to=web.shop":                `"field":"to"`,
		"shop?from=client&to=web.shop:80&mode=wrong":  `"field":"mode"`,
		"shop?from=client&to=web.shop:80&via=nowhere": `"field":"via"`,
		"Not%20A%20Name?from=client&to=10.96.0.1:443": `"field":"namespaces"`,
	} {
		if code, body := getText(t, alice, at+query); code != http.StatusUnprocessableEntity || !strings.Contains(body, want) {
			t.Errorf("%s: %d %s, want %s", query, code, body, want)
		}
	}
	if code, body := getText(t, bob, at+"shop?from=client&to=web.shop:80"); code != http.StatusUnprocessableEntity || !strings.Contains(body, "you may not watch Services") {
		t.Errorf("bob traces in a namespace that he may not see: %d %s", code, body)
	}
	code, body := getText(t, bob, at+"billing?from=10.9.9.9&via=node-2&to=invoices:80")
	if code != http.StatusOK || !strings.Contains(body, "10.244.2.91") || !strings.Contains(body, "Nodes can't be read here") || !strings.Contains(body, "only the namespace billing can be read here") {
		t.Errorf("bob's trace: %d %s", code, body)
	}
}

// checkConsoleFindings: a page has what `portal explain` says, of what its user may see.
func checkConsoleFindings(t *testing.T, api *harness.API, alice, bob *http.Client) {
	t.Helper()
	at := api.URL + "/console/api/stream/services/"
	var page struct{ Findings []struct{ Verdict string } }
	_, data := streamEvent(t, alice, at+"shop/search", `"findings":[`)
	if err := json.Unmarshal([]byte(data), &page); err != nil {
		t.Errorf("%v: %.300s", err, data)
		return
	}
	// Its exit status says that something is wrong.
	said, _ := harness.Run(t.Context(), nil, harness.Portal(), "explain", "--kubeconfig", api.Kubeconfig, "service", "search", "-n", "shop")
	if !strings.Contains(said, page.Findings[0].Verdict) {
		t.Errorf("the page says %q, and the command\n%s", page.Findings[0].Verdict, said)
	}
	if _, data := streamEvent(t, bob, at+"billing/reports", `"findings":[`); data == "" {
		t.Error("somebody who may read one namespace gets no findings there")
	}
}

// checkConsoleTraffic: without the right to ask nodes there are no figures, and the page gets the reason; with it, it gets what nodes say.
func checkConsoleTraffic(t *testing.T, page string, alice, bob *http.Client) {
	t.Helper()
	for who, want := range map[*http.Client]string{bob: "the right to list and watch nodes", alice: "no node answers"} {
		for _, path := range []string{"stream?traffic=true", "stream/services/billing/invoices"} {
			if _, data := streamEvent(t, who, page+path, "event: traffic"); !strings.Contains(data, want) {
				t.Errorf("%s: %.300s, want %s", path, data, want)
			}
		}
	}
}

// TestConsoleAccess: without a session nothing is shown; with one, what its user may see; another user's is another's.
func TestConsoleAccess(t *testing.T) {
	t.Parallel()
	api, _ := consoleServer(t)
	page := api.URL + "/console/api/"
	nobody, alice, bob := browse(t), browse(t), browse(t)
	for _, path := range []string{"stream", "stream/services/shop/web", "trace/shop?from=client&to=10.96.0.1:443"} {
		if code, data := firstEvent(t, nobody, page+path); code != http.StatusUnauthorized || data != "" {
			t.Errorf("%s without a session: %d %.100s", path, code, data)
		}
	}
	if code, answer := sendJSON(t, nobody, page+"signin", `{"token":"wrong"}`); code != http.StatusUnprocessableEntity || !strings.Contains(answer, "does not accept") {
		t.Errorf("a wrong token: %d %s", code, answer)
	}
	for who, c := range map[*http.Client]string{alice: `{"token":"alice-token"}`, bob: `{"token":"bob-token","namespaces":["billing","shop"]}`} {
		if code, answer := sendJSON(t, who, page+"signin", c); code != http.StatusOK {
			t.Fatalf("sign-in: %d %s", code, answer)
		}
	}
	if _, all := firstEvent(t, alice, page+"stream"); !strings.Contains(all, `"ns":"shop"`) || !strings.Contains(all, `"ns":"billing"`) || !strings.Contains(all, `"name":"node-4"`) {
		t.Errorf("alice does not see everything: %.300s", all)
	}
	if _, some := firstEvent(t, bob, page+"stream"); strings.Contains(some, `"ns":"shop"`) || !strings.Contains(some, `"ns":"billing"`) || strings.Contains(some, "node-4\"") {
		t.Errorf("bob does not see just what he may: %.1000s", some)
	}
	if _, hidden := firstEvent(t, bob, page+"stream/services/shop/web"); !strings.Contains(hidden, `"found":false`) || strings.Contains(hidden, "10.244") {
		t.Errorf("bob sees a Service that he may not: %.300s", hidden)
	}
	checkConsoleFindings(t, api, alice, bob)
	checkConsoleTrace(t, api, alice, bob)
	checkConsoleTraffic(t, page, alice, bob)
	if code, answer := sendJSON(t, bob, page+"signout", `{}`); code != http.StatusOK {
		t.Fatalf("sign-out: %d %s", code, answer)
	}
	if code, _ := firstEvent(t, bob, page+"stream"); code != http.StatusUnauthorized {
		t.Errorf("a session outlives its sign-out: %d", code)
	}
	refused := false
	for range 20 {
		if code, _ := sendJSON(t, nobody, page+"signin", `{"token":"wrong"}`); code == http.StatusTooManyRequests {
			refused = true
			break
		}
	}
	if !refused {
		t.Error("tokens can be guessed as fast as somebody likes")
	}
}

// TestConsoleOff: --console=false serves none.
func TestConsoleOff(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none", "--console=false")
	if code, answer := somebody(api, "").ask(t, "GET", "/console/", ""); code != http.StatusForbidden {
		t.Errorf("%d %.100s", code, answer)
	}
}

// TestConsoleBrowser builds the page from its sources, compares it with what is in the binary, and uses it in a browser.
func TestConsoleBrowser(t *testing.T) {
	t.Parallel()
	buildConsole(t)
	api, dir := consoleServer(t)
	browser(t, api, dir, map[string]any{"parts": []string{"tour", "limited"}})
}

// buildConsole checks that what `make console` would write is there already.
func buildConsole(t *testing.T) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "dist")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if output, err := harness.Run(ctx, nil, filepath.Join(harness.Root(), "hack", "console"), out); err != nil {
		t.Fatalf("hack/console: %v\n%s", err, output)
	}
	kept := filepath.Join(harness.Root(), "internal", "console", "ui", "dist")
	if diff, err := exec.CommandContext(ctx, "diff", "-rq", kept, out).CombinedOutput(); err != nil {
		t.Fatalf("internal/console/ui/dist is not what its sources give: run `make console`\n%s", diff)
	}
}

// browser runs internal/console/ui/test/console.mjs.
func browser(t *testing.T, api *harness.API, dir string, more map[string]any) {
	t.Helper()
	given := map[string]any{
		"url": api.URL + "/console/", "kubeconfig": api.Kubeconfig, "token": "bob-token", "namespace": "billing",
		"portal": harness.Portal(), "objects": filepath.Join(harness.Root(), "test", "testdata", "console", "objects.yaml"),
		"control": controlServer(t, api, dir), "shots": os.Getenv("CONSOLE_SHOTS"),
	}
	maps.Copy(given, more)
	runBrowser(t, given)
}

// runBrowser runs the script with what it is given.
func runBrowser(t *testing.T, given map[string]any) {
	t.Helper()
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("Debian's chromium is needed: ", err)
	}
	given["chromium"] = chromium
	config, err := json.Marshal(given)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	script := filepath.Join(harness.Root(), ".cache", "console", "test", "console.mjs")
	out, err := harness.Run(ctx, []string{"CONSOLE=" + string(config)}, "node", script)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Log(out)
}

// controlServer lets the script stop and start the server.
func controlServer(t *testing.T, api *harness.API, dir string) string {
	t.Helper()
	var port int
	if _, err := fmt.Sscanf(api.URL, "https://127.0.0.1:%d", &port); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		if err := api.Stop(time.Minute); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	mux.HandleFunc("POST /start", func(w http.ResponseWriter, _ *http.Request) {
		again, err := harness.StartPortalAt(dir, port, consoleFlags(dir)...)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		t.Cleanup(again.Kill)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}

package test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"sigs.k8s.io/yaml"

	"portal/internal/lab"
	"portal/test/harness"
)

// monitoring is a path below deploy/monitoring.
func monitoring(path ...string) string {
	return filepath.Join(append([]string{harness.Root(), "deploy", "monitoring"}, path...)...)
}

// promtool runs Prometheus' own checker.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v: the Debian package is prometheus\n%s", args, err, out)
	}
}

// alertRule is a rule of rules.yaml: one that records or one that alerts.
type alertRule struct {
	Alert, Record, Expr string
	Labels, Annotations map[string]string
}

func alertRules(t *testing.T) (out []alertRule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []alertRule } }
	readYAML(t, monitoring("rules.yaml"), &file)
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	return out
}

func readYAML(t *testing.T, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		err = yaml.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// TestMonitoringRules: every alert has tests in which it fires and in which it does not, and a section in the documents that says what to type.
func TestMonitoringRules(t *testing.T) {
	t.Parallel()
	promtool(t, "check", "rules", monitoring("rules.yaml"))
	promtool(t, "check", "config", "--syntax-only", monitoring("prometheus.yaml"))
	promtool(t, "test", "rules", monitoring("rules_test.yaml"))
	var tests struct {
		Tests []struct {
			AlertRuleTest []struct {
				AlertName string `json:"alertname"`
				Expected  []any  `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		}
	}
	readYAML(t, monitoring("rules_test.yaml"), &tests)
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, one := range tests.Tests {
		for _, a := range one.AlertRuleTest {
			fires[a.AlertName] = fires[a.AlertName] || len(a.Expected) > 0
			quiet[a.AlertName] = quiet[a.AlertName] || len(a.Expected) == 0
		}
	}
	text, err := os.ReadFile(filepath.Join(harness.Root(), "docs", "monitoring.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, runbook, _ := strings.Cut(string(text), "\n## Runbook\n")
	for _, r := range alertRules(t) {
		if r.Alert == "" {
			continue
		}
		if !fires[r.Alert] || !quiet[r.Alert] {
			t.Errorf("rules_test.yaml: %s fires in a test: %v; stays quiet in one: %v", r.Alert, fires[r.Alert], quiet[r.Alert])
		}
		if want := "docs/monitoring.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want || r.Annotations["summary"] == "" || r.Labels["severity"] == "" {
			t.Errorf("%s: annotations %v, labels %v; want a summary, a severity and the runbook %s", r.Alert, r.Annotations, r.Labels, want)
		}
		_, section, found := strings.Cut(runbook, "\n### "+r.Alert+"\n")
		section, _, _ = strings.Cut(section, "\n### ")
		if !found || !strings.Contains(section, "`portal ") && !strings.Contains(section, "\nportal ") {
			t.Errorf("docs/monitoring.md has no section %s that says what to type", r.Alert)
		}
	}
}

// expression is one of a rule or of a dashboard's panel.
type expression struct{ where, text, legend string }

// expressions are those of all rules and dashboards, with Grafana's variables filled in.
func expressions(t *testing.T) (out []expression) {
	t.Helper()
	for _, r := range alertRules(t) {
		out = append(out, expression{where: r.Alert + r.Record, text: r.Expr})
	}
	files, err := filepath.Glob(monitoring("dashboards", "*.json"))
	if err != nil || len(files) != 6 {
		t.Fatalf("%d dashboards, %v", len(files), err)
	}
	variables := strings.NewReplacer("$__rate_interval", "1m", "$instance", ".*", "$namespace", ".*", "$service", ".*")
	for _, path := range files {
		var board struct {
			Title      string
			Templating struct {
				List []struct{ Name, Definition string }
			}
			Panels []struct {
				Title, Type string
				Targets     []struct{ Expr, LegendFormat string }
			}
		}
		readYAML(t, path, &board)
		for _, v := range board.Templating.List {
			if selector, found := strings.CutPrefix(v.Definition, "label_values("); found {
				selector, label, _ := cutLast(strings.TrimSuffix(selector, ")"), ", ")
				out = append(out, expression{where: board.Title + ": $" + v.Name, text: "count by (" + label + ") (" + variables.Replace(selector) + ")"})
			}
		}
		for _, p := range board.Panels {
			if p.Type != "row" && len(p.Targets) == 0 {
				t.Errorf("%s: %s shows nothing", board.Title, p.Title)
			}
			for _, target := range p.Targets {
				out = append(out, expression{board.Title + ": " + p.Title, variables.Replace(target.Expr), target.LegendFormat})
			}
		}
	}
	return out
}

func cutLast(text, separator string) (before, after string, found bool) {
	i := strings.LastIndex(text, separator)
	if i < 0 {
		return text, "", false
	}
	return text[:i], text[i+len(separator):], true
}

// exposed are the names of the labels of each series that is served.
type exposedSeries map[string]map[string]bool

// add reads metrics in the text format.
func (e exposedSeries) add(t *testing.T, text string) {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("%v\n%.1000s", err, text)
	}
	for name, family := range families {
		names := []string{name}
		labels := map[string]bool{}
		for _, m := range family.Metric {
			for _, l := range m.Label {
				labels[l.GetName()] = true
			}
			if m.Histogram != nil {
				names, labels["le"] = []string{name + "_bucket", name + "_count", name + "_sum"}, true
			}
		}
		for _, n := range names {
			if e[n] == nil {
				e[n] = map[string]bool{}
			}
			for l := range labels {
				e[n][l] = true
			}
		}
	}
}

// TestMonitoring: in a lab, Prometheus with the configuration, rules and rights of deploy/monitoring reaches every part; every series and label
// that a rule or dashboard uses is served; every expression can be evaluated; and no alert fires where nothing is wrong.
func TestMonitoring(t *testing.T) {
	l := startLab(t, lab.Options{
		Nodes: 2, BalancerPools: []string{"192.168.100.220-192.168.100.239"},
		NodeArgs: []string{
			"--proxy-metrics-bind-address", "0.0.0.0", "--dns-metrics-bind-address", "0.0.0.0", "--load-balancer-metrics-bind-address", "0.0.0.0",
			"--load-balancer-announce", "l2,bgp", "--load-balancer-bgp-peer", "192.168.100.1;as=65001;local-as=65000",
		},
	})
	p := startPrometheus(t, l)
	labKubectl(t, l, workload{name: "web", replicas: 2, pod: spread("web")}.String()+
		serviceManifest("web", "LoadBalancer", "web", "", aws("backend-protocol", "http")), "apply")
	answers(t, l, ingressOf(t, l, "web", 1)[0], "/")
	for _, node := range l.NodeNames() {
		on(t, l.Node(node), "dig", "+short", "@10.96.0.10", "web.default.svc.cluster.local")
	}
	p.wait(t)

	all := exposedSeries{"up": {"job": true, "instance": true}, "ALERTS": {"alertname": true, "alertstate": true}}
	all.add(t, forwarding(t, l))
	for _, r := range alertRules(t) {
		if r.Record != "" {
			all[r.Record] = map[string]bool{}
			for _, s := range selectors(r.Expr) {
				for _, l := range s.labels {
					all[r.Record][l] = true
				}
			}
		}
	}
	for _, target := range p.targets {
		all.add(t, p.fetch(t, target))
	}
	for _, e := range expressions(t) {
		for _, wrong := range all.missing(e) {
			t.Errorf("%s: %s\n\t%s", e.where, wrong, e.text)
		}
		if answer := p.ask(t, "query", url.Values{"query": {e.text}}); answer.Status != "success" {
			t.Errorf("%s: %s\n\t%s", e.where, answer.Error, e.text)
		}
	}
	p.healthy(t)
}

// forwarding are the metrics of a DNS server that forwards queries, which those of the lab have nobody to forward to.
func forwarding(t *testing.T, l *lab.Lab) string {
	t.Helper()
	addr := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	server, status := runDNS(t, "--kubeconfig", l.Kubeconfig, "--listen", addr, "--upstream", upstreamDNS(t, "192.0.2.7"))
	t.Cleanup(server.Kill)
	for range 2 { // the second from the cache
		eventually(t, time.Minute, "an answer", func() string {
			if _, _, err := new(dns.Client).Exchange(new(dns.Msg).SetQuestion("example.com.", dns.TypeA), addr); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	return scrape(t, status)
}

// prometheus is one that runs on the lab's server.
type prometheus struct {
	http    *http.Client
	targets []string
	token   string
	errs    *bytes.Buffer
}

// labAddresses are those of the machines that the configuration names.
var labAddresses = map[string]string{"server": "192.168.100.2", "node1": "192.168.100.11", "node2": "192.168.100.12"}

const prometheusAt = "http://127.0.0.1:9090/api/v1/"

func startPrometheus(t *testing.T, l *lab.Lab) *prometheus {
	t.Helper()
	path, err := exec.LookPath("prometheus")
	if err != nil {
		t.Fatalf("%v: the Debian package is prometheus", err)
	}
	dir := t.TempDir()
	labKubectl(t, l, "", "apply", "-f", monitoring("rbac.yaml"))
	token := strings.TrimSpace(labKubectl(t, l, "", "create", "token", "-n", "monitoring", "prometheus"))
	files := map[string][]byte{"token": []byte(token), "ca.crt": l.Config.CAData}
	for _, name := range []string{"prometheus.yaml", "rules.yaml"} {
		data, err := os.ReadFile(monitoring(name))
		if err != nil {
			t.Fatal(err)
		}
		files[name] = []byte(strings.NewReplacer("/etc/prometheus/portal", dir, "_interval: 15s", "_interval: 1s").Replace(string(data)))
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(l.Config.CAData)
	p := &prometheus{token: token, errs: &bytes.Buffer{}, http: &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: authorities},
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			name, port, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			if at, ok := labAddresses[name]; ok { // its hosts file has them, which only programs that run there read
				address = net.JoinHostPort(at, port)
			}
			err = l.Server.Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		},
	}}}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, path, "--config.file", filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path", filepath.Join(dir, "data"),
		"--web.listen-address", "127.0.0.1:9090", "--log.level", "warn")
	cmd.Stderr = p.errs
	var running sync.WaitGroup
	running.Go(func() { _ = l.Server.Run(cmd) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		p.http.CloseIdleConnections()
		if t.Failed() {
			t.Logf("prometheus:\n%s", p.errs.Bytes())
		}
	})
	return p
}

// prometheusAnswer is what its API answers.
type prometheusAnswer struct {
	Status, Error string
	Data          struct {
		ActiveTargets []struct{ ScrapeURL, Health, LastError string }
		Groups        []struct {
			Rules []struct{ Name, Health, LastError, State string }
		}
	}
}

func (p *prometheus) ask(t *testing.T, path string, query url.Values) (out prometheusAnswer) {
	t.Helper()
	answer, err := p.http.Get(prometheusAt + path + "?" + query.Encode())
	if err != nil {
		return prometheusAnswer{Error: err.Error()}
	}
	defer answer.Body.Close()
	if err := json.NewDecoder(answer.Body).Decode(&out); err != nil {
		out.Error = err.Error()
	}
	return out
}

// fetch reads the metrics of a target, as Prometheus does.
func (p *prometheus) fetch(t *testing.T, target string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+p.token)
	answer, err := p.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s %v %s", target, answer.Status, err, text)
	}
	return string(text)
}

// wait waits until all targets answer, and rules have been evaluated.
func (p *prometheus) wait(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, "all targets to answer", func() string {
		answer := p.ask(t, "targets", nil)
		p.targets = nil
		for _, target := range answer.Data.ActiveTargets {
			if target.Health != "up" {
				return target.ScrapeURL + " " + target.Health + " " + target.LastError
			}
			p.targets = append(p.targets, target.ScrapeURL)
		}
		if len(p.targets) != 9 {
			return fmt.Sprintf("%d targets: %v %s", len(p.targets), p.targets, answer.Error)
		}
		return ""
	})
	eventually(t, time.Minute, "rules to be evaluated", func() string {
		for _, g := range p.ask(t, "rules", nil).Data.Groups {
			for _, r := range g.Rules {
				if r.Health != "ok" {
					return r.Name + " " + r.Health + " " + r.LastError
				}
			}
		}
		return ""
	})
}

// healthy checks that no rule fails and no alert fires.
func (p *prometheus) healthy(t *testing.T) {
	t.Helper()
	rules := 0
	for _, g := range p.ask(t, "rules", nil).Data.Groups {
		for _, r := range g.Rules {
			rules++
			if r.Health != "ok" || r.State == "firing" {
				t.Errorf("%s: %s %s %s", r.Name, r.Health, r.LastError, r.State)
			}
		}
	}
	if want := len(alertRules(t)); rules != want {
		t.Errorf("Prometheus has %d rules, want %d", rules, want)
	}
}

// missing says which series and labels of an expression are not served.
func (e exposedSeries) missing(x expression) (out []string) {
	var legend []string
	for _, m := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(x.legend, -1) {
		legend = append(legend, m[1])
	}
	for _, s := range selectors(x.text) {
		labels, found := e[s.name]
		if !found {
			out = append(out, "there is no series "+s.name)
			continue
		}
		for _, l := range append(legend, s.labels...) {
			if !labels[l] && l != "job" && l != "instance" {
				out = append(out, "the series "+s.name+" has no label "+l)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

package serviceenv

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"portal/internal/intent"
)

// recorded is a case of the conformance folder: with a namespace, what a Pod there gets; without, every Service's.
type recorded struct {
	Name      string
	Services  []apiService
	Namespace *string
	Links     bool `json:"enableServiceLinks"`
	Want      [][2]string
}

// apiService is the part of a Service that makes variables, as the API writes it.
type apiService struct {
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		ClusterIP string
		Ports     []struct {
			Name, Protocol string
			Port           uint16
		}
	}
}

func (a apiService) intent() *intent.Service {
	s := &intent.Service{Key: intent.Key{Namespace: a.Metadata.Namespace, Name: a.Metadata.Name}, Headless: a.Spec.ClusterIP == "None"}
	if ip, err := netip.ParseAddr(a.Spec.ClusterIP); err == nil {
		s.ClusterIPs = []netip.Addr{ip}
	}
	for _, p := range a.Spec.Ports {
		proto := map[string]intent.Protocol{"": intent.TCP, "TCP": intent.TCP, "UDP": intent.UDP, "SCTP": intent.SCTP}[p.Protocol]
		s.Ports = append(s.Ports, intent.Port{Name: p.Name, Port: p.Port, Protocol: proto})
	}
	return s
}

func TestConformance(t *testing.T) {
	raw, err := os.ReadFile("../../test/recorded/env/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []recorded
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			var services []*intent.Service
			for _, s := range c.Services {
				services = append(services, s.intent())
			}
			if c.Namespace == nil {
				ordered(t, All(services), c.Want)
			} else {
				unordered(t, ForPod(services, *c.Namespace, c.Links), c.Want)
			}
		})
	}
}

func ordered(t *testing.T, got []Var, want [][2]string) {
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i].Name != want[i][0] || got[i].Value != want[i][1] {
			t.Fatalf("variable %d: got %v, want %v", i, got, want)
		}
	}
}

// unordered: where two Services make the same name, either value will do.
func unordered(t *testing.T, got []Var, want [][2]string) {
	wanted, last := map[string]string{}, map[string]string{}
	for _, w := range want {
		wanted[w[0]] += "\x00" + w[1] + "\x00"
	}
	for _, v := range got {
		last[v.Name] = v.Value
	}
	for name, values := range wanted {
		if v, ok := last[name]; !ok || !strings.Contains(values, "\x00"+v+"\x00") {
			t.Errorf("%s: got %q, want one of %q", name, v, values)
		}
	}
	for name, v := range last {
		if _, ok := wanted[name]; !ok {
			t.Errorf("%s=%s is unwanted", name, v)
		}
	}
}

// seed is the example of the Kubernetes documentation, to the letter.
const seed = `REDIS_MASTER_SERVICE_HOST=10.0.0.11
REDIS_MASTER_SERVICE_PORT=6379
REDIS_MASTER_PORT=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP_PROTO=tcp
REDIS_MASTER_PORT_6379_TCP_PORT=6379
REDIS_MASTER_PORT_6379_TCP_ADDR=10.0.0.11
`

func redis() []Var {
	return All([]*intent.Service{{
		Key: intent.Key{Namespace: "default", Name: "redis-master"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.0.0.11")},
		Ports: []intent.Port{{Port: 6379, Protocol: intent.TCP}},
	}})
}

func TestRedisMaster(t *testing.T) {
	var docker, sh strings.Builder
	if _, err := Write(&docker, redis(), "docker"); err != nil || docker.String() != seed {
		t.Errorf("docker: %v\n%s", err, docker.String())
	}
	if _, err := Write(&sh, redis(), "sh"); err != nil || !strings.HasPrefix(sh.String(), seed+"export ") {
		t.Errorf("sh: %v\n%s", err, sh.String())
	}
}

// What sh writes must reach a shell's children, also through an eval that joins lines.
func TestEval(t *testing.T) {
	vars := append(redis(), Var{"ODD", "it's $HOME; [x] \"y\""}, Var{"3SCALE_SERVICE_HOST", "10.0.0.1"}, Var{"SIX_PORT", "tcp://[fd00::1]:80"})
	var out strings.Builder
	skipped, err := Write(&out, vars, "sh")
	if err != nil || fmt.Sprint(skipped) != "[3SCALE_SERVICE_HOST]" {
		t.Fatal(skipped, err)
	}
	for _, script := range []string{`eval "$VARS"; env`, `eval $VARS; env`} {
		cmd := exec.Command("sh", "-c", script)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "VARS=" + out.String()}
		got, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, got)
		}
		for _, v := range vars {
			if v.Name != skipped[0] && !strings.Contains("\n"+string(got), "\n"+v.Name+"="+v.Value+"\n") {
				t.Errorf("%s: %s=%s is not in the environment:\n%s", script, v.Name, v.Value, got)
			}
		}
	}
}

func TestWriteJSON(t *testing.T) {
	var none, one strings.Builder
	Write(&none, nil, "json")
	if strings.TrimSpace(none.String()) != "[]" {
		t.Errorf("no variables: %s", none.String())
	}
	Write(&one, []Var{{"A", "<b>"}}, "json")
	var back []map[string]string
	if err := json.Unmarshal([]byte(one.String()), &back); err != nil || back[0]["name"] != "A" || back[0]["value"] != "<b>" {
		t.Errorf("%v: %s", err, one.String())
	}
	if _, err := Write(&one, nil, "yaml"); err == nil {
		t.Error("a format that is none was taken")
	}
}

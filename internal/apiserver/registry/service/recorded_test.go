package service

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// recorded is a conversation with kube-apiserver, and what it answered.
type recorded struct {
	Name  string
	Steps [][]json.RawMessage
	Want  []map[string]any
}

// TestRecorded replays, without a server, the recorded conversations that are about Services alone.
func TestRecorded(t *testing.T) {
	cases := readRecorded(t)
	replayed := 0
	for _, c := range cases {
		if !replayable(c) {
			continue
		}
		replayed++
		t.Run(c.Name, func(t *testing.T) {
			asked := strings.ReplaceAll(string(must(json.Marshal(c.Steps))), "{ns}", "ns")
			server := newCluster()
			for i, s := range c.Steps {
				got := normalize(server.answer(text(s[0]), text(s[1]), body(s)), asked)
				if diff := cmp.Diff(any(c.Want[i]), got); diff != "" {
					t.Fatalf("step %d: want -, got +:\n%s", i, diff)
				}
			}
		})
	}
	t.Logf("%d of %d cases replayed", replayed, len(cases))
	if replayed < 150 {
		t.Errorf("only %d cases replayed: has their form changed?", replayed)
	}
}

func readRecorded(t *testing.T) (cases []recorded) {
	t.Helper()
	data, err := os.ReadFile("../../../../test/recorded/api/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

var servicePath = regexp.MustCompile(`^services(/[^/?]+(/status)?)?$`)

// replayable cases need nothing that a server adds: other resources, server-side apply, queries, names that clash,
// resource versions, content types.
func replayable(c recorded) bool {
	if strings.HasPrefix(c.Name, "malformed/") || strings.HasPrefix(c.Name, "method/") || slices.Contains([]string{
		"delete/precondition-uid", "put/name-mismatch",
	}, c.Name) {
		return false
	}
	for i, s := range c.Steps {
		path, raw := text(s[1]), string(body(s))
		if !servicePath.MatchString(path) || strings.Contains(raw, "$") {
			return false
		}
		switch text(s[0]) {
		case "POST", "PUT", "MP", "SMP", "JP", "DELETE":
		case "GET":
			if path == "services" {
				return false
			}
		default:
			return false
		}
		if code := c.Want[i]["code"]; code == 415.0 || code == 405.0 {
			return false
		}
	}
	return true
}

// answer is what the API server would say, in the form that the cases record.
func (c *cluster) answer(verb, path string, body []byte) any {
	body = []byte(strings.ReplaceAll(string(body), "{ns}", "ns"))
	parts := strings.Split(path, "/")
	name := ""
	if len(parts) > 1 {
		name = parts[1]
	}
	stored := c.stored[name]
	if stored == nil && name != "" && (verb != "PUT" || len(parts) == 3) {
		return failure(404, "NotFound", "services")
	}
	var svc *corev1.Service
	var err error
	switch verb {
	case "GET":
		return object(200, c.read(name))
	case "DELETE":
		seen := c.read(name)
		delete(c.stored, name)
		return object(200, seen)
	case "POST", "PUT":
		svc, err = decode(body)
	default:
		svc, err = c.patch(name, verb, body)
	}
	if err != nil {
		return failure(400, "BadRequest", "")
	}
	svc.Namespace = "ns"
	write, code := c.create, 201
	switch {
	case len(parts) == 3:
		write, code = c.updateStatus, 200
	case stored != nil:
		write, code = c.update, 200
	}
	switch got, errs := write(svc); {
	case len(errs) > 0:
		return refusal(errs)
	case got == nil:
		return failure(409, "AlreadyExists", "services")
	default:
		return object(code, got)
	}
}

func object(code int, svc any) any {
	var out any
	if err := json.Unmarshal(must(json.Marshal(svc)), &out); err != nil {
		panic(err)
	}
	return map[string]any{"code": float64(code), "object": out}
}

func failure(code int, reason, kind string) any {
	out := map[string]any{"code": float64(code), "reason": reason, "kind": nil, "causes": []any{}}
	if kind != "" {
		out["kind"] = kind
	}
	return out
}

func refusal(errs field.ErrorList) any {
	out := failure(422, "Invalid", "Service").(map[string]any)
	pairs := make([][]any, 0, len(errs))
	for _, err := range errs {
		pairs = append(pairs, []any{err.Field, string(err.Type)})
	}
	slices.SortFunc(pairs, func(a, b []any) int { return strings.Compare(fmt.Sprint(a...), fmt.Sprint(b...)) })
	for _, p := range pairs {
		out["causes"] = append(out["causes"].([]any), p)
	}
	return out
}

var (
	volatile = []string{
		"uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "deletionTimestamp", "message",
	}
	ranges = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}
	random = regexp.MustCompile(`^(.{3,}-)[bcdfghjklmnpqrstvwxz2456789]{5}$`)
)

// normalize leaves out what changes from run to run, and marks what nobody asked for.
func normalize(o any, asked string) any {
	switch o := o.(type) {
	case map[string]any:
		out := map[string]any{}
		for k, v := range o {
			if slices.Contains(volatile, k) {
				continue
			}
			if n, ok := v.(float64); ok && (k == "nodePort" || k == "healthCheckNodePort") && !strings.Contains(asked, fmt.Sprint(int(n))) {
				v = "<allocated>"
			}
			if k == "namespace" {
				v = "{ns}"
			}
			out[k] = normalize(v, asked)
		}
		return out
	case []any:
		out := make([]any, 0, len(o))
		for _, v := range o {
			out = append(out, normalize(v, asked))
		}
		return out
	case string:
		if strings.Contains(asked, o) {
			return o
		}
		if addr, err := netip.ParseAddr(o); err == nil && (ranges[0].Contains(addr) || ranges[1].Contains(addr)) {
			return "<allocated>"
		}
		if m := random.FindStringSubmatch(o); m != nil && strings.Contains(asked, m[1]) {
			return m[1] + "<random>"
		}
	}
	return o
}

func text(raw json.RawMessage) (s string) {
	if err := json.Unmarshal(raw, &s); err != nil {
		panic(err)
	}
	return s
}

func body(step []json.RawMessage) []byte {
	if len(step) < 3 {
		return nil
	}
	return step[2]
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

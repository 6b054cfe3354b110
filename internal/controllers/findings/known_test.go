package findings

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/explain"
)

var start = time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)

func found(name, code string) Found {
	return Found{Finding: explain.Finding{Code: code, Severity: explain.Broken, Sure: explain.Certain, Object: explain.Ref{Kind: "Service", Namespace: "shop", Name: name}}}
}

// TestKnown: what is wrong is news once, when it has been wrong for a while, and again only if it comes back much later.
func TestKnown(t *testing.T) {
	var k Known
	look := func(seconds int, all ...Found) string {
		var codes []string
		for _, f := range k.Update(start.Add(time.Duration(seconds)*time.Second), all) {
			codes = append(codes, f.Object.Name+" "+f.Code)
		}
		return strings.Join(codes, ", ")
	}
	typo := found("web", "selector-typo")
	for _, s := range []struct {
		at    int
		found []Found
		want  string
		left  bool
	}{
		{0, []Found{typo}, "", true},
		{30, []Found{typo}, "", true},
		{40, nil, "", false}, // it was only a rollout
		{60, []Found{typo}, "", true},
		{90, []Found{typo}, "", true},
		{120, []Found{typo}, "web selector-typo", false},
		{150, []Found{typo}, "", false},
		{4000, []Found{typo}, "", false},
		{4030, nil, "", false},
		{4060, []Found{typo}, "", true}, // more than ten minutes after the Event
		{4120, []Found{typo, found("web", "slice-port"), found("other", "selector-typo")}, "web selector-typo", true},
		{4150, nil, "", false},
		{4200, []Found{typo}, "", false}, // gone for a moment: no news
	} {
		if got := look(s.at, s.found...); got != s.want || k.Pending() != s.left {
			t.Errorf("after %d s: %q, pending %v; want %q, %v", s.at, got, k.Pending(), s.want, s.left)
		}
	}
}

// TestFlood: when everything breaks at once, Events come at a bounded rate, and all come in the end.
func TestFlood(t *testing.T) {
	var k Known
	var all []Found
	for i := range 100 {
		all = append(all, found(fmt.Sprint("s", i), "no-endpoints"))
		if i < 99 {
			all[i].Severity = explain.Degraded
		}
	}
	written := map[string]bool{}
	for minute := range 15 {
		news := k.Update(start.Add(time.Duration(minute)*time.Minute), all)
		if most := burst; len(news) > most || minute > 1 && len(news) > perMinute {
			t.Errorf("%d Events in minute %d", len(news), minute)
		}
		if minute == 1 && (len(news) == 0 || news[0].Object.Name != "s99") {
			t.Errorf("the worst was not written first: %+v", news)
		}
		for _, f := range news {
			written[f.Object.Name] = true
		}
	}
	if len(written) != 100 || k.Pending() {
		t.Errorf("%d of 100 were written", len(written))
	}
}

func TestForget(t *testing.T) {
	var k Known
	f := found("web", "selector-typo")
	k.Update(start, []Found{f})
	if got := k.Update(start.Add(lasting), []Found{f}); len(got) != 1 {
		t.Fatalf("%v", got)
	}
	k.Forget(f)
	if got := k.Update(start.Add(2*lasting), []Found{f}); len(got) != 1 {
		t.Error("an Event that could not be written is not tried again")
	}
}

func TestNews(t *testing.T) {
	for _, c := range []struct {
		kind, code, sure string
		severity         explain.Severity
		want             bool
	}{
		{"Service", "selector-typo", explain.Certain, explain.Broken, true},
		{"Service", "policy-local", explain.Likely, explain.Degraded, true},
		{"Service", "publish-not-ready", explain.Certain, explain.Notice, false},
		{"Service", "x", explain.Possible, explain.Broken, false},
		{"Ingress", "ingress-port", explain.Certain, explain.Broken, true},
		{"Node", "conntrack-full", explain.Certain, explain.Degraded, true},
		{"Node", "node-not-ready", explain.Certain, explain.Degraded, false},
		{"Pod", "crash", explain.Certain, explain.Broken, false},
		{"Lease", "controllers-stopped", explain.Certain, explain.Broken, false},
	} {
		f := explain.Finding{Object: explain.Ref{Kind: c.kind}, Code: c.code, Sure: c.sure, Severity: c.severity}
		if News(&f) != c.want {
			t.Errorf("%+v is news: %v", c, !c.want)
		}
	}
}

func TestEvent(t *testing.T) {
	f := found("web", "selector-typo")
	f.Verdict = strings.Repeat("é", 2000)
	f.About = corev1.ObjectReference{Kind: "Service", Namespace: "shop", Name: "web", UID: "u"}
	e := event(&f, metav1.NewTime(start))
	if e.Reason != "SelectorTypo" || e.Namespace != "shop" || e.Type != "Warning" || len(e.Message) > 1024 || !strings.HasSuffix(e.Message, "…; see: portal explain service web -n shop") {
		t.Errorf("%+v", e)
	}
	again := event(&f, metav1.NewTime(start.Add(time.Hour)))
	f.Code = "slice-port"
	if other := event(&f, metav1.NewTime(start)); again.Name != e.Name || other.Name == e.Name {
		t.Errorf("names: %s, %s, %s", e.Name, again.Name, other.Name)
	}
	node := Found{Finding: explain.Finding{Code: "conntrack-full", Object: explain.Ref{Kind: "Node", Name: "n"}}, About: corev1.ObjectReference{Kind: "Node", Name: "n", UID: "n"}}
	if e := event(&node, metav1.NewTime(start)); e.Namespace != "default" {
		t.Errorf("an Event about a Node is in %s", e.Namespace)
	}
}

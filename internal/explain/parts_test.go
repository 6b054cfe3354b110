package explain

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/nodereport"
	"portal/internal/proxy"
	"portal/internal/reports"
)

// TestParts: what parts say about themselves becomes findings, but for those that the node itself gave details of, and for nodes that are gone.
func TestParts(t *testing.T) {
	now := time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)
	node := func(name string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
	}
	part := func(node, part string, s reports.Status, revision int, age time.Duration) reports.Report {
		if s.State == "" {
			s.State = reports.Running
		}
		s.Synced = &reports.Synced{Revision: fmt.Sprint(revision)}
		s.Updated = metav1.NewTime(now.Add(-age))
		s.Since = s.Updated
		return reports.Report{ObjectMeta: metav1.ObjectMeta{Name: reports.Name(node, part)}, Node: node, Part: part, Status: s}
	}
	failing := reports.Status{State: reports.Failing, Message: "no memory", LastError: &reports.Error{Message: "no memory", Time: metav1.NewTime(now)}}
	for _, c := range []struct {
		name  string
		parts []reports.Report
		want  string
	}{
		{"all is well", []reports.Report{part("a", "proxy", reports.Status{}, 9, time.Minute), part("b", "proxy", reports.Status{}, 5, 20*time.Minute)}, ""},
		{"the only balancer is dead", []reports.Report{part("a", "lb", reports.Status{}, 0, time.Hour)}, "lb-behind a"},
		{"a proxy fails", []reports.Report{part("a", "proxy", failing, 9, 0)}, "proxy-failing a"},
		{"a DNS server fails", []reports.Report{part("a", "dns", failing, 9, 0)}, "dns-failing a"},
		{"a node that was asked", []reports.Report{part("c", "proxy", failing, 9, 0)}, ""},
		{"a node that is gone", []reports.Report{part("x", "proxy", failing, 9, 0)}, ""},
		{"degraded", []reports.Report{part("a", "lb", reports.Status{State: reports.Degraded, Message: "no session"}, 0, 0)}, "lb-degraded a"},
		{"starting", []reports.Report{part("a", "dns", reports.Status{State: reports.Starting}, 0, time.Minute)}, ""},
		{"starting for ever", []reports.Report{part("a", "dns", reports.Status{State: reports.Starting}, 0, time.Hour)}, "dns-not-synced a"},
		{"a full table", []reports.Report{part("a", "proxy", reports.Status{State: reports.Degraded, Conntrack: &reports.Conntrack{Count: 99, Max: 100, Percent: 99}}, 9, 0)}, "conntrack-full a"},
		{"a proxy is dead", []reports.Report{part("a", "proxy", reports.Status{}, 9, time.Minute), part("b", "proxy", reports.Status{}, 5, time.Hour)}, "proxy-behind b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Look(&Evidence{
				Now: now, Nodes: []corev1.Node{node("a"), node("b"), node("c")}, Parts: c.parts, Unseen: map[string]string{},
				Reports: map[string]*NodeReport{"c": {Asked: true, Report: &nodereport.Report{Node: "c", Proxy: &proxy.State{Complete: true}}}},
			})
			var got []string
			for _, f := range checkParts(v) {
				got = append(got, f.Code+" "+f.Node)
				if f.Verdict == "" || f.Object.Name != f.Node || len(f.Fix) == 0 {
					t.Errorf("%+v", f)
				}
			}
			if strings.Join(got, ", ") != c.want {
				t.Errorf("found %q, want %q", got, c.want)
			}
		})
	}
}

// TestStatusFromReports: nodes that were not asked are shown as they report, also if Nodes can't be read.
func TestStatusFromReports(t *testing.T) {
	v := Look(&Evidence{Now: time.Now(), Unseen: map[string]string{"nodes": "forbidden"}, Parts: []reports.Report{
		{Node: "a", Part: reports.Proxy, Status: reports.Status{State: reports.Running, Mode: "nftables", Conntrack: &reports.Conntrack{Percent: 7}}},
		{Node: "a", Part: reports.DNS, Status: reports.Status{State: reports.Running}},
		{Node: "b", Part: reports.Proxy, Status: reports.Status{State: reports.Failing, Mode: "iptables"}},
	}})
	s := Summary(v)
	if len(s.Nodes) != 2 || s.Nodes[0].Proxy != "nftables" || !s.Nodes[0].InSync || !s.Nodes[0].DNS || *s.Nodes[0].Conntrack != 7 || s.Nodes[1].InSync || s.Nodes[1].DNS {
		t.Errorf("%+v", s.Nodes)
	}
}

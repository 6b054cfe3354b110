package controller

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
)

// newEvents are the Events since the last call, with their reasons in front.
func newEvents(recorder *record.FakeRecorder) (out []string) {
	for {
		select {
		case e := <-recorder.Events:
			out = append(out, e)
		default:
			return out
		}
	}
}

func count(events []string, reason string) int {
	return len(slices.DeleteFunc(slices.Clone(events), func(e string) bool { return !strings.Contains(e, " "+reason+" ") }))
}

// TestEventsAgain: what is wrong is said once while it lasts, and again if it was mended in between; so is that an address is chosen and released.
func TestEventsAgain(t *testing.T) {
	const key = "service.beta.kubernetes.io/aws-load-balancer-backend-protocol"
	recorder := record.NewFakeRecorder(100)
	c := newCluster(t, "192.0.2.1-192.0.2.9")
	x := c.controller(DefaultClass, true)
	x.Events = recorder
	c.add("a/web")
	c.pass(x)
	newEvents(recorder)
	set := func(value string) {
		c.change("a/web", func(svc *corev1.Service) { svc.Annotations = map[string]string{key: value} })
		c.pass(x, x)
	}
	for i, step := range []struct {
		value string
		want  int
	}{{"gopher", 1}, {"gopher", 0}, {"http", 0}, {"gopher", 1}} {
		if set(step.value); count(newEvents(recorder), "InvalidAnnotation") != step.want {
			t.Errorf("step %d, %s: want %d Events", i, step.value, step.want)
		}
	}
	become := func(kind corev1.ServiceType) {
		c.change("a/web", func(svc *corev1.Service) { svc.Spec.Type = kind })
		c.pass(x, x)
	}
	for i := range 2 {
		become(corev1.ServiceTypeClusterIP)
		if events := newEvents(recorder); count(events, Deleting) != 1 || count(events, Deleted) != 1 {
			t.Errorf("release %d: %q", i, events)
		}
		become(corev1.ServiceTypeLoadBalancer)
		if events := newEvents(recorder); count(events, Ensuring) != 1 || count(events, Ensured) != 1 {
			t.Errorf("assignment %d: %q", i, events)
		}
	}
}

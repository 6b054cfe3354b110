package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// TestObserved: what others have made of the node's own conditions is written again, and nothing else.
func TestObserved(t *testing.T) {
	status := func(ready, other corev1.ConditionStatus, phase corev1.PodPhase) *corev1.PodStatus {
		return &corev1.PodStatus{Phase: phase, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: ready}, {Type: "example.com/other", Status: other}, {Type: corev1.ContainersReady, Status: corev1.ConditionTrue},
		}}
	}
	written := status(corev1.ConditionTrue, corev1.ConditionTrue, corev1.PodRunning)
	if got := observed(written, written); !equality.Semantic.DeepEqual(got, written) {
		t.Errorf("%+v", got)
	}
	if got := observed(written, status(corev1.ConditionTrue, corev1.ConditionFalse, corev1.PodPending)); !equality.Semantic.DeepEqual(got, written) {
		t.Errorf("%+v", got)
	}
	got := observed(written, status(corev1.ConditionFalse, corev1.ConditionFalse, corev1.PodRunning))
	if want := status(corev1.ConditionFalse, corev1.ConditionTrue, corev1.PodRunning); !equality.Semantic.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	if written.Conditions[0].Status != corev1.ConditionTrue {
		t.Error("what was written was changed")
	}
}

func TestClaim(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		if err := claim(dir, "one"); err != nil {
			t.Fatal(err)
		}
	}
	if err := claim(dir, "two"); err == nil || !strings.Contains(err.Error(), "--data-dir") || !strings.Contains(err.Error(), "--name one") {
		t.Error(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "node.name")); err != nil || string(data) != "one\n" {
		t.Errorf("%q, %v", data, err)
	}
}

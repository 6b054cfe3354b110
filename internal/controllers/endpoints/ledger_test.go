package endpoints

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func version(v string) *corev1.Endpoints {
	return &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", ResourceVersion: v}}
}

func TestTheLedgerIsAheadOfTheInformer(t *testing.T) {
	var l ledger
	key := keyOf(version(""))
	expect := func(seen *corev1.Endpoints, want string) {
		t.Helper()
		got := ""
		if e := l.newest(key, seen); e != nil {
			got = e.ResourceVersion
		}
		if got != want {
			t.Errorf("newest is %q, want %q", got, want)
		}
	}
	expect(nil, "")
	expect(version("5"), "5")
	l.note(key, version("7"))
	expect(nil, "7")
	expect(version("5"), "7")
	if !l.see(version("5")) || !l.see(version("7")) {
		t.Error("what is older than the last write, and the write itself, are no news")
	}
	if l.see(version("8")) {
		t.Error("somebody else's write is news")
	}
	l.note(key, version("9"))
	expect(version("10"), "10")
	expect(nil, "") // and is forgotten
}

func TestTheLedgerGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l ledger
		key := keyOf(version(""))
		l.note(key, version("7"))
		time.Sleep(patience - time.Millisecond)
		if got := l.overdue(); len(got) != 0 {
			t.Errorf("no patience: %v", got)
		}
		time.Sleep(time.Millisecond)
		if got := l.overdue(); len(got) != 1 || l.newest(key, nil) != nil {
			t.Errorf("still believed: %v", got)
		}
	})
}

package lb

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"portal/internal/lb/compile"
	following "portal/internal/node/follow"
)

// TestGrace: addresses are kept for a process that follows, unless somebody says that none will: the flag, the Node, or the machine.
func TestGrace(t *testing.T) {
	node := func(change func(*corev1.Node)) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "self"}}
		change(n)
		return n
	}
	now := metav1.Now()
	for _, c := range []struct {
		what string
		stop Stop
		node *corev1.Node
		want time.Duration
	}{
		{"as usual", Stop{Grace: time.Minute}, node(func(*corev1.Node) {}), time.Minute},
		{"no Node", Stop{Grace: time.Minute}, nil, time.Minute},
		{"release", Stop{}, node(func(*corev1.Node) {}), 0},
		{"cordoned", Stop{Grace: time.Minute}, node(func(n *corev1.Node) { n.Spec.Unschedulable = true }), 0},
		{"excluded", Stop{Grace: time.Minute}, node(func(n *corev1.Node) { n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""} }), 0},
		{"deleted", Stop{Grace: time.Minute}, node(func(n *corev1.Node) { n.DeletionTimestamp, n.Finalizers = &now, []string{"x/y"} }), 0},
		{"shutting down", Stop{Grace: time.Minute, Final: func() string { return "the machine shuts down" }}, node(func(*corev1.Node) {}), 0},
		{"no reason", Stop{Grace: time.Minute, Final: func() string { return "" }}, node(func(*corev1.Node) {}), time.Minute},
	} {
		for _, away := range []bool{false, true} { // then what is known of the Node counts
			client := fake.NewClientset()
			b := &Balancer{Options: Options{Node: "self", Stop: c.stop, Log: slog.New(slog.DiscardHandler)}, client: client}
			b.makeReplicas()
			for _, r := range []*replica{b.nodes} {
				r.changed = func(any, any) {}
			}
			if c.node != nil {
				if err := client.Tracker().Add(c.node); err != nil {
					t.Fatal(err)
				}
				if err := b.nodes.Add(c.node.DeepCopy()); err != nil {
					t.Fatal(err)
				}
			}
			if away {
				client.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, nil, errors.New("the API is away")
				})
			}
			if got := b.grace(); got != c.want {
				t.Errorf("%s, the API away: %v: %s, want %s", c.what, away, got, c.want)
			}
		}
	}
}

// TestSettled: the first configuration waits for Secrets that are still being read, but not for those that can't be, nor for ever.
func TestSettled(t *testing.T) {
	client := fake.NewClientset(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "slow"}})
	read := make(chan struct{})
	client.PrependReactor("list", "secrets", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.(clienttesting.ListAction).GetListRestrictions().Fields.String() == "metadata.name=forbidden" {
			return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), "forbidden", nil)
		}
		<-read
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	p := newBalancing(&Balancer{})
	p.began, p.secrets, p.names = time.Now(), following.New(ctx, client, slog.New(slog.DiscardHandler)), &names{found: map[string][]netip.Addr{}}
	defer p.secrets.Wait()
	defer cancel()
	eventually := func(what string, refs ...compile.SecretRef) {
		t.Helper()
		p.follow(refs)
		for end := time.Now().Add(time.Minute); !p.settled(refs, nil); time.Sleep(5 * time.Millisecond) {
			p.began = time.Now() // so that it is not for the time that passes
			if time.Now().After(end) {
				t.Fatalf("waited in vain: %s", what)
			}
		}
	}
	slow := compile.SecretRef{Namespace: "ns", Name: "slow"}
	eventually("nothing to wait for")
	eventually("one that may not be read", compile.SecretRef{Namespace: "ns", Name: "forbidden"})
	p.follow([]compile.SecretRef{slow})
	if p.settled([]compile.SecretRef{slow}, nil) {
		t.Error("it does not wait for a Secret that is being read")
	}
	p.began = time.Now().Add(-settlePatience)
	if !p.settled([]compile.SecretRef{slow}, nil) {
		t.Error("it waits for ever")
	}
	p.began = time.Now()
	close(read)
	eventually("one that has been read", slow)
	if p.settled(nil, []string{"db.example.com"}) {
		t.Error("it does not wait for a name that is being resolved")
	}
	p.names.found["db.example.com"] = nil
	if !p.settled(nil, []string{"db.example.com"}) {
		t.Error("it waits for a name that is known not to exist")
	}
}

package bootstraptoken

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/bootstrap"
)

var (
	start = time.Date(2026, 11, 16, 12, 0, 0, 0, time.UTC)
	one   = bootstrap.Token{ID: "aaaaaa", Secret: "0123456789abcdef"}
	other = bootstrap.Token{ID: "bbbbbb", Secret: "fedcba9876543210"}
)

// world is the API's objects, both controllers, and a clock that tests turn.
type world struct {
	*testing.T
	client *fake.Clientset
	clock  *clocktesting.FakeClock
}

func newWorld(t *testing.T) *world {
	w := &world{t, fake.NewClientset(
		&corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: bootstrap.ClusterInfo, Namespace: "kube-public"},
			Data:       map[string]string{"kubeconfig": "text", "jws-kubeconfig-cccccc": "of a token that is gone", "other": "stays"},
		},
		bootstrap.NewSecret(one, bootstrap.Grant{Expires: start.Add(time.Hour)}),
		bootstrap.NewSecret(other, bootstrap.Grant{}),
	), clocktesting.NewFakeClock(start)}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	for _, make := range []func() (*Controller, error){
		func() (*Controller, error) { return NewSigner(w.client, w.clock) },
		func() (*Controller, error) { return NewCleaner(w.client, w.clock) },
	} {
		c, err := make()
		if err != nil {
			t.Fatal(err)
		}
		go func() { ended <- c.Run(ctx) }()
	}
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

// signed are the keys of cluster-info, once they are as many as wanted.
func (w *world) signed(want ...string) map[string]string {
	w.Helper()
	var data map[string]string
	for range 500 {
		info, err := w.client.CoreV1().ConfigMaps("kube-public").Get(w.Context(), bootstrap.ClusterInfo, metav1.GetOptions{})
		if err != nil {
			w.Fatal(err)
		}
		data = info.Data
		var keys []string
		for key := range data {
			if strings.HasPrefix(key, bootstrap.SignaturePrefix) {
				keys = append(keys, key)
			}
		}
		slices.Sort(keys)
		if slices.Equal(keys, want) {
			return data
		}
		time.Sleep(10 * time.Millisecond)
	}
	w.Fatalf("cluster-info has %v, want the signatures %v", data, want)
	return nil
}

// TestSignedUntilExpired: every valid token signs; with its hour over, a token is deleted and its signature gone.
func TestSignedUntilExpired(t *testing.T) {
	w := newWorld(t)
	data := w.signed("jws-kubeconfig-aaaaaa", "jws-kubeconfig-bbbbbb")
	if !one.Signed("text", data["jws-kubeconfig-aaaaaa"]) || !other.Signed("text", data["jws-kubeconfig-bbbbbb"]) || data["other"] != "stays" {
		t.Errorf("%v", data)
	}
	for !w.clock.HasWaiters() {
		time.Sleep(time.Millisecond)
	}
	w.clock.Step(time.Hour)
	w.signed("jws-kubeconfig-bbbbbb")
	for range 500 {
		left, err := w.client.CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(left.Items) == 1 && left.Items[0].Name == bootstrap.SecretName(other.ID) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the expired token is still there")
}

// TestSignedAgain: a new text has new signatures.
func TestSignedAgain(t *testing.T) {
	w := newWorld(t)
	w.signed("jws-kubeconfig-aaaaaa", "jws-kubeconfig-bbbbbb")
	maps := w.client.CoreV1().ConfigMaps("kube-public")
	info, err := maps.Get(t.Context(), bootstrap.ClusterInfo, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	info.Data["kubeconfig"] = "other text"
	if _, err := maps.Update(t.Context(), info, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 500 {
		if one.Signed("other text", w.signed("jws-kubeconfig-aaaaaa", "jws-kubeconfig-bbbbbb")["jws-kubeconfig-aaaaaa"]) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the new text is not signed")
}

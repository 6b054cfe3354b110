package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"portal/internal/node/spec"
)

// pemOf is a certificate as far as this package looks at it.
func pemOf(names ...string) string {
	var list [][]byte
	for _, n := range names {
		list = append(list, []byte("certificate "+n))
	}
	return string(encodeCertificates(list))
}

func bundleOf(name, signer, text string, labels map[string]string) *certificatesv1.ClusterTrustBundle {
	return &certificatesv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: certificatesv1.ClusterTrustBundleSpec{SignerName: signer, TrustBundle: text}}
}

// TestSelectBundles: a source means one bundle by its name, or those of a signer that its labels select.
func TestSelectBundles(t *testing.T) {
	const signer = "example.com/signer"
	all := []*certificatesv1.ClusterTrustBundle{
		bundleOf("free", "", pemOf("1"), map[string]string{"alive": "yes"}),
		bundleOf("example.com:signer:a", signer, pemOf("2"), map[string]string{"alive": "yes"}),
		bundleOf("example.com:signer:b", signer, pemOf("3"), map[string]string{"alive": "no"}),
		bundleOf("example.com:other:a", "example.com/other", pemOf("4"), map[string]string{"alive": "yes"}),
	}
	for name, c := range map[string]struct {
		source corev1.ClusterTrustBundleProjection
		want   []string
	}{
		"by name":             {corev1.ClusterTrustBundleProjection{Name: ptr.To("free")}, []string{"free"}},
		"of a signer by name": {corev1.ClusterTrustBundleProjection{Name: ptr.To("example.com:signer:b")}, []string{"example.com:signer:b"}},
		"missing name":        {corev1.ClusterTrustBundleProjection{Name: ptr.To("none")}, nil},
		"no selector":         {corev1.ClusterTrustBundleProjection{SignerName: ptr.To(signer)}, nil},
		"every one":           {corev1.ClusterTrustBundleProjection{SignerName: ptr.To(signer), LabelSelector: &metav1.LabelSelector{}}, []string{"example.com:signer:a", "example.com:signer:b"}},
		"by label":            {corev1.ClusterTrustBundleProjection{SignerName: ptr.To(signer), LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"alive": "yes"}}}, []string{"example.com:signer:a"}},
		"label of none":       {corev1.ClusterTrustBundleProjection{SignerName: ptr.To(signer), LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"alive": "perhaps"}}}, nil},
		"signer of none":      {corev1.ClusterTrustBundleProjection{SignerName: ptr.To("example.com/none"), LabelSelector: &metav1.LabelSelector{}}, nil},
	} {
		selected, err := selectBundles(all, &c.source)
		var got []string
		for _, b := range selected {
			got = append(got, b.Name)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		var missing *spec.MissingError
		if errors.As(err, &missing) != (c.want == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestJoinBundles: each certificate is there once and nothing else, in an order that is always the same and not that of the bundles.
func TestJoinBundles(t *testing.T) {
	names := strings.Split("a b c d e f g h", " ")
	forth, back := bundleOf("x", "", "text\n"+pemOf(names...)+"more text\n", nil), bundleOf("y", "", "", nil)
	slices.Reverse(names)
	back.Spec.TrustBundle = pemOf(names...) + pemOf("i")
	got := string(joinBundles([]*certificatesv1.ClusterTrustBundle{forth, back}))
	if again := string(joinBundles([]*certificatesv1.ClusterTrustBundle{back, forth})); again != got {
		t.Errorf("another order: %s\n%s", got, again)
	}
	want := append(names, "i")
	if list := certificatesIn([]byte(got)); len(list) != len(want) || strings.Contains(got, "text") {
		t.Errorf("%d certificates:\n%s", len(list), got)
	}
	for _, n := range want {
		if strings.Count(got, pemOf(n)) != 1 {
			t.Errorf("%s is not there once:\n%s", n, got)
		}
	}
	if alone := string(joinBundles([]*certificatesv1.ClusterTrustBundle{forth})); alone == pemOf("a", "b", "c", "d", "e", "f", "g", "h") {
		t.Error("the order is that of the bundle")
	}
	if empty := joinBundles(nil); len(empty) > 0 {
		t.Errorf("%q", empty)
	}
}

// TestTrustBundles: a volume of bundles is made once they are there, is empty if they are optional, and those who use it learn of changes.
func TestTrustBundles(t *testing.T) {
	client := fake.NewClientset(bundleOf("one", "", pemOf("1"), nil))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	a := &Agent{bundles: newTrustBundles(ctx, client, running.Go)}
	pod := func(name string, optional bool) *corev1.Pod {
		return &corev1.Pod{Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{Name: &name, Path: "ca.pem", Optional: &optional}}},
		}}}}}}
	}
	changed := make(chan struct{}, 100)
	release := a.bundles.hold(func() { changed <- struct{}{} })
	<-changed
	for name, c := range map[string]struct {
		pod     *corev1.Pod
		want    string
		missing bool
	}{
		"there": {pod("one", false), pemOf("1"), false}, "missing": {pod("two", false), "", true}, "optional": {pod("two", true), "", false},
	} {
		var volume *volumeError
		var missing *spec.MissingError
		if err := a.bundles.check(ctx, c.pod); errors.As(err, &missing) != c.missing || errors.As(err, &volume) != c.missing {
			t.Errorf("%s: %v", name, err)
		}
		files, err := a.files(ctx, c.pod, &c.pod.Spec.Volumes[0], fileSources{})
		if f, ok := files["ca.pem"]; (err != nil) != c.missing || ok == c.missing || string(f.data) != c.want {
			t.Errorf("%s: %v, %v", name, files, err)
		}
	}
	if _, err := client.CertificatesV1().ClusterTrustBundles().Create(ctx, bundleOf("two", "", pemOf("2"), nil), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(20 * time.Second):
		t.Fatal("no callback for a new bundle")
	}
	if err := a.bundles.check(ctx, pod("two", false)); err != nil {
		t.Error(err)
	}
	release()
	if err := client.CertificatesV1().ClusterTrustBundles().Delete(ctx, "two", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); a.bundles.check(ctx, pod("two", false)) == nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a bundle that was deleted is still there")
		}
	}
	if len(changed) > 0 {
		t.Error("a callback after its release")
	}
}

package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/node/spec"
)

// bundlePatience is how long a Pod waits for the ClusterTrustBundles to be listed before it says so.
const bundlePatience = 5 * time.Second

// trustBundles are the cluster's ClusterTrustBundles. They are watched from when a Pod of the node first has a volume of them.
type trustBundles struct {
	informer func() cache.SharedIndexInformer

	mu      sync.Mutex
	holders map[*func()]bool
	err     error // why they can't be watched
}

// newTrustBundles makes them; run runs what watches them, until ctx ends.
func newTrustBundles(ctx context.Context, client kubernetes.Interface, run func(func())) *trustBundles {
	b := &trustBundles{holders: map[*func()]bool{}}
	b.informer = sync.OnceValue(func() cache.SharedIndexInformer {
		i := informers.NewSharedInformerFactory(client, 0).Certificates().V1().ClusterTrustBundles().Informer()
		_ = i.SetTransform(dropManagedFields)
		_ = i.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.err = err
		})
		_, _ = i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { b.changed() }, UpdateFunc: func(any, any) { b.changed() }, DeleteFunc: func(any) { b.changed() },
		})
		run(func() { i.RunWithContext(ctx) })
		return i
	})
	return b
}

func (b *trustBundles) changed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for h := range b.holders {
		(*h)()
	}
}

// hold has changed called whenever a bundle is another than it was, until release is called.
func (b *trustBundles) hold(changed func()) (release func()) {
	b.informer()
	b.mu.Lock()
	defer b.mu.Unlock()
	h := &changed
	b.holders[h] = true
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.holders, h)
	}
}

// list is all bundles.
func (b *trustBundles) list(ctx context.Context) (out []*certificatesv1.ClusterTrustBundle, err error) {
	i := b.informer()
	ctx, cancel := context.WithTimeout(ctx, bundlePatience)
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), i.HasSynced) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.err != nil {
			return nil, fmt.Errorf("the ClusterTrustBundles can't be listed: %w", b.err)
		}
		return nil, fmt.Errorf("the ClusterTrustBundles are not listed yet")
	}
	for _, obj := range i.GetStore().List() {
		out = append(out, obj.(*certificatesv1.ClusterTrustBundle))
	}
	return out, nil
}

// bundlesOf are the sources of a Pod's volumes that are ClusterTrustBundles, with the volumes' names.
func bundlesOf(pod *corev1.Pod, each func(volume string, s *corev1.ClusterTrustBundleProjection)) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Projected == nil {
			continue
		}
		for j := range v.Projected.Sources {
			if s := v.Projected.Sources[j].ClusterTrustBundle; s != nil {
				each(v.Name, s)
			}
		}
	}
}

// check says why the volumes of a Pod can't have their ClusterTrustBundles.
func (b *trustBundles) check(ctx context.Context, pod *corev1.Pod) (err error) {
	bundlesOf(pod, func(volume string, s *corev1.ClusterTrustBundleProjection) {
		if err != nil {
			return
		}
		var all []*certificatesv1.ClusterTrustBundle
		if all, err = b.list(ctx); err == nil {
			_, err = selectBundles(all, s)
		}
		if err = unlessOptional(err, s.Optional); err != nil {
			err = &volumeError{volume, err}
		}
	})
	return err
}

// selectBundles are those that a source means: one by its name, or those of a signer with certain labels.
func selectBundles(all []*certificatesv1.ClusterTrustBundle, s *corev1.ClusterTrustBundleProjection) (out []*certificatesv1.ClusterTrustBundle, err error) {
	if s.Name != nil {
		for _, b := range all {
			if b.Name == *s.Name {
				return []*certificatesv1.ClusterTrustBundle{b}, nil
			}
		}
		return nil, &spec.MissingError{Kind: "ClusterTrustBundle", Name: *s.Name}
	}
	if s.SignerName == nil {
		return nil, fmt.Errorf("clusterTrustBundle: has no name and no signerName")
	}
	selector, err := metav1.LabelSelectorAsSelector(s.LabelSelector) // none selects nothing
	if err != nil {
		return nil, fmt.Errorf("clusterTrustBundle.labelSelector: %w", err)
	}
	for _, b := range all {
		if b.Spec.SignerName == *s.SignerName && selector.Matches(labels.Set(b.Labels)) {
			out = append(out, b)
		}
	}
	if len(out) == 0 {
		return nil, &spec.MissingError{Kind: fmt.Sprintf("ClusterTrustBundle with labels %q and the signer", metav1.FormatLabelSelector(s.LabelSelector)), Name: *s.SignerName}
	}
	return out, nil
}

// joinBundles is the certificates of all bundles, each once. Programs must not rely on their order: it is that of their hashes, so that it
// has nothing to do with the bundles', and stays while the certificates are the same.
func joinBundles(list []*certificatesv1.ClusterTrustBundle) []byte {
	found := map[[sha256.Size]byte][]byte{}
	for _, b := range list {
		for _, der := range certificatesIn([]byte(b.Spec.TrustBundle)) {
			found[sha256.Sum256(der)] = der
		}
	}
	var out [][]byte
	for _, sum := range slices.SortedFunc(maps.Keys(found), func(a, b [sha256.Size]byte) int { return bytes.Compare(a[:], b[:]) }) {
		out = append(out, found[sum])
	}
	return encodeCertificates(out)
}

// certificatesIn are the certificates of a PEM text, without what else it says.
func certificatesIn(text []byte) (out [][]byte) {
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			return out
		}
		if block.Type == "CERTIFICATE" {
			out = append(out, block.Bytes)
		}
	}
}

func encodeCertificates(list [][]byte) []byte {
	var out strings.Builder
	for _, der := range list {
		out.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	return []byte(out.String())
}

// fromBundles writes the file of a source. An optional one without bundles is empty.
func fromBundles(ctx context.Context, out map[string]file, s *corev1.ClusterTrustBundleProjection, m os.FileMode, bundles *trustBundles) error {
	all, err := bundles.list(ctx)
	if err != nil {
		return err
	}
	selected, err := selectBundles(all, s)
	if err := unlessOptional(err, s.Optional); err != nil {
		return err
	}
	out[s.Path] = file{joinBundles(selected), m}
	return nil
}

package apiserver

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota"
	resourcequotaapi "k8s.io/apiserver/pkg/admission/plugin/resourcequota/apis/resourcequota"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"portal/internal/apiserver/registry/service"
	"portal/internal/quota"
)

// quotaWorkers is how many namespaces' writes are counted at a time.
const quotaWorkers = 10

// quotas refuse what a ResourceQuota of the namespace has no room for, and add to the usage what it has. The controller resourcequota
// subtracts what goes.
type quotas struct {
	*resourcequota.QuotaAdmission
	client kubernetes.Interface
	lister listers.ResourceQuotaLister
	synced cache.InformerSynced

	mu sync.Mutex
	// recent are the namespaces in which a quota was made through this server, by when. The informer may not have it yet.
	recent map[string]time.Time
}

// informerLag is how late an informer of this process may be at most.
const informerLag = 30 * time.Second

var (
	_ admission.ValidationInterface                = &quotas{}
	_ initializer.WantsExternalKubeClientSet       = &quotas{}
	_ initializer.WantsExternalKubeInformerFactory = &quotas{}
	_ initializer.WantsQuotaConfiguration          = &quotas{}
)

func newQuotas() (*quotas, error) {
	counted, err := resourcequota.NewResourceQuota(&resourcequotaapi.Configuration{}, quotaWorkers)
	return &quotas{QuotaAdmission: counted, recent: map[string]time.Time{}}, err
}

// SetExternalKubeClientSet takes the client that writes usages.
func (q *quotas) SetExternalKubeClientSet(client kubernetes.Interface) {
	q.QuotaAdmission.SetExternalKubeClientSet(client)
	q.client = client
}

// SetExternalKubeInformerFactory takes the informer of quotas.
func (q *quotas) SetExternalKubeInformerFactory(f informers.SharedInformerFactory) {
	q.QuotaAdmission.SetExternalKubeInformerFactory(f)
	q.lister, q.synced = f.Core().V1().ResourceQuotas().Lister(), f.Core().V1().ResourceQuotas().Informer().HasSynced
}

// Validate counts a write. Most namespaces have no quota, and their writes need not queue up behind each other.
func (q *quotas) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if a.GetNamespace() == "" || service.Charged(ctx) {
		return nil
	}
	namespace := a.GetNamespace()
	if a.GetResource().GroupResource() == corev1.Resource("resourcequotas") && a.GetOperation() == admission.Create && !a.IsDryRun() {
		q.expect(namespace)
	}
	if q.synced() && !q.known(namespace) {
		if !q.justMade(namespace) {
			return nil
		}
		if list, err := q.client.CoreV1().ResourceQuotas(namespace).List(ctx, metav1.ListOptions{}); err != nil {
			return apierrors.NewInternalError(fmt.Errorf("look for quotas of the namespace: %w", err))
		} else if len(list.Items) == 0 {
			return nil
		}
		// It is there, and whoever made it may rely on it.
		err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, 5*time.Second, true, func(context.Context) (bool, error) {
			return q.known(namespace), nil
		})
		if err != nil {
			return apierrors.NewServerTimeout(a.GetResource().GroupResource(), strings.ToLower(string(a.GetOperation())), 1)
		}
	}
	return q.QuotaAdmission.Validate(ctx, a, o)
}

// known tells whether the informer has a quota of a namespace.
func (q *quotas) known(namespace string) bool {
	found, err := q.lister.ResourceQuotas(namespace).List(labels.Everything())
	return err != nil || len(found) > 0
}

// expect notes that a quota is about to be made, and forgets those of long ago.
func (q *quotas) expect(namespace string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	maps.DeleteFunc(q.recent, func(_ string, made time.Time) bool { return time.Since(made) > informerLag })
	q.recent[namespace] = time.Now()
}

// justMade tells whether a quota that the informer has not seen may be there.
func (q *quotas) justMade(namespace string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	made, ok := q.recent[namespace]
	return ok && time.Since(made) <= informerLag
}

// counting tells the plugin how objects are counted.
type counting struct{}

func (counting) Initialize(plugin admission.Interface) {
	if wants, ok := plugin.(initializer.WantsQuotaConfiguration); ok {
		wants.SetQuotaConfiguration(generic.NewConfiguration(quota.Evaluators(quota.NoLister, clock.RealClock{}), quota.Ignored))
	}
}

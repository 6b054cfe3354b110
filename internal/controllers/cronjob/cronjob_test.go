package cronjob

import (
	"errors"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

// TestUnseenJobs: what the informer lacks is looked for before it counts as gone.
func TestUnseenJobs(t *testing.T) {
	owned := func(change func(*batchv1.Job)) *batchv1.Job {
		j := job("r", "", noon)
		j.OwnerReferences = []metav1.OwnerReference{{UID: "u", Controller: ptr.To(true)}}
		if change != nil {
			change(j)
		}
		return j
	}
	for name, c := range map[string]struct {
		stored, known *batchv1.Job
		broken        bool
		unseen, fails bool
	}{
		"exists":         {stored: owned(nil), unseen: true},
		"known":          {stored: owned(nil), known: owned(nil)},
		"gone":           {},
		"another one":    {stored: owned(func(j *batchv1.Job) { j.UID = "new" })},
		"somebody's own": {stored: owned(func(j *batchv1.Job) { j.OwnerReferences = nil })},
		"API is away":    {stored: owned(nil), broken: true, fails: true},
	} {
		client := fake.NewClientset()
		if c.stored != nil {
			client = fake.NewClientset(c.stored)
		}
		if c.broken {
			client.PrependReactor("get", "jobs", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("unavailable") })
		}
		var known []*batchv1.Job
		if c.known != nil {
			known = append(known, c.known)
		}
		unseen, err := (&Controller{deps: Deps{Client: client}}).unseen(t.Context(), cron(active("r")), known)
		if (len(unseen) == 1) != c.unseen || (err != nil) != c.fails {
			t.Errorf("%s: %d Jobs, %v", name, len(unseen), err)
		}
	}
}

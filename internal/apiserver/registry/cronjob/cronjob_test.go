package cronjob

import (
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

type C = *batchv1.CronJob

func cron(change func(C)) C {
	c := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c"}}
	c.Spec.Schedule = "*/5 * * * *"
	c.Spec.JobTemplate.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "i"}}}
	change(c)
	return c
}

func TestRules(t *testing.T) {
	rules := registrytest.For(t, New(), batchv1.AddToScheme)
	for name, c := range map[string]struct {
		change func(C)
		want   []string
	}{
		"sound":       {func(c C) { c.Spec.TimeZone = ptr.To("America/Argentina/Buenos_Aires") }, nil},
		"every":       {func(c C) { c.Spec.Schedule = "@every 5m" }, nil},
		"no schedule": {func(c C) { c.Spec.Schedule = "" }, []string{"spec.schedule FieldValueRequired"}},
		"schedule":    {func(c C) { c.Spec.Schedule = "* * * *" }, []string{"spec.schedule FieldValueInvalid"}},
		"zone in it":  {func(c C) { c.Spec.Schedule = "TZ=UTC * * * * *" }, []string{"spec.schedule FieldValueInvalid"}},
		"panics":      {func(c C) { c.Spec.Schedule = "TZ=0" }, []string{"spec.schedule FieldValueInvalid", "spec.schedule FieldValueInvalid"}},
		"no zone":     {func(c C) { c.Spec.TimeZone = ptr.To("") }, []string{"spec.timeZone FieldValueInvalid"}},
		"path":        {func(c C) { c.Spec.TimeZone = ptr.To("../../etc/passwd") }, []string{"spec.timeZone FieldValueInvalid"}},
		"local":       {func(c C) { c.Spec.TimeZone = ptr.To("Local") }, []string{"spec.timeZone FieldValueInvalid"}},
		"policy":      {func(c C) { c.Spec.ConcurrencyPolicy = "x" }, []string{"spec.concurrencyPolicy FieldValueNotSupported"}},
		"limit":       {func(c C) { c.Spec.FailedJobsHistoryLimit = ptr.To[int32](-1) }, []string{"spec.failedJobsHistoryLimit FieldValueInvalid"}},
		"selector":    {func(c C) { c.Spec.JobTemplate.Spec.Selector = &metav1.LabelSelector{} }, []string{"spec.jobTemplate.spec.selector FieldValueInvalid"}},
		"manual":      {func(c C) { c.Spec.JobTemplate.Spec.ManualSelector = ptr.To(true) }, []string{"spec.jobTemplate.spec.manualSelector FieldValueNotSupported"}},
		"restarts":    {func(c C) { c.Spec.JobTemplate.Spec.Template.Spec.RestartPolicy = "" }, []string{"spec.jobTemplate.spec.template.spec.restartPolicy FieldValueRequired"}},
		"long name":   {func(c C) { c.Name = strings.Repeat("a", 53) }, []string{"metadata.name FieldValueInvalid"}},
	} {
		if got := rules.Create(t, cron(c.change)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	// A zone that an old object has in its schedule may stay.
	old := cron(func(c C) { c.Spec.Schedule = "TZ=UTC * * * * *" })
	rules.Scheme.Default(old)
	if got := rules.Update(t, cron(func(c C) { c.Spec.Schedule = "TZ=UTC 1 * * * *" }), old); got != nil {
		t.Errorf("an old schedule: %q", got)
	}
}

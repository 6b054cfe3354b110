package job

import (
	"context"
	"slices"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

type J = *batchv1.Job

func job(change func(J)) J {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "j"}}
	j.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: "i"}}}
	if change != nil {
		change(j)
	}
	return j
}

func indexed(j J) {
	j.Spec.CompletionMode, j.Spec.Completions = ptr.To(batchv1.IndexedCompletion), ptr.To[int32](4)
}

func fails(r batchv1.PodFailurePolicyRule) func(J) {
	return func(j J) {
		j.Spec.PodFailurePolicy = &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{r}}
	}
}

func succeeds(r batchv1.SuccessPolicyRule) func(J) {
	return func(j J) {
		indexed(j)
		j.Spec.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{r}}
	}
}

func TestRules(t *testing.T) {
	rules := registrytest.For(t, New(), batchv1.AddToScheme)
	codes := func(values ...int32) *batchv1.PodFailurePolicyOnExitCodesRequirement {
		return &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: values}
	}
	const rule = "spec.podFailurePolicy.rules[0]"
	for name, c := range map[string]struct {
		change func(J)
		want   []string
	}{
		"sound":          {func(J) {}, nil},
		"restart policy": {func(j J) { j.Spec.Template.Spec.RestartPolicy = "" }, []string{"spec.template.spec.restartPolicy FieldValueRequired"}},
		"negative":       {func(j J) { j.Spec.Parallelism = ptr.To[int32](-1) }, []string{"spec.parallelism FieldValueInvalid"}},
		"mode":           {func(j J) { j.Spec.CompletionMode = ptr.To(batchv1.CompletionMode("x")) }, []string{"spec.completionMode FieldValueNotSupported"}},
		"no completions": {func(j J) {
			indexed(j)
			j.Spec.Completions, j.Spec.Parallelism = nil, ptr.To[int32](1)
		}, []string{"spec.completions FieldValueRequired"}},
		"per index": {func(j J) { j.Spec.BackoffLimitPerIndex = ptr.To[int32](1) }, []string{"spec.backoffLimitPerIndex FieldValueInvalid"}},
		"own label": {func(j J) { j.Spec.Template.Labels = map[string]string{"job-name": "other"} },
			[]string{"spec.template.metadata.labels[job-name] FieldValueInvalid"}},
		"managed by": {func(j J) { j.Spec.ManagedBy = ptr.To("x") }, []string{"spec.managedBy FieldValueInvalid"}},
		"long name": {func(j J) {
			indexed(j)
			j.Name = "a23456789012345678901234567890123456789012345678901234567890123"
		}, []string{"metadata.name FieldValueInvalid"}},
		"policy":       {fails(batchv1.PodFailurePolicyRule{Action: batchv1.PodFailurePolicyActionIgnore, OnExitCodes: codes(1, 2)}), nil},
		"no action":    {fails(batchv1.PodFailurePolicyRule{OnExitCodes: codes(1)}), []string{rule + ".action FieldValueRequired"}},
		"nothing":      {fails(batchv1.PodFailurePolicyRule{Action: batchv1.PodFailurePolicyActionCount}), []string{rule + " FieldValueInvalid"}},
		"zero":         {fails(batchv1.PodFailurePolicyRule{Action: batchv1.PodFailurePolicyActionCount, OnExitCodes: codes(0)}), []string{rule + ".onExitCodes.values[0] FieldValueInvalid"}},
		"order":        {fails(batchv1.PodFailurePolicyRule{Action: batchv1.PodFailurePolicyActionCount, OnExitCodes: codes(2, 1)}), []string{rule + ".onExitCodes.values FieldValueInvalid"}},
		"fails index":  {fails(batchv1.PodFailurePolicyRule{Action: batchv1.PodFailurePolicyActionFailIndex, OnExitCodes: codes(1)}), []string{rule + ".action FieldValueInvalid"}},
		"success":      {succeeds(batchv1.SuccessPolicyRule{SucceededIndexes: ptr.To("1-3"), SucceededCount: ptr.To[int32](2)}), nil},
		"no success":   {succeeds(batchv1.SuccessPolicyRule{}), []string{"spec.successPolicy.rules[0] FieldValueRequired"}},
		"too many":     {succeeds(batchv1.SuccessPolicyRule{SucceededIndexes: ptr.To("1"), SucceededCount: ptr.To[int32](2)}), []string{"spec.successPolicy.rules[0].succeededCount FieldValueInvalid"}},
		"beyond":       {succeeds(batchv1.SuccessPolicyRule{SucceededIndexes: ptr.To("4")}), []string{"spec.successPolicy.rules[0].succeededIndexes FieldValueInvalid"}},
		"needs index":  {func(j J) { j.Spec.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{{}}} }, []string{"spec.successPolicy FieldValueInvalid"}},
		"own selector": {func(j J) { j.Spec.ManualSelector = ptr.To(true) }, []string{"spec.selector FieldValueRequired", "spec.template.metadata.labels FieldValueInvalid"}},
	} {
		if got := rules.Create(t, job(c.change)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestGenerated(t *testing.T) {
	rules := registrytest.For(t, New(), batchv1.AddToScheme)
	j := job(func(j J) { j.Spec.Template.Labels = map[string]string{"a": "b"} })
	if errs := rules.Create(t, j); errs != nil {
		t.Fatal(errs)
	}
	if j.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel] != string(j.UID) || j.Spec.Template.Labels[batchv1.JobNameLabel] != "j" || len(j.Labels) != 1 {
		t.Errorf("%+v", j)
	}
	if *j.Spec.Completions != 1 || *j.Spec.Parallelism != 1 || *j.Spec.BackoffLimit != 6 || j.Generation != 1 {
		t.Errorf("%+v", j.Spec)
	}
}

func TestUpdates(t *testing.T) {
	rules := registrytest.For(t, New(), batchv1.AddToScheme)
	for name, c := range map[string]struct {
		old    func(J)
		change func(J)
		want   []string
	}{
		"parallelism": {nil, func(j J) { *j.Spec.Parallelism = 5 }, nil},
		"completions": {nil, func(j J) { *j.Spec.Completions = 5 }, []string{"spec.completions FieldValueInvalid"}},
		"elastic":     {indexed, func(j J) { *j.Spec.Completions, *j.Spec.Parallelism = 2, 2 }, nil},
		"inelastic":   {indexed, func(j J) { *j.Spec.Completions = 2 }, []string{"spec.completions FieldValueInvalid"}},
		"template":    {nil, func(j J) { j.Spec.Template.Spec.NodeSelector = map[string]string{"a": "b"} }, []string{"spec.template FieldValueInvalid"}},
		"suspended": {func(j J) { j.Spec.Suspend = ptr.To(true) },
			func(j J) { j.Spec.Template.Spec.NodeSelector = map[string]string{"a": "b"} }, nil},
		"suspended image": {func(j J) { j.Spec.Suspend = ptr.To(true) },
			func(j J) { j.Spec.Template.Spec.Containers[0].Image = "other" }, []string{"spec.template.spec FieldValueInvalid"}},
		"managed by": {nil, func(j J) { j.Spec.ManagedBy = ptr.To("a.b/c") }, []string{"spec.managedBy FieldValueInvalid"}},
	} {
		old := job(c.old)
		if errs := rules.Create(t, old); errs != nil {
			t.Fatal(name, errs)
		}
		next := old.DeepCopy()
		c.change(next)
		if got := rules.Update(t, next, old); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestStatus(t *testing.T) {
	now := metav1.Now()
	with := func(kinds ...batchv1.JobConditionType) batchv1.JobStatus {
		s := batchv1.JobStatus{StartTime: &now, CompletionTime: &now}
		for _, kind := range kinds {
			s.Conditions = append(s.Conditions, batchv1.JobCondition{Type: kind, Status: corev1.ConditionTrue})
		}
		if !slices.Contains(kinds, batchv1.JobComplete) {
			s.CompletionTime = nil
		}
		return s
	}
	for name, c := range map[string]struct {
		old, now batchv1.JobStatus
		want     []string
	}{
		"complete":         {with(), with(batchv1.JobSuccessCriteriaMet, batchv1.JobComplete), nil},
		"failed":           {with(), with(batchv1.JobFailureTarget, batchv1.JobFailed), nil},
		"without criteria": {with(), with(batchv1.JobComplete), []string{"status.conditions"}},
		"without target":   {with(), with(batchv1.JobFailed), []string{"status.conditions"}},
		"both":             {with(), with(batchv1.JobSuccessCriteriaMet, batchv1.JobFailureTarget), []string{"status.conditions"}},
		"taken back":       {with(batchv1.JobFailureTarget), with(), []string{"status.conditions"}},
		"fewer failures":   {batchv1.JobStatus{Failed: 2}, batchv1.JobStatus{Failed: 1}, []string{"status.failed"}},
		"fewer successes":  {batchv1.JobStatus{Succeeded: 2}, batchv1.JobStatus{Succeeded: 1}, []string{"status.succeeded"}},
		"more ready":       {batchv1.JobStatus{}, batchv1.JobStatus{Ready: ptr.To[int32](1)}, []string{"status.ready"}},
		"indexes":          {batchv1.JobStatus{}, batchv1.JobStatus{CompletedIndexes: "1"}, []string{"status.completedIndexes", "status.completedIndexes"}},
		"another start":    {batchv1.JobStatus{StartTime: &now}, batchv1.JobStatus{}, []string{"status.startTime"}},
		"uncounted, twice": {batchv1.JobStatus{}, batchv1.JobStatus{UncountedTerminatedPods: &batchv1.UncountedTerminatedPods{Failed: []types.UID{"a", "a"}}}, []string{"status.uncountedTerminatedPods.failed[1]"}},
		"active at the end": {with(), func() batchv1.JobStatus {
			s := with(batchv1.JobFailureTarget, batchv1.JobFailed)
			s.Active = 1
			return s
		}(), []string{"status.active"}},
	} {
		old := job(func(j J) { setDefaults(j); j.Status, j.ResourceVersion = c.old, "1" })
		next := old.DeepCopy()
		next.Status = c.now
		var got []string
		for _, err := range validateStatus(context.Background(), next, old) {
			got = append(got, err.Field)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

package disruption

import (
	"context"
	"errors"
	"slices"
	"testing"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

func of(change func(*budget)) *budget {
	b := &budget{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "b", ResourceVersion: ""}}
	change(b)
	return b
}

func TestRules(t *testing.T) {
	rules := registrytest.For(t, New(), policyv1.AddToScheme)
	for name, c := range map[string]struct {
		change func(*budget)
		want   []string
	}{
		"sound": {func(b *budget) { b.Spec.MinAvailable = ptr.To(intstr.FromString("50%")) }, nil},
		"both": {func(b *budget) {
			b.Spec.MinAvailable, b.Spec.MaxUnavailable = ptr.To(intstr.FromInt32(1)), ptr.To(intstr.FromInt32(1))
		}, []string{"spec FieldValueInvalid"}},
		"negative": {func(b *budget) { b.Spec.MinAvailable = ptr.To(intstr.FromInt32(-1)) }, []string{"spec.minAvailable FieldValueInvalid"}},
		"too much": {func(b *budget) { b.Spec.MaxUnavailable = ptr.To(intstr.FromString("101%")) }, []string{"spec.maxUnavailable FieldValueInvalid"}},
		"policy": {func(b *budget) {
			b.Spec.UnhealthyPodEvictionPolicy = ptr.To(policyv1.UnhealthyPodEvictionPolicyType("x"))
		}, []string{"spec.unhealthyPodEvictionPolicy FieldValueNotSupported"}},
		"selector": {func(b *budget) { b.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"!": ""}} }, []string{"spec.selector.matchLabels FieldValueInvalid"}},
	} {
		if got := rules.Create(t, of(c.change)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	bad := of(func(b *budget) { b.ResourceVersion, b.Status.DisruptionsAllowed = "1", -1 })
	if errs := validateStatus(context.Background(), bad, of(func(b *budget) { b.ResourceVersion = "1" })); len(errs) != 1 || errs[0].Field != "status.disruptionsAllowed" {
		t.Errorf("status: %v", errs)
	}
}

func TestRefusals(t *testing.T) {
	full := func(b *budget) {
		b.Status.DisruptionsAllowed, b.Status.DisruptedPods = 1, map[string]metav1.Time{}
		for i := range maxPending + 1 {
			b.Status.DisruptedPods[string(rune(i+1))] = metav1.Time{}
		}
	}
	for name, c := range map[string]struct {
		change func(*budget)
		reason metav1.StatusReason
		wait   int32
	}{
		"allowed":  {func(b *budget) { b.Status.DisruptionsAllowed = 1 }, "", 0},
		"none":     {func(b *budget) {}, metav1.StatusReasonTooManyRequests, 0},
		"unseen":   {func(b *budget) { b.Generation, b.Status.DisruptionsAllowed = 2, 1 }, metav1.StatusReasonTooManyRequests, unseen},
		"negative": {func(b *budget) { b.Status.DisruptionsAllowed = -1 }, metav1.StatusReasonForbidden, 0},
		"full":     {full, metav1.StatusReasonForbidden, 0},
	} {
		err := refusal(of(c.change))
		if c.reason == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		var status *apierrors.StatusError
		if !errors.As(err, &status) || status.ErrStatus.Reason != c.reason || status.ErrStatus.Details.RetryAfterSeconds != c.wait ||
			!apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause) {
			t.Errorf("%s: %+v", name, err)
		}
	}
}

// A Pod that is not ready may go if enough others are, or if the policy says so.
func TestUnhealthy(t *testing.T) {
	for _, c := range []struct {
		policy           policyv1.UnhealthyPodEvictionPolicyType
		healthy, desired int32
		may              bool
	}{
		{"", 2, 2, true}, {"", 1, 2, false}, {"", 0, 0, false}, {policyv1.IfHealthyBudget, 1, 2, false}, {policyv1.AlwaysAllow, 0, 2, true},
	} {
		b := of(func(b *budget) { b.Status.CurrentHealthy, b.Status.DesiredHealthy = c.healthy, c.desired })
		if c.policy != "" {
			b.Spec.UnhealthyPodEvictionPolicy = &c.policy
		}
		if got := unhealthyMayGo(b); got != c.may {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

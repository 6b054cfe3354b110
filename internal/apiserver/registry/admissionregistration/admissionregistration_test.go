package admissionregistration

import (
	"context"
	"errors"
	"slices"
	"testing"

	v1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func meta(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, ResourceVersion: "1"} }

func rule(change func(*v1.RuleWithOperations)) v1.RuleWithOperations {
	r := v1.RuleWithOperations{
		Operations: []v1.OperationType{v1.Create},
		Rule:       v1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"services"}},
	}
	if change != nil {
		change(&r)
	}
	return r
}

func configuration(change func(*v1.ValidatingWebhook)) *v1.ValidatingWebhookConfiguration {
	w := v1.ValidatingWebhook{
		Name: "hook.example.com", ClientConfig: v1.WebhookClientConfig{URL: new("https://example.com/hook")},
		Rules: []v1.RuleWithOperations{rule(nil)}, SideEffects: new(v1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
	}
	if change != nil {
		change(&w)
	}
	return &v1.ValidatingWebhookConfiguration{ObjectMeta: meta("hooks"), Webhooks: []v1.ValidatingWebhook{w}}
}

func TestWebhooks(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v1.ValidatingWebhook)
		want   []string
	}{
		"as it should be":        {nil, nil},
		"a short name":           {func(w *v1.ValidatingWebhook) { w.Name = "hook" }, []string{"webhooks[0].name FieldValueInvalid"}},
		"without side effects":   {func(w *v1.ValidatingWebhook) { w.SideEffects = nil }, []string{"webhooks[0].sideEffects FieldValueRequired"}},
		"with side effects":      {func(w *v1.ValidatingWebhook) { w.SideEffects = new(v1.SideEffectClassSome) }, []string{"webhooks[0].sideEffects FieldValueNotSupported"}},
		"slow":                   {func(w *v1.ValidatingWebhook) { w.TimeoutSeconds = new(int32(31)) }, []string{"webhooks[0].timeoutSeconds FieldValueInvalid"}},
		"nowhere":                {func(w *v1.ValidatingWebhook) { w.ClientConfig.URL = nil }, []string{"webhooks[0].clientConfig FieldValueRequired"}},
		"not over TLS":           {func(w *v1.ValidatingWebhook) { w.ClientConfig.URL = new("http://example.com/") }, []string{"webhooks[0].clientConfig.url FieldValueInvalid"}},
		"of an unknown version":  {func(w *v1.ValidatingWebhook) { w.AdmissionReviewVersions = []string{"v2"} }, []string{"webhooks[0].admissionReviewVersions FieldValueInvalid"}},
		"with a false condition": {func(w *v1.ValidatingWebhook) { w.MatchConditions = []v1.MatchCondition{{Name: "a", Expression: "1 +"}} }, []string{"webhooks[0].matchConditions[0].expression FieldValueInvalid"}},
		"for no operation":       {func(w *v1.ValidatingWebhook) { w.Rules[0].Operations = nil }, []string{"webhooks[0].rules[0].operations FieldValueRequired"}},
		"for all and one":        {func(w *v1.ValidatingWebhook) { w.Rules[0].APIGroups = []string{"*", "apps"} }, []string{"webhooks[0].rules[0].apiGroups FieldValueInvalid"}},
		"for part of a part":     {func(w *v1.ValidatingWebhook) { w.Rules[0].Resources = []string{"pods/*", "pods/status"} }, []string{"webhooks[0].rules[0].resources[1] FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := registrytest.For(t, NewValidatingWebhooks(), v1.AddToScheme).Create(t, configuration(c.change)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

// What an object has from older days may stay.
func TestOldWebhooksMayStay(t *testing.T) {
	rules := registrytest.For(t, NewValidatingWebhooks(), v1.AddToScheme)
	loud := func(w *v1.ValidatingWebhook) { w.SideEffects = new(v1.SideEffectClassUnknown) }
	if got := rules.Update(t, configuration(loud), configuration(loud)); got != nil {
		t.Errorf("refused for %q", got)
	}
	if got := rules.Update(t, configuration(loud), configuration(nil)); len(got) != 1 {
		t.Errorf("new side effects were refused for %q", got)
	}
}

func policy(change func(*v1.ValidatingAdmissionPolicySpec)) *v1.ValidatingAdmissionPolicy {
	p := &v1.ValidatingAdmissionPolicy{ObjectMeta: meta("p"), Spec: v1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &v1.MatchResources{ResourceRules: []v1.NamedRuleWithOperations{{RuleWithOperations: rule(nil)}}},
		Validations:      []v1.Validation{{Expression: "object.spec.size() > 0"}},
	}}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

func allowed(context.Context, *v1.ParamKind, string, string, string) error { return nil }

func refused(context.Context, *v1.ParamKind, string, string, string) error { return errors.New("no") }

func TestPolicies(t *testing.T) {
	type spec = v1.ValidatingAdmissionPolicySpec
	for name, c := range map[string]struct {
		change func(*spec)
		want   []string
	}{
		"as it should be":    {nil, nil},
		"for nothing":        {func(s *spec) { s.MatchConstraints = nil }, []string{"spec.matchConstraints FieldValueRequired"}},
		"without rules":      {func(s *spec) { s.Validations = nil }, []string{"spec.auditAnnotations FieldValueRequired", "spec.validations FieldValueRequired"}},
		"no expression":      {func(s *spec) { s.Validations[0].Expression = "object.spec." }, []string{"spec.validations[0].expression FieldValueInvalid"}},
		"no bool":            {func(s *spec) { s.Validations[0].Expression = "'text'" }, []string{"spec.validations[0].expression FieldValueInvalid"}},
		"params without any": {func(s *spec) { s.Validations[0].Expression = "params.x == 1" }, []string{"spec.validations[0].expression FieldValueInvalid"}},
		"with a variable": {func(s *spec) {
			s.Variables = []v1.Variable{{Name: "n", Expression: "object.spec.size()"}}
			s.Validations[0].Expression = "variables.n > 0"
		}, nil},
		"with another's variable": {func(s *spec) { s.Validations[0].Expression = "variables.n > 0" }, []string{"spec.validations[0].expression FieldValueInvalid"}},
		"a variable named in":     {func(s *spec) { s.Variables = []v1.Variable{{Name: "in", Expression: "1"}} }, []string{"spec.variables[0].name FieldValueInvalid"}},
		"another reason":          {func(s *spec) { s.Validations[0].Reason = new(metav1.StatusReasonGone) }, []string{"spec.validations[0].reason FieldValueNotSupported"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := registrytest.For(t, NewValidatingPolicies(allowed), v1.AddToScheme).Create(t, policy(c.change))
			if slices.Sort(got); name == "with another's variable" || name == "a variable named in" {
				if len(got) == 0 {
					t.Error("accepted")
				}
				return // the compiler may have more to say
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

// An author can't read through a policy what they can't read themselves.
func TestParametersNeedAccess(t *testing.T) {
	withParams := policy(func(s *v1.ValidatingAdmissionPolicySpec) {
		s.ParamKind = &v1.ParamKind{APIVersion: "v1", Kind: "Secret"}
	})
	if got := registrytest.For(t, NewValidatingPolicies(refused), v1.AddToScheme).Create(t, withParams); !slices.Equal(got, []string{"spec.paramKind FieldValueForbidden"}) {
		t.Errorf("refused for %q", got)
	}
	binding := &v1.ValidatingAdmissionPolicyBinding{ObjectMeta: meta("b"), Spec: v1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: "p", ValidationActions: []v1.ValidationAction{v1.Deny},
		ParamRef: &v1.ParamRef{Name: "s", Namespace: "ns", ParameterNotFoundAction: new(v1.DenyAction)},
	}}
	kind := func(context.Context, string) *v1.ParamKind { return withParams.Spec.ParamKind }
	if got := registrytest.For(t, NewValidatingBindings(refused, kind), v1.AddToScheme).Create(t, binding); !slices.Equal(got, []string{"spec.paramRef FieldValueForbidden"}) {
		t.Errorf("refused for %q", got)
	}
	if got := registrytest.For(t, NewValidatingBindings(allowed, kind), v1.AddToScheme).Create(t, binding); got != nil {
		t.Errorf("refused for %q", got)
	}
}

func TestMutations(t *testing.T) {
	type spec = v1.MutatingAdmissionPolicySpec
	for name, c := range map[string]struct {
		change func(*spec)
		want   []string
	}{
		"as it should be":  {func(*spec) {}, nil},
		"none":             {func(s *spec) { s.Mutations = nil }, []string{"spec.mutations FieldValueRequired"}},
		"of deletions":     {func(s *spec) { s.MatchConstraints.ResourceRules[0].Operations = []v1.OperationType{v1.Delete} }, []string{"spec.matchConstraints.resourceRules.operations FieldValueNotSupported"}},
		"of no type":       {func(s *spec) { s.Mutations[0].PatchType = "" }, []string{"spec.mutations[0].patchType FieldValueRequired"}},
		"of another type":  {func(s *spec) { s.Mutations[0].PatchType = v1.PatchTypeApplyConfiguration }, []string{"spec.mutations[0].applyConfiguration FieldValueRequired", "spec.mutations[0].jsonPatch FieldValueInvalid"}},
		"no JSON patch":    {func(s *spec) { s.Mutations[0].JSONPatch.Expression = "1" }, []string{"spec.mutations[0].jsonPatch.expression FieldValueInvalid"}},
		"asked for never":  {func(s *spec) { s.ReinvocationPolicy = "" }, []string{"spec.reinvocationPolicy FieldValueRequired"}},
		"asked for always": {func(s *spec) { s.ReinvocationPolicy = "Always" }, []string{"spec.reinvocationPolicy FieldValueNotSupported"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &v1.MutatingAdmissionPolicy{ObjectMeta: meta("p"), Spec: spec{
				MatchConstraints:   &v1.MatchResources{ResourceRules: []v1.NamedRuleWithOperations{{RuleWithOperations: rule(nil)}}},
				ReinvocationPolicy: v1.NeverReinvocationPolicy,
				Mutations: []v1.Mutation{{PatchType: v1.PatchTypeJSONPatch, JSONPatch: &v1.JSONPatch{
					Expression: `[JSONPatch{op: "add", path: "/metadata/labels", value: {"a": "b"}}]`,
				}}},
			}}
			c.change(&p.Spec)
			got := registrytest.For(t, NewMutatingPolicies(allowed), v1.AddToScheme).Create(t, p)
			if slices.Sort(got); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

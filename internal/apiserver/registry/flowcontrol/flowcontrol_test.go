package flowcontrol

import (
	"slices"
	"testing"

	v1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"

	"portal/internal/apiserver/registry/registrytest"
)

func TestLevels(t *testing.T) {
	type spec = v1.PriorityLevelConfigurationSpec
	for name, c := range map[string]struct {
		change func(*spec)
		want   []string
	}{
		"as it should be":     {func(*spec) {}, nil},
		"exempt":              {func(s *spec) { s.Type = v1.PriorityLevelEnablementExempt }, []string{"spec.limited FieldValueForbidden", "spec.type FieldValueInvalid"}},
		"limited by nothing":  {func(s *spec) { s.Limited = nil }, []string{"spec.limited FieldValueRequired"}},
		"a negative share":    {func(s *spec) { s.Limited.NominalConcurrencyShares = new(int32(-1)) }, []string{"spec.limited.nominalConcurrencyShares FieldValueInvalid"}},
		"lends too much":      {func(s *spec) { s.Limited.LendablePercent = new(int32(101)) }, []string{"spec.limited.lendablePercent FieldValueInvalid"}},
		"rejects from queues": {func(s *spec) { s.Limited.LimitResponse.Type = v1.LimitResponseTypeReject }, []string{"spec.limited.limitResponse.queuing FieldValueForbidden"}},
		"a large hand":        {func(s *spec) { s.Limited.LimitResponse.Queuing.HandSize = 65 }, []string{"spec.limited.limitResponse.queuing.handSize FieldValueInvalid"}},
		"too many queues":     {func(s *spec) { s.Limited.LimitResponse.Queuing.Queues = maxQueues + 1 }, []string{"spec.limited.limitResponse.queuing.handSize FieldValueInvalid", "spec.limited.limitResponse.queuing.queues FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			level := &v1.PriorityLevelConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "l"}, Spec: spec{
				Type: v1.PriorityLevelEnablementLimited,
				Limited: &v1.LimitedPriorityLevelConfiguration{
					LimitResponse: v1.LimitResponse{Type: v1.LimitResponseTypeQueue, Queuing: &v1.QueuingConfiguration{Queues: 64}},
				},
			}}
			c.change(&level.Spec)
			got := registrytest.For(t, NewLevels(), v1.AddToScheme).Create(t, level)
			if slices.Sort(got); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestSchemas(t *testing.T) {
	type spec = v1.FlowSchemaSpec
	for name, c := range map[string]struct {
		change func(*spec)
		want   []string
	}{
		"as it should be":  {func(*spec) {}, nil},
		"first of all":     {func(s *spec) { s.MatchingPrecedence = 1 }, []string{"spec.matchingPrecedence FieldValueInvalid"}},
		"without a level":  {func(s *spec) { s.PriorityLevelConfiguration.Name = "" }, []string{"spec.priorityLevelConfiguration.name FieldValueRequired"}},
		"for nobody":       {func(s *spec) { s.Rules[0].Subjects = nil }, []string{"spec.rules[0].subjects FieldValueRequired"}},
		"for two kinds":    {func(s *spec) { s.Rules[0].Subjects[0].User = &v1.UserSubject{Name: "me"} }, []string{"spec.rules[0].subjects[0].user FieldValueForbidden"}},
		"an unknown verb":  {func(s *spec) { s.Rules[0].ResourceRules[0].Verbs = []string{"steal"} }, []string{"spec.rules[0].resourceRules[0].verbs FieldValueNotSupported"}},
		"in no namespace":  {func(s *spec) { s.Rules[0].ResourceRules[0].Namespaces = nil }, []string{"spec.rules[0].resourceRules[0].namespaces FieldValueRequired"}},
		"a relative path":  {func(s *spec) { s.Rules[0].NonResourceRules[0].NonResourceURLs = []string{"healthz"} }, []string{"spec.rules[0].nonResourceRules[0].nonResourceURLs[0] FieldValueInvalid"}},
		"a star in a path": {func(s *spec) { s.Rules[0].NonResourceRules[0].NonResourceURLs = []string{"/a/*/b"} }, []string{"spec.rules[0].nonResourceRules[0].nonResourceURLs[0] FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			schema := &v1.FlowSchema{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: spec{
				PriorityLevelConfiguration: v1.PriorityLevelConfigurationReference{Name: "workload-low"},
				Rules: []v1.PolicyRulesWithSubjects{{
					Subjects:         []v1.Subject{{Kind: v1.SubjectKindGroup, Group: &v1.GroupSubject{Name: "*"}}},
					ResourceRules:    []v1.ResourcePolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}, Namespaces: []string{"*"}}},
					NonResourceRules: []v1.NonResourcePolicyRule{{Verbs: []string{"*"}, NonResourceURLs: []string{"/healthz", "/openapi/*"}}},
				}},
			}}
			c.change(&schema.Spec)
			got := registrytest.For(t, NewSchemas(), v1.AddToScheme).Create(t, schema)
			if slices.Sort(got); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

// What the server needs for itself is accepted as the library has it, and in no other form.
func TestMandatory(t *testing.T) {
	levels, schemas := registrytest.For(t, NewLevels(), v1.AddToScheme), registrytest.For(t, NewSchemas(), v1.AddToScheme)
	for _, list := range [][]*v1.PriorityLevelConfiguration{bootstrap.MandatoryPriorityLevelConfigurations, bootstrap.SuggestedPriorityLevelConfigurations} {
		for _, level := range list {
			if got := levels.Create(t, level.DeepCopy()); got != nil {
				t.Errorf("level %s is refused for %q", level.Name, got)
			}
		}
	}
	for _, list := range [][]*v1.FlowSchema{bootstrap.MandatoryFlowSchemas, bootstrap.SuggestedFlowSchemas} {
		for _, schema := range list {
			if got := schemas.Create(t, schema.DeepCopy()); got != nil {
				t.Errorf("schema %s is refused for %q", schema.Name, got)
			}
		}
	}
	changed := bootstrap.MandatoryFlowSchemas[0].DeepCopy()
	changed.Spec.Rules = nil
	if got := schemas.Create(t, changed); len(got) == 0 {
		t.Error("a mandatory schema may be changed")
	}
}

package admissionregistration

import (
	"context"
	"slices"
	"strings"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// hook is what both kinds of webhooks have.
type hook struct {
	name        string
	client      *v1.WebhookClientConfig
	rules       []v1.RuleWithOperations
	failure     **v1.FailurePolicyType
	match       **v1.MatchPolicyType
	namespaces  **metav1.LabelSelector
	objects     **metav1.LabelSelector
	sideEffects *v1.SideEffectClass
	timeout     **int32
	versions    []string
	conditions  []v1.MatchCondition
	// reinvocation is nil for those that change nothing.
	reinvocation **v1.ReinvocationPolicyType
}

func validatingHooks(list []v1.ValidatingWebhook) []hook {
	out := make([]hook, len(list))
	for i := range list {
		w := &list[i]
		out[i] = hook{
			w.Name, &w.ClientConfig, w.Rules, &w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector,
			w.SideEffects, &w.TimeoutSeconds, w.AdmissionReviewVersions, w.MatchConditions, nil,
		}
	}
	return out
}

func mutatingHooks(list []v1.MutatingWebhook) []hook {
	out := make([]hook, len(list))
	for i := range list {
		w := &list[i]
		out[i] = hook{
			w.Name, &w.ClientConfig, w.Rules, &w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector,
			w.SideEffects, &w.TimeoutSeconds, w.AdmissionReviewVersions, w.MatchConditions, &w.ReinvocationPolicy,
		}
	}
	return out
}

// NewValidatingWebhooks describes ValidatingWebhookConfigurations.
func NewValidatingWebhooks() registry.Resource {
	type object = v1.ValidatingWebhookConfiguration
	k := newWebhooks(func(c *object) []hook { return validatingHooks(c.Webhooks) })
	k.Plural, k.Singular, k.KindName = "validatingwebhookconfigurations", "validatingwebhookconfiguration", "ValidatingWebhookConfiguration"
	k.NewList = func() runtime.Object { return &v1.ValidatingWebhookConfigurationList{} }
	return registry.CountChanges(k, func(c *object) *[]v1.ValidatingWebhook { return &c.Webhooks })
}

// NewMutatingWebhooks describes MutatingWebhookConfigurations.
func NewMutatingWebhooks() registry.Resource {
	type object = v1.MutatingWebhookConfiguration
	k := newWebhooks(func(c *object) []hook { return mutatingHooks(c.Webhooks) })
	k.Plural, k.Singular, k.KindName = "mutatingwebhookconfigurations", "mutatingwebhookconfiguration", "MutatingWebhookConfiguration"
	k.NewList = func() runtime.Object { return &v1.MutatingWebhookConfigurationList{} }
	return registry.CountChanges(k, func(c *object) *[]v1.MutatingWebhook { return &c.Webhooks })
}

// newWebhooks describes what both kinds have in common.
func newWebhooks[T any, P registry.Object[T]](hooks func(P) []hook) *registry.Kind[T, P] {
	return &registry.Kind[T, P]{
		Served: v1.SchemeGroupVersion, Categories: categories, ClusterScoped: true, StrictUpdate: true,
		Default: func(c P) { defaultHooks(hooks(c)) },
		Validate: func(_ context.Context, c P) field.ErrorList {
			return append(validateName(c), validateHooks(hooks(c), nil)...)
		},
		ValidateUpdate: func(_ context.Context, c, old P) field.ErrorList {
			return append(rules.MetaUpdate(c, old), validateHooks(hooks(c), hooks(old))...)
		},
		Warnings: func(_ context.Context, c, _ P) []string { return hookWarnings(hooks(c)) },
		Columns: []registry.Column[T]{
			{Name: "Webhooks", Type: "integer", Description: "The number of webhooks in the configuration.", Cell: func(c *T) any { return int64(len(hooks(P(c)))) }},
			registry.Age[T, P](),
		},
	}
}

// defaultTimeout is how many seconds a webhook may take.
const defaultTimeout = 10

func defaultHooks(hooks []hook) {
	for _, h := range hooks {
		orDefault(h.failure, v1.Fail)
		defaultMatching(h.match, h.namespaces, h.objects)
		orDefault(h.timeout, defaultTimeout)
		if h.reinvocation != nil {
			orDefault(h.reinvocation, v1.NeverReinvocationPolicy)
		}
		for i := range h.rules {
			defaultRule(&h.rules[i])
		}
		if h.client.Service != nil {
			orDefault(&h.client.Service.Port, 443)
		}
	}
}

var (
	quiet = []v1.SideEffectClass{v1.SideEffectClassNone, v1.SideEffectClassNoneOnDryRun}
	// older objects may have these.
	loud            = []v1.SideEffectClass{v1.SideEffectClassNone, v1.SideEffectClassNoneOnDryRun, v1.SideEffectClassSome, v1.SideEffectClassUnknown}
	reviewVersions  = []string{"v1", "v1beta1"}
	maxHookTimeout  = int32(30)
	reinvocationSet = []v1.ReinvocationPolicyType{v1.IfNeededReinvocationPolicy, v1.NeverReinvocationPolicy}
)

// leniency is what an update may keep, because the object already has it.
type leniency struct {
	sideEffects, versions, names, selectors, conditions bool
	expressions                                         map[string]bool
}

func leniencyOf(hooks, old []hook) leniency {
	l := leniency{expressions: map[string]bool{}, conditions: len(old) > 0 && len(hooks) == len(old)}
	names := map[string]bool{}
	for i, h := range old {
		l.sideEffects = l.sideEffects || h.sideEffects == nil || !slices.Contains(quiet, *h.sideEffects)
		l.versions = l.versions || len(h.versions) > 0 && !slices.ContainsFunc(h.versions, knownReview)
		l.names = l.names || names[h.name]
		names[h.name] = true
		l.selectors = l.selectors || len(validateSelector(nil, *h.namespaces, false))+len(validateSelector(nil, *h.objects, false)) > 0
		l.conditions = l.conditions && equality.Semantic.DeepEqual(hooks[i].conditions, h.conditions)
		for _, condition := range h.conditions {
			l.expressions[condition.Expression] = true
		}
	}
	return l
}

func knownReview(version string) bool { return slices.Contains(reviewVersions, version) }

// validateHooks validates the webhooks of a configuration; old are those that it had.
func validateHooks(hooks, old []hook) field.ErrorList {
	var errs field.ErrorList
	lenient := leniencyOf(hooks, old)
	seen := map[string]bool{}
	for i, h := range hooks {
		path := field.NewPath("webhooks").Index(i)
		errs = append(errs, validateHook(path, &h, lenient)...)
		if seen[h.name] && h.name != "" && !lenient.names {
			errs = append(errs, field.Duplicate(path.Child("name"), h.name))
		}
		seen[h.name] = true
	}
	return errs
}

func validateHook(path *field.Path, h *hook, lenient leniency) field.ErrorList {
	errs := validation.IsFullyQualifiedName(path.Child("name"), h.name)
	for i := range h.rules {
		errs = append(errs, validateRule(path.Child("rules").Index(i), &h.rules[i])...)
	}
	if *h.failure != nil {
		errs = append(errs, rules.OneOf(path.Child("failurePolicy"), **h.failure, v1.Fail, v1.Ignore)...)
	}
	if *h.match != nil {
		errs = append(errs, rules.OneOf(path.Child("matchPolicy"), **h.match, v1.Equivalent, v1.Exact)...)
	}
	if h.reinvocation != nil && *h.reinvocation != nil {
		errs = append(errs, rules.OneOf(path.Child("reinvocationPolicy"), **h.reinvocation, reinvocationSet...)...)
	}
	allowed := quiet
	if lenient.sideEffects {
		allowed = loud
	}
	if h.sideEffects == nil {
		errs = append(errs, field.Required(path.Child("sideEffects"), "None, or NoneOnDryRun"))
	} else {
		errs = append(errs, rules.OneOf(path.Child("sideEffects"), *h.sideEffects, allowed...)...)
	}
	if t := *h.timeout; t != nil && (*t < 1 || *t > maxHookTimeout) {
		errs = append(errs, field.Invalid(path.Child("timeoutSeconds"), *t, "must be from 1 to 30"))
	}
	errs = append(errs, validateSelector(path.Child("namespaceSelector"), *h.namespaces, lenient.selectors)...)
	errs = append(errs, validateSelector(path.Child("objectSelector"), *h.objects, lenient.selectors)...)
	errs = append(errs, validateClient(path.Child("clientConfig"), h.client)...)
	if !lenient.conditions {
		errs = append(errs, validateConditions(path.Child("matchConditions"), h.conditions, false, lenient.expressions)...)
	}
	return append(errs, validateVersions(path.Child("admissionReviewVersions"), h.versions, lenient.versions)...)
}

func validateClient(path *field.Path, c *v1.WebhookClientConfig) field.ErrorList {
	switch {
	case (c.URL == nil) == (c.Service == nil):
		return field.ErrorList{field.Required(path, "either a url or a service")}
	case c.URL != nil:
		return webhookutil.ValidateWebhookURL(path.Child("url"), *c.URL, true)
	}
	port := int32(443)
	if c.Service.Port != nil {
		port = *c.Service.Port
	}
	return webhookutil.ValidateWebhookService(path.Child("service"), c.Service.Name, c.Service.Namespace, c.Service.Path, port)
}

func validateVersions(path *field.Path, versions []string, lenient bool) field.ErrorList {
	if len(versions) == 0 {
		return field.ErrorList{field.Required(path, "at least one of "+strings.Join(reviewVersions, ", "))}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, version := range versions {
		if seen[version] {
			errs = append(errs, field.Invalid(path.Index(i), version, "is there twice"))
			continue
		}
		seen[version] = true
		errs = append(errs, rules.Each(path.Index(i), version, validation.IsDNS1035Label(version))...)
	}
	if !lenient && !slices.ContainsFunc(versions, knownReview) {
		errs = append(errs, field.Invalid(path, versions, "must have at least one of "+strings.Join(reviewVersions, ", ")))
	}
	return errs
}

func hookWarnings(hooks []hook) []string {
	byPath := map[*field.Path][]v1.RuleWithOperations{}
	for i, h := range hooks {
		byPath[field.NewPath("webhooks").Index(i).Child("rules")] = h.rules
	}
	return warnings(byPath)
}

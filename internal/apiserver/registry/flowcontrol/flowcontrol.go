// Package flowcontrol describes how requests share the server: FlowSchemas sort requests into priority levels, which have
// seats. It schedules nothing.
package flowcontrol

import (
	"context"
	"fmt"

	v1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/util/shufflesharding"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

const (
	defaultPrecedence       = 1000
	defaultHandSize         = 8
	defaultQueues           = 64
	defaultQueueLengthLimit = 50
	defaultShares           = 30

	maxPrecedence = 10_000
	maxQueues     = 10_000_000
)

// NewLevels describes PriorityLevelConfigurations.
func NewLevels() registry.Resource {
	type object = v1.PriorityLevelConfiguration
	return registry.SpecAndStatus(&registry.Kind[object, *object]{
		Served: v1.SchemeGroupVersion, Plural: "prioritylevelconfigurations", Singular: "prioritylevelconfiguration",
		KindName: "PriorityLevelConfiguration", ClusterScoped: true,
		NewList:  func() runtime.Object { return &v1.PriorityLevelConfigurationList{} },
		Default:  DefaultLevel,
		Validate: func(_ context.Context, l *object) field.ErrorList { return validateLevel(l) },
		ValidateUpdate: func(_ context.Context, l, old *object) field.ErrorList {
			return append(rules.MetaUpdate(l, old), validateLevel(l)...)
		},
		Columns: []registry.Column[object]{
			{Name: "Type", Description: "Whether requests are limited.", Cell: func(l *object) any { return string(l.Spec.Type) }},
			{Name: "NominalConcurrencyShares", Description: "The share of the server's seats.", Cell: func(l *object) any {
				if l.Spec.Limited == nil || l.Spec.Limited.NominalConcurrencyShares == nil {
					return "<none>"
				}
				return int64(*l.Spec.Limited.NominalConcurrencyShares)
			}},
			{Name: "Queues", Description: "The number of queues.", Cell: queuing(func(q *v1.QueuingConfiguration) int32 { return q.Queues })},
			{Name: "HandSize", Description: "How many queues a flow may use.", Cell: queuing(func(q *v1.QueuingConfiguration) int32 { return q.HandSize })},
			{Name: "QueueLengthLimit", Description: "How many requests may wait in a queue.", Cell: queuing(func(q *v1.QueuingConfiguration) int32 { return q.QueueLengthLimit })},
			registry.Age[object](),
		},
		StrictUpdate: true,
	}, func(l *object) *v1.PriorityLevelConfigurationSpec { return &l.Spec },
		func(l *object) *v1.PriorityLevelConfigurationStatus { return &l.Status },
		func(_ context.Context, l, _ *object) field.ErrorList {
			return validateConditions(l.Status.Conditions, func(c v1.PriorityLevelConfigurationCondition) string { return string(c.Type) })
		})
}

func queuing(of func(*v1.QueuingConfiguration) int32) func(*v1.PriorityLevelConfiguration) any {
	return func(l *v1.PriorityLevelConfiguration) any {
		if l.Spec.Limited == nil || l.Spec.Limited.LimitResponse.Queuing == nil {
			return "<none>"
		}
		return int64(of(l.Spec.Limited.LimitResponse.Queuing))
	}
}

func orDefault[T any](at **T, value T) {
	if *at == nil {
		*at = &value
	}
}

// DefaultLevel fills what was left out.
func DefaultLevel(l *v1.PriorityLevelConfiguration) {
	if exempt := l.Spec.Exempt; exempt != nil {
		orDefault(&exempt.NominalConcurrencyShares, 0)
		orDefault(&exempt.LendablePercent, 0)
	}
	limited := l.Spec.Limited
	if limited == nil {
		return
	}
	orDefault(&limited.NominalConcurrencyShares, defaultShares)
	orDefault(&limited.LendablePercent, 0)
	if q := limited.LimitResponse.Queuing; q != nil {
		for _, c := range []struct {
			at    *int32
			value int32
		}{{&q.HandSize, defaultHandSize}, {&q.Queues, defaultQueues}, {&q.QueueLengthLimit, defaultQueueLengthLimit}} {
			if *c.at == 0 {
				*c.at = c.value
			}
		}
	}
}

// DefaultSchema fills what was left out.
func DefaultSchema(s *v1.FlowSchema) {
	if s.Spec.MatchingPrecedence == 0 {
		s.Spec.MatchingPrecedence = defaultPrecedence
	}
}

func validateConditions[C any](list []C, typeOf func(C) string) field.ErrorList {
	var errs field.ErrorList
	path := field.NewPath("status", "conditions")
	seen := map[string]bool{}
	for i := range list {
		kind := typeOf(list[i])
		if kind == "" {
			errs = append(errs, field.Required(path.Index(i).Child("type"), "the type of the condition"))
		} else if seen[kind] {
			errs = append(errs, field.Duplicate(path.Index(i).Child("type"), kind))
		}
		seen[kind] = true
	}
	return errs
}

func validateLevel(l *v1.PriorityLevelConfiguration) field.ErrorList {
	path := field.NewPath("spec")
	errs := validateLevelSpec(path, l)
	for _, mandatory := range bootstrap.MandatoryPriorityLevelConfigurations {
		if mandatory.Name != l.Name {
			continue
		}
		want, have := mandatory.DeepCopy(), l.Spec.DeepCopy()
		DefaultLevel(want)
		if l.Name == v1.PriorityLevelConfigurationNameExempt {
			have.Exempt = want.Spec.Exempt // which an administrator may change
		}
		if !equality.Semantic.DeepEqual(*have, want.Spec) {
			errs = append(errs, field.Invalid(path, l.Name, "this level is the server's own and must stay as it is"))
		}
	}
	return errs
}

func validateLevelSpec(path *field.Path, l *v1.PriorityLevelConfiguration) field.ErrorList {
	spec := &l.Spec
	var errs field.ErrorList
	if (l.Name == v1.PriorityLevelConfigurationNameExempt) != (spec.Type == v1.PriorityLevelEnablementExempt) {
		errs = append(errs, field.Invalid(path.Child("type"), spec.Type, "the level exempt, and no other, is of type Exempt"))
	}
	switch spec.Type {
	case v1.PriorityLevelEnablementExempt:
		if spec.Limited != nil {
			errs = append(errs, field.Forbidden(path.Child("limited"), "belongs to type Limited"))
		}
		if e := spec.Exempt; e != nil {
			errs = append(errs, notNegative(path.Child("exempt", "nominalConcurrencyShares"), e.NominalConcurrencyShares)...)
			errs = append(errs, percent(path.Child("exempt", "lendablePercent"), e.LendablePercent)...)
		}
	case v1.PriorityLevelEnablementLimited:
		if spec.Exempt != nil {
			errs = append(errs, field.Forbidden(path.Child("exempt"), "belongs to type Exempt"))
		}
		if spec.Limited == nil {
			return append(errs, field.Required(path.Child("limited"), "with type Limited"))
		}
		errs = append(errs, validateLimited(path.Child("limited"), spec.Limited)...)
	default:
		errs = append(errs, rules.RequiredOneOf(path.Child("type"), spec.Type, v1.PriorityLevelEnablementExempt, v1.PriorityLevelEnablementLimited)...)
	}
	return errs
}

func notNegative(path *field.Path, n *int32) field.ErrorList {
	if n == nil || *n >= 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(path, *n, "must be 0 or more")}
}

func percent(path *field.Path, n *int32) field.ErrorList {
	if n == nil || *n >= 0 && *n <= 100 {
		return nil
	}
	return field.ErrorList{field.Invalid(path, *n, "must be from 0 to 100")}
}

func validateLimited(path *field.Path, limited *v1.LimitedPriorityLevelConfiguration) field.ErrorList {
	errs := notNegative(path.Child("nominalConcurrencyShares"), limited.NominalConcurrencyShares)
	errs = append(errs, percent(path.Child("lendablePercent"), limited.LendablePercent)...)
	errs = append(errs, notNegative(path.Child("borrowingLimitPercent"), limited.BorrowingLimitPercent)...)
	response, at := &limited.LimitResponse, path.Child("limitResponse")
	switch response.Type {
	case v1.LimitResponseTypeReject:
		if response.Queuing != nil {
			errs = append(errs, field.Forbidden(at.Child("queuing"), "belongs to type Queue"))
		}
	case v1.LimitResponseTypeQueue:
		if response.Queuing == nil {
			return append(errs, field.Required(at.Child("queuing"), "with type Queue"))
		}
		errs = append(errs, validateQueuing(at.Child("queuing"), response.Queuing)...)
	default:
		errs = append(errs, rules.RequiredOneOf(at.Child("type"), response.Type, v1.LimitResponseTypeQueue, v1.LimitResponseTypeReject)...)
	}
	return errs
}

func validateQueuing(path *field.Path, q *v1.QueuingConfiguration) field.ErrorList {
	var errs field.ErrorList
	const positive = "must be 1 or more"
	if q.QueueLengthLimit <= 0 {
		errs = append(errs, field.Invalid(path.Child("queueLengthLimit"), q.QueueLengthLimit, positive))
	}
	if q.Queues <= 0 {
		errs = append(errs, field.Invalid(path.Child("queues"), q.Queues, positive))
	} else if q.Queues > maxQueues {
		errs = append(errs, field.Invalid(path.Child("queues"), q.Queues, fmt.Sprintf("must be %d at most", maxQueues)))
	}
	at := path.Child("handSize")
	switch {
	case q.HandSize <= 0:
		errs = append(errs, field.Invalid(at, q.HandSize, positive))
	case q.HandSize > q.Queues:
		errs = append(errs, field.Invalid(at, q.HandSize, fmt.Sprintf("must be the number of queues (%d) at most", q.Queues)))
	case shufflesharding.RequiredEntropyBits(int(q.Queues), int(q.HandSize)) > shufflesharding.MaxHashBits:
		errs = append(errs, field.Invalid(at, q.HandSize, fmt.Sprintf("is too large to deal from %d queues with a hash of %d bits", q.Queues, shufflesharding.MaxHashBits)))
	}
	return errs
}

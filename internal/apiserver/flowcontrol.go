package apiserver

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	genericserver "k8s.io/apiserver/pkg/server"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"

	"portal/internal/apiserver/registry/flowcontrol"
	"portal/internal/ensure"
)

// seatsPerCPU is how many requests are executed at a time for each CPU, of those that are not exempt. Kubernetes executes 600 on
// whatever machine. Levels borrow seats from each other only after ten seconds, and ordinary users' level has a twelfth of
// them: with 64, one user's clients find enough at once.
const seatsPerCPU = 64

func (s *Server) cpus() int { return cmp.Or(s.opts.CPUs, runtime.GOMAXPROCS(0)) }

// seats are how many requests are executed at a time.
func (s *Server) seats() int {
	return min(seatsPerCPU*s.cpus(), s.opts.MaxInFlight+s.opts.MaxMutatingInFlight)
}

// shareFairly has the requests of a user take turns, and all requests wait for seats at the priority that FlowSchemas give them.
func (s *Server) shareFairly(config *genericserver.Config) {
	if !s.opts.PriorityAndFairness {
		return
	}
	s.turns = newTurns(s.cpus())
	s.turns.waited = s.load.waited
	config.FlowControl = inTurns{utilflowcontrol.New(s.factory, s.client.FlowcontrolV1(), s.seats()), s.turns}
}

// flowControlDefaults are Kubernetes' priority levels and FlowSchemas. Those that the server needs are kept as they are; the
// others follow the library's version as long as nobody has changed them.
func (s *Server) flowControlDefaults() []ensure.Object {
	v1 := s.client.FlowcontrolV1()
	cached := metav1.ListOptions{ResourceVersion: "0"}
	levels := keeper[flowcontrolv1.PriorityLevelConfiguration, *flowcontrolv1.PriorityLevelConfiguration]{
		client: v1.PriorityLevelConfigurations(), complete: flowcontrol.DefaultLevel,
		adopt: func(have, want *flowcontrolv1.PriorityLevelConfiguration) bool {
			spec := want.Spec
			if want.Name == flowcontrolv1.PriorityLevelConfigurationNameExempt {
				spec.Exempt = have.Spec.Exempt // an administrator's to choose
			}
			changed := !equality.Semantic.DeepEqual(have.Spec, spec)
			have.Spec = spec
			return changed
		},
	}
	schemas := keeper[flowcontrolv1.FlowSchema, *flowcontrolv1.FlowSchema]{
		client: v1.FlowSchemas(), complete: flowcontrol.DefaultSchema,
		adopt: func(have, want *flowcontrolv1.FlowSchema) bool {
			changed := !equality.Semantic.DeepEqual(have.Spec, want.Spec)
			have.Spec = want.Spec
			return changed
		},
	}
	return []ensure.Object{{
		Name: "priority levels",
		Ensure: func(ctx context.Context) error {
			have, err := v1.PriorityLevelConfigurations().List(ctx, cached)
			if err != nil {
				return err
			}
			return errors.Join(levels.ensure(ctx, have.Items, bootstrap.SuggestedPriorityLevelConfigurations, false),
				levels.ensure(ctx, have.Items, bootstrap.MandatoryPriorityLevelConfigurations, true))
		},
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return v1.PriorityLevelConfigurations().Watch(ctx, metav1.ListOptions{})
		},
	}, {
		Name: "flow schemas",
		Ensure: func(ctx context.Context) error {
			have, err := v1.FlowSchemas().List(ctx, cached)
			if err != nil {
				return err
			}
			return errors.Join(schemas.ensure(ctx, have.Items, slices.Concat(bootstrap.SuggestedFlowSchemas, ownSchemas()), false),
				schemas.ensure(ctx, have.Items, bootstrap.MandatoryFlowSchemas, true))
		},
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return v1.FlowSchemas().Watch(ctx, metav1.ListOptions{})
		},
	}}
}

// ownSchemas are for Portal's parts: those in this process are exempt, proxies and DNS servers come with the other nodes' traffic.
func ownSchemas() []*flowcontrolv1.FlowSchema {
	var inside, nodes []flowcontrolv1.Subject
	for _, name := range insideUsers {
		inside = append(inside, flowcontrolv1.Subject{Kind: flowcontrolv1.SubjectKindUser, User: &flowcontrolv1.UserSubject{Name: name}})
	}
	for _, name := range []string{"system:portal:proxies", "system:portal:dns", "system:portal:lb"} {
		nodes = append(nodes, flowcontrolv1.Subject{Kind: flowcontrolv1.SubjectKindGroup, Group: &flowcontrolv1.GroupSubject{Name: name}})
	}
	made := func(name, level string, precedence int32, subjects []flowcontrolv1.Subject) *flowcontrolv1.FlowSchema {
		return &flowcontrolv1.FlowSchema{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: flowcontrolv1.FlowSchemaSpec{
			MatchingPrecedence:         precedence,
			PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: level},
			DistinguisherMethod:        &flowcontrolv1.FlowDistinguisherMethod{Type: flowcontrolv1.FlowDistinguisherMethodByUserType},
			Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
				Subjects: subjects,
				ResourceRules: []flowcontrolv1.ResourcePolicyRule{{
					Verbs: all, APIGroups: all, Resources: all, Namespaces: all, ClusterScope: true,
				}},
				NonResourceRules: []flowcontrolv1.NonResourcePolicyRule{{Verbs: all, NonResourceURLs: all}},
			}},
		}}
	}
	return []*flowcontrolv1.FlowSchema{
		made("portal-server", flowcontrolv1.PriorityLevelConfigurationNameExempt, 3, inside),
		made("portal-nodes", "system", 510, nodes),
	}
}

// all stands for every value in a FlowSchema.
var all = []string{"*"}

// keeper keeps objects of one kind.
type keeper[T any, P interface {
	*T
	metav1.Object
	DeepCopy() P
}] struct {
	client interface {
		Create(context.Context, P, metav1.CreateOptions) (P, error)
		Update(context.Context, P, metav1.UpdateOptions) (P, error)
	}
	// complete sets defaults; adopt gives an object the spec that it should have, and says whether that changes it.
	complete func(P)
	adopt    func(have, want P) bool
}

func (k keeper[T, P]) ensure(ctx context.Context, have []T, wanted []P, mandatory bool) (err error) {
	for _, w := range wanted {
		want := w.DeepCopy()
		k.complete(want)
		at := slices.IndexFunc(have, func(h T) bool { return P(&h).GetName() == want.GetName() })
		var failed error
		switch {
		case at < 0:
			want.SetAnnotations(map[string]string{flowcontrolv1.AutoUpdateAnnotationKey: "true"})
			_, failed = k.client.Create(ctx, want, metav1.CreateOptions{})
		case followed(P(&have[at]), mandatory) && k.adopt(&have[at], want):
			_, failed = k.client.Update(ctx, &have[at], metav1.UpdateOptions{})
		}
		if !apierrors.IsAlreadyExists(failed) && !apierrors.IsConflict(failed) { // another server is doing the same
			err = errors.Join(err, failed)
		}
	}
	return err
}

// followed says whether the server keeps an object's spec: of mandatory ones always, of others while they are as the server made
// them, or if an annotation says so.
func followed(obj metav1.Object, mandatory bool) bool {
	switch obj.GetAnnotations()[flowcontrolv1.AutoUpdateAnnotationKey] {
	case "true":
		return true
	case "false":
		return mandatory
	}
	return mandatory || obj.GetGeneration() == 1
}

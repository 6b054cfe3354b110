package accessreview

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

// gate lets joe and group devs in, turns mallory away, and has no opinion on others. It remembers what it was asked.
type gate struct{ asked authorizer.AttributesRecord }

func (g *gate) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	g.asked = a.(authorizer.AttributesRecord)
	who := a.GetUser()
	switch {
	case who.GetName() == "joe" || slices.Contains(who.GetGroups(), "devs"):
		return authorizer.DecisionAllow, "the user is known", nil
	case who.GetName() == "mallory":
		return authorizer.DecisionDeny, "", errors.New("trouble")
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func (g *gate) RulesFor(_ context.Context, _ user.Info, ns string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	return []authorizer.ResourceRuleInfo{&authorizer.DefaultResourceRuleInfo{Verbs: []string{"get"}, Resources: []string{ns}}},
		[]authorizer.NonResourceRuleInfo{&authorizer.DefaultNonResourceRuleInfo{Verbs: []string{"get"}, NonResourceURLs: []string{"/x"}}},
		true, errors.New("half of it")
}

func create(t *testing.T, r registry.Resource, who, ns string, obj runtime.Object) (runtime.Object, error) {
	t.Helper()
	storage, err := r.Storage(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx := request.WithNamespace(t.Context(), ns)
	if who != "" {
		ctx = request.WithUser(ctx, &user.DefaultInfo{Name: who})
	}
	return storage[r.Name()].(rest.Creater).Create(ctx, obj, nil, nil)
}

func causesOf(err error) []string {
	var status *apierrors.StatusError
	if !errors.As(err, &status) || status.ErrStatus.Code != 422 {
		return []string{"not a refusal"}
	}
	var out []string
	for _, c := range status.ErrStatus.Details.Causes {
		out = append(out, c.Field+" "+string(c.Type))
	}
	return out
}

var get = authorizationv1.ResourceAttributes{Verb: "get", Resource: "services", Namespace: "ns"}

func TestSelf(t *testing.T) {
	for _, c := range []struct {
		who             string
		allowed, denied bool
		reason, trouble string
	}{
		{"joe", true, false, "the user is known", ""}, {"ann", false, false, "", ""}, {"mallory", false, true, "", "trouble"},
	} {
		g := &gate{}
		got, err := create(t, New(g), c.who, "", &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &get},
		})
		if err != nil {
			t.Fatal(err)
		}
		status := got.(*authorizationv1.SelfSubjectAccessReview).Status
		want := authorizationv1.SubjectAccessReviewStatus{Allowed: c.allowed, Denied: c.denied, Reason: c.reason, EvaluationError: c.trouble}
		if status != want {
			t.Errorf("%s: answered %+v, want %+v", c.who, status, want)
		}
		if g.asked.Verb != "get" || g.asked.Resource != "services" || g.asked.APIVersion != "*" || !g.asked.ResourceRequest {
			t.Errorf("the authorizer was asked %+v", g.asked)
		}
	}
	if _, err := create(t, New(&gate{}), "", "", &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &get},
	}); !apierrors.IsBadRequest(err) {
		t.Errorf("without a user: %v", err)
	}
}

func TestNonResource(t *testing.T) {
	g := &gate{}
	if _, err := create(t, New(g), "joe", "", &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: "/metrics", Verb: "get"},
	}}); err != nil {
		t.Fatal(err)
	}
	if g.asked.ResourceRequest || g.asked.Path != "/metrics" || g.asked.Verb != "get" {
		t.Errorf("the authorizer was asked %+v", g.asked)
	}
}

func TestRefusals(t *testing.T) {
	both := authorizationv1.SubjectAccessReviewSpec{ResourceAttributes: &get, NonResourceAttributes: &authorizationv1.NonResourceAttributes{}}
	withSelectors := func(f *authorizationv1.FieldSelectorAttributes, l *authorizationv1.LabelSelectorAttributes) *authorizationv1.SelfSubjectAccessReview {
		a := get
		a.FieldSelector, a.LabelSelector = f, l
		return &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &a}}
	}
	for _, c := range []struct {
		name     string
		resource registry.Resource
		obj      runtime.Object
		want     []string
	}{
		{"self, nothing", New(&gate{}), &authorizationv1.SelfSubjectAccessReview{}, []string{"spec FieldValueInvalid"}},
		{"self, named", New(&gate{}), &authorizationv1.SelfSubjectAccessReview{
			ObjectMeta: metav1.ObjectMeta{Name: "x"}, Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &get},
		}, []string{"metadata FieldValueInvalid"}},
		{
			"empty selectors", New(&gate{}), withSelectors(&authorizationv1.FieldSelectorAttributes{}, &authorizationv1.LabelSelectorAttributes{}),
			[]string{
				"spec.resourceAttributes.fieldSelector.requirements FieldValueRequired",
				"spec.resourceAttributes.labelSelector.requirements FieldValueRequired",
			},
		},
		{"selectors in both forms", New(&gate{}), withSelectors(
			&authorizationv1.FieldSelectorAttributes{RawSelector: "a=b", Requirements: []metav1.FieldSelectorRequirement{{Key: "a", Operator: "Exists"}}},
			&authorizationv1.LabelSelectorAttributes{RawSelector: "a=b", Requirements: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "In"}}},
		), []string{
			"spec.resourceAttributes.fieldSelector.rawSelector FieldValueInvalid",
			"spec.resourceAttributes.labelSelector.rawSelector FieldValueInvalid",
			"spec.resourceAttributes.labelSelector.requirements[0].values FieldValueRequired",
		}},
		{"subject, nobody", NewSubject(&gate{}), &authorizationv1.SubjectAccessReview{Spec: both}, []string{
			"spec FieldValueInvalid", "spec.user FieldValueInvalid",
		}},
		{"local, elsewhere", NewLocal(&gate{}), &authorizationv1.LocalSubjectAccessReview{
			ObjectMeta: metav1.ObjectMeta{Namespace: "other"},
			Spec:       authorizationv1.SubjectAccessReviewSpec{User: "joe", ResourceAttributes: &get},
		}, []string{"spec.resourceAttributes.namespace FieldValueInvalid"}},
		{"local, no resource", NewLocal(&gate{}), &authorizationv1.LocalSubjectAccessReview{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns"},
			Spec:       authorizationv1.SubjectAccessReviewSpec{User: "joe", NonResourceAttributes: &authorizationv1.NonResourceAttributes{}},
		}, []string{"spec.nonResourceAttributes FieldValueInvalid"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := create(t, c.resource, "joe", "ns", c.obj)
			if got := causesOf(err); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q (%v), want %q", got, err, c.want)
			}
		})
	}
}

func TestSubjectAndLocal(t *testing.T) {
	spec := authorizationv1.SubjectAccessReviewSpec{
		User: "ann", Groups: []string{"devs"}, UID: "7", Extra: map[string]authorizationv1.ExtraValue{"a": {"b"}}, ResourceAttributes: &get,
	}
	g := &gate{}
	subject, err := create(t, NewSubject(g), "joe", "", &authorizationv1.SubjectAccessReview{Spec: spec})
	if err != nil || !subject.(*authorizationv1.SubjectAccessReview).Status.Allowed {
		t.Errorf("answered %+v (%v)", subject, err)
	}
	if who := g.asked.User; who.GetName() != "ann" || who.GetUID() != "7" || !slices.Equal(who.GetExtra()["a"], []string{"b"}) {
		t.Errorf("the authorizer was asked about %+v", who)
	}
	here := &authorizationv1.LocalSubjectAccessReview{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}, Spec: spec}
	local, err := create(t, NewLocal(g), "joe", "ns", here)
	if err != nil || !local.(*authorizationv1.LocalSubjectAccessReview).Status.Allowed {
		t.Errorf("answered %+v (%v)", local, err)
	}
	if _, err := create(t, NewLocal(g), "joe", "other", here); !apierrors.IsBadRequest(err) {
		t.Errorf("asked in another namespace: %v", err)
	}
}

func TestSelectors(t *testing.T) {
	type labelReq = metav1.LabelSelectorRequirement
	type fieldReq = metav1.FieldSelectorRequirement
	for _, c := range []struct {
		name           string
		labels         *authorizationv1.LabelSelectorAttributes
		fields         *authorizationv1.FieldSelectorAttributes
		asked, trouble string
	}{
		{"raw", &authorizationv1.LabelSelectorAttributes{RawSelector: "a=b"}, &authorizationv1.FieldSelectorAttributes{RawSelector: "c!=d"}, "a=b c!=d", ""},
		{
			"requirements",
			&authorizationv1.LabelSelectorAttributes{Requirements: []labelReq{{Key: "a", Operator: "Exists"}}},
			&authorizationv1.FieldSelectorAttributes{Requirements: []fieldReq{{Key: "c", Operator: "NotIn", Values: []string{"d"}}}},
			"a c!=d", "",
		},
		{
			"in part",
			&authorizationv1.LabelSelectorAttributes{Requirements: []labelReq{{Key: "a", Operator: "Exists"}, {Key: "x", Operator: "Like"}}},
			&authorizationv1.FieldSelectorAttributes{Requirements: []fieldReq{{Key: "c", Operator: "In", Values: []string{"d"}}, {Key: "x", Operator: "Exists"}}},
			"a c=d", "spec.resourceAttributes.fieldSelector was not wholly understood; the rest was left out; " +
				"spec.resourceAttributes.labelSelector was not wholly understood; the rest was left out",
		},
		{
			"not at all",
			&authorizationv1.LabelSelectorAttributes{RawSelector: "((("},
			&authorizationv1.FieldSelectorAttributes{Requirements: []fieldReq{{Key: "c", Operator: "In", Values: []string{"d", "e"}}}},
			" ", "spec.resourceAttributes.fieldSelector was not understood and was left out; " +
				"spec.resourceAttributes.labelSelector was not understood and was left out",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := get
			a.LabelSelector, a.FieldSelector = c.labels, c.fields
			what := attributes(&user.DefaultInfo{Name: "joe"}, &a, nil)
			var asked []string
			for _, r := range what.LabelSelectorRequirements {
				asked = append(asked, r.String())
			}
			text := strings.Join(asked, ",") + " "
			for _, r := range what.FieldSelectorRequirements {
				text += r.Field + string(r.Operator) + r.Value
			}
			if text != c.asked || troubles(nil, what) != c.trouble {
				t.Errorf("asked %q with %q; want %q with %q", text, troubles(nil, what), c.asked, c.trouble)
			}
		})
	}
}

func TestRules(t *testing.T) {
	got, err := create(t, NewRules(&gate{}), "joe", "", &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "ns"},
	})
	if err != nil {
		t.Fatal(err)
	}
	s := got.(*authorizationv1.SelfSubjectRulesReview).Status
	if len(s.ResourceRules) != 1 || s.ResourceRules[0].Resources[0] != "ns" || s.NonResourceRules[0].NonResourceURLs[0] != "/x" || !s.Incomplete || s.EvaluationError != "half of it" {
		t.Errorf("answered %+v", s)
	}
	if _, err := create(t, NewRules(&gate{}), "joe", "", &authorizationv1.SelfSubjectRulesReview{}); !apierrors.IsBadRequest(err) {
		t.Errorf("without a namespace: %v", err)
	}
}

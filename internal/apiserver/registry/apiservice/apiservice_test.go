package apiservice

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

func of(name string, change func(*apiregistrationv1.APIServiceSpec)) *apiService {
	s := &apiService{
		ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "1"},
		Spec: apiregistrationv1.APIServiceSpec{
			Group: "toys.example.com", Version: "v1", GroupPriorityMinimum: 100, VersionPriority: 10,
			Service: &apiregistrationv1.ServiceReference{Namespace: "shop", Name: "toys", Port: ptr.To[int32](443)},
		},
	}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), apiregistrationv1.AddToScheme)
	for name, c := range map[string]struct {
		name   string
		change func(*apiregistrationv1.APIServiceSpec)
		want   []string
	}{
		"of a Service":        {"v1.toys.example.com", nil, nil},
		"local":               {"v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) { s.Service = nil }, nil},
		"the core API":        {"v1.", func(s *apiregistrationv1.APIServiceSpec) { s.Group, s.Service = "", nil }, nil},
		"another name":        {"toys", nil, []string{"metadata.name FieldValueInvalid"}},
		"no group":            {"v2.", func(s *apiregistrationv1.APIServiceSpec) { s.Group, s.Version = "", "v2" }, []string{"spec.group FieldValueRequired"}},
		"a strange group":     {"v1.Toys", func(s *apiregistrationv1.APIServiceSpec) { s.Group = "Toys" }, []string{"spec.group FieldValueInvalid"}},
		"a strange version":   {"1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) { s.Version = "1" }, []string{"spec.version FieldValueInvalid"}},
		"no priorities":       {"v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) { s.GroupPriorityMinimum, s.VersionPriority = 0, 0 }, []string{"spec.groupPriorityMinimum FieldValueInvalid", "spec.versionPriority FieldValueInvalid"}},
		"too high priorities": {"v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) { s.GroupPriorityMinimum, s.VersionPriority = 20001, 1001 }, []string{"spec.groupPriorityMinimum FieldValueInvalid", "spec.versionPriority FieldValueInvalid"}},
		"local with TLS": {"v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) {
			s.Service, s.CABundle, s.InsecureSkipTLSVerify = nil, []byte("x"), true
		}, []string{"spec.caBundle FieldValueInvalid", "spec.insecureSkipTLSVerify FieldValueInvalid"}},
		"no Service": {"v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) {
			s.Service = &apiregistrationv1.ServiceReference{Port: ptr.To[int32](0)}
		}, []string{"spec.service.name FieldValueRequired", "spec.service.namespace FieldValueRequired", "spec.service.port FieldValueInvalid"}},
		"verified and not": {"v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) { s.CABundle, s.InsecureSkipTLSVerify = []byte("x"), true },
			[]string{"spec.insecureSkipTLSVerify FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := of(c.name, c.change)
			s.Status.Conditions = []apiregistrationv1.APIServiceCondition{{Type: apiregistrationv1.Available, Status: "Mine"}}
			got := rules.Create(t, s)
			slices.Sort(got)
			if !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
			if local := s.Spec.Service == nil; local != (len(s.Status.Conditions) == 1) || local && s.Status.Conditions[0].Reason != "Local" {
				t.Errorf("the status is %v", s.Status)
			}
		})
	}
	if got := rules.Update(t, of("v1.toys.example.com", func(s *apiregistrationv1.APIServiceSpec) { s.VersionPriority = 20 }), of("v1.toys.example.com", nil)); len(got) > 0 {
		t.Errorf("an update is refused for %q", got)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), apiregistrationv1.AddToScheme)
	s := of("v1.toys.example.com", nil)
	row := func() [2]any { r := rules.Row(t, s); return [2]any{r["Service"], r["Available"]} }
	if got := row(); got != [2]any{"shop/toys", "Unknown"} {
		t.Errorf("new: %v", got)
	}
	s.Status.Conditions = []apiregistrationv1.APIServiceCondition{{Type: apiregistrationv1.Available, Status: apiregistrationv1.ConditionFalse, Reason: "ServiceNotFound"}}
	if got := row(); got != [2]any{"shop/toys", "False (ServiceNotFound)"} {
		t.Errorf("away: %v", got)
	}
	s.Spec.Service, s.Status.Conditions[0] = nil, Local()
	if got := row(); got != [2]any{"Local", "True"} {
		t.Errorf("local: %v", got)
	}
}

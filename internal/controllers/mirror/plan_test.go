package mirror

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func subset(port int32, ips ...string) corev1.EndpointSubset {
	s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Port: port, Protocol: corev1.ProtocolTCP}}}
	for _, ip := range ips {
		s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
	}
	return s
}

func endpoints(subsets ...corev1.EndpointSubset) *corev1.Endpoints {
	return &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", UID: "u1", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{
			"c": "d", corev1.LastAppliedConfigAnnotation: "{}", corev1.EndpointsLastChangeTriggerTime: "now",
		}},
		Subsets: subsets,
	}
}

func briefly(list []*discovery.EndpointSlice) []string {
	var out []string
	for _, s := range list {
		text := fmt.Sprintf("%s %d:", s.AddressType, deref(s.Ports[0].Port))
		for _, e := range s.Endpoints {
			text += fmt.Sprintf(" %s/%t", e.Addresses[0], *e.Conditions.Ready)
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return out
}

func TestCopy(t *testing.T) {
	both := subset(80, "10.0.0.1", "fd00::1")
	both.NotReadyAddresses = []corev1.EndpointAddress{{IP: "10.0.0.2"}}
	for _, c := range []struct {
		name    string
		in      *corev1.Endpoints
		limit   int
		want    []string
		skipped skips
	}{
		{"nothing", endpoints(), 10, nil, skips{}},
		{"both families and not ready", endpoints(both), 10, []string{"IPv4 80: 10.0.0.1/true 10.0.0.2/false", "IPv6 80: fd00::1/true"}, skips{}},
		{"subsets of the same port", endpoints(subset(80, "10.0.0.2"), subset(80, "10.0.0.1")), 10, []string{"IPv4 80: 10.0.0.1/true 10.0.0.2/true"}, skips{}},
		{"two ports", endpoints(subset(80, "10.0.0.1"), subset(81, "10.0.0.2")), 10, []string{"IPv4 80: 10.0.0.1/true", "IPv4 81: 10.0.0.2/true"}, skips{}},
		// No slice may have both, since they are of one name.
		{"two unnamed ports of one address", endpoints(subset(80, "10.0.0.1"), subset(81, "10.0.0.1")), 10, []string{"IPv4 80: 10.0.0.1/true", "IPv4 81: 10.0.0.1/true"}, skips{}},
		{"too many, over both families", endpoints(both), 2, []string{"IPv4 80: 10.0.0.1/true", "IPv6 80: fd00::1/true"}, skips{tooMany: 1}},
		{"no address", endpoints(subset(80, "localhost", "10.0.0.1")), 1, []string{"IPv4 80: 10.0.0.1/true"}, skips{invalid: 1}},
		{"an unusual spelling", endpoints(subset(80, "10.0.0.001")), 1, []string{"IPv4 80: 10.0.0.1/true"}, skips{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, skipped := copyOf(c.in, c.limit)
			if diff := cmp.Diff(c.want, briefly(got)); diff != "" {
				t.Error(diff)
			}
			if skipped != c.skipped {
				t.Errorf("skipped %+v, want %+v", skipped, c.skipped)
			}
		})
	}
	got, _ := copyOf(endpoints(subset(80, "10.0.0.1")), 10)
	if diff := cmp.Diff(map[string]string{"c": "d"}, got[0].Annotations); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{"a": "b", discovery.LabelServiceName: "s", discovery.LabelManagedBy: Name}, got[0].Labels); diff != "" {
		t.Error(diff)
	}
	if owner := got[0].OwnerReferences[0]; owner.Kind != "Endpoints" || owner.UID != "u1" {
		t.Errorf("owned by %v", owner)
	}
}

// stored is what the API server would make of slices: it names them.
func stored(list []*discovery.EndpointSlice) []*discovery.EndpointSlice {
	var out []*discovery.EndpointSlice
	for i, s := range list {
		s = s.DeepCopy()
		s.Name, s.ResourceVersion = fmt.Sprintf("s-%d", i), fmt.Sprint(i+1)
		slices.Reverse(s.Endpoints)
		out = append(out, s)
	}
	return out
}

func TestPlan(t *testing.T) {
	was := endpoints(subset(80, "10.0.0.1", "10.0.0.2", "fd00::1"))
	recreated := endpoints(was.Subsets...)
	recreated.UID = "u2"
	relabelled := endpoints(was.Subsets...)
	relabelled.Labels = map[string]string{"a": "c"}
	for _, c := range []struct {
		name                   string
		now                    *corev1.Endpoints
		create, update, delete int
	}{
		{"nothing changed", was, 0, 0, 0},
		{"an address", endpoints(subset(80, "10.0.0.1", "10.0.0.3", "fd00::1")), 0, 1, 0},
		{"a port: the slices are used again", endpoints(subset(81, "10.0.0.1", "10.0.0.2", "fd00::1")), 0, 2, 0},
		{"a port more", endpoints(was.Subsets[0], subset(81, "10.0.0.9")), 1, 0, 0},
		{"a family less", endpoints(subset(80, "10.0.0.1", "10.0.0.2")), 0, 0, 1},
		{"all", endpoints(), 0, 0, 2},
		{"another object of the name", recreated, 0, 2, 0},
		{"a label", relabelled, 0, 2, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, _ := copyOf(was, 100)
			want, _ := copyOf(c.now, 100)
			existing := stored(before)
			got := plan(want, existing)
			if len(got.create) != c.create || len(got.update) != c.update || len(got.delete) != c.delete {
				t.Fatalf("%d, %d and %d writes, want %d, %d and %d", len(got.create), len(got.update), len(got.delete), c.create, c.update, c.delete)
			}
			for _, s := range got.update {
				if s.Name == "" || s.ResourceVersion == "" {
					t.Errorf("an update of nothing in particular: %v", s)
				}
			}
			if diff := cmp.Diff(briefly(want), briefly(after(existing, got))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func after(existing []*discovery.EndpointSlice, c changes) []*discovery.EndpointSlice {
	out := slices.Clone(c.create)
	for _, s := range existing {
		named := func(o *discovery.EndpointSlice) bool { return o.Name == s.Name }
		if i := slices.IndexFunc(c.update, named); i >= 0 {
			out = append(out, c.update[i])
		} else if !slices.ContainsFunc(c.delete, named) {
			s = s.DeepCopy()
			slices.SortFunc(s.Endpoints, compareEndpoints)
			out = append(out, s)
		}
	}
	return out
}

func TestDuplicatesOfASliceGo(t *testing.T) {
	want, _ := copyOf(endpoints(subset(80, "10.0.0.1")), 100)
	twice := stored([]*discovery.EndpointSlice{want[0], want[0]})
	if got := plan(want, twice); len(got.delete) != 1 || got.len() != 1 {
		t.Errorf("%+v", got)
	}
}

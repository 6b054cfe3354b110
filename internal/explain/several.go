package explain

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// AskServices answers what is wrong with several Services, each as Ask does, with one run of the checks. Those of single Services look at
// these alone, and at what is folded into findings that they share with others: in a large cluster that is a small part of the work.
func AskServices(v *View, all []Key) []Answer {
	found := v.run(nil, false)
	v.limitTo(all, found)
	list := v.conclude(v.run(found, true))
	v.subjects = v.order
	out := make([]Answer, 0, len(all))
	for _, k := range all {
		a := &asking{View: v, question: Question{Kind: "service", Namespace: k.Namespace, Name: k.Name}, all: list, taken: map[int]bool{}}
		a.service(k)
		out = append(out, a.answer())
	}
	return out
}

// limitTo makes subjects of the Services that somebody asks about, and of those that these are aliases of. A finding that others are folded
// into is as severe as the worst of them: the Services that it affects are subjects too.
func (v *View) limitTo(all []Key, found [][]Finding) {
	wanted := map[*Service]bool{}
	for _, k := range all {
		for s := v.services[k]; s != nil && !wanted[s]; s = v.aliasOf(s) {
			wanted[s] = true
		}
	}
	for i := range found {
		for j := range found[i] {
			if f := &found[i][j]; len(consequences[f.Code]) > 0 {
				for _, r := range f.refs() {
					if s := v.services[Key{r.Namespace, r.Name}]; r.Kind == "Service" && s != nil {
						wanted[s] = true
					}
				}
			}
		}
	}
	// In the order in which they are listed: what is found is sorted, and stays so among equals.
	v.subjects = nil
	for _, s := range v.order {
		if wanted[s] {
			v.subjects = append(v.subjects, s)
		}
	}
}

// aliasOf is the Service of this cluster that another one's externalName leads to, or nil.
func (v *View) aliasOf(s *Service) *Service {
	k, ok := v.inCluster(strings.TrimSuffix(s.Spec.ExternalName, "."))
	if s.Spec.Type != corev1.ServiceTypeExternalName || !ok {
		return nil
	}
	return v.services[k]
}

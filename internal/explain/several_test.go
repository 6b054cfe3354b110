package explain

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestSeveral: in every world of the catalogue, questions about several Services are answered as questions about each are, alone or
// together, whatever is wrong with the Services beside them and with what all of them share.
func TestSeveral(t *testing.T) {
	for _, f := range slices.Concat(faults, further, siblings) {
		for _, shared := range []string{"", "a lost node", "no controllers", "a namespace that ends"} {
			t.Run(f.name+", "+shared, func(t *testing.T) {
				w := newWorld(t)
				w.neighbours()
				f.wrong(w)
				w.sharedFault(shared)
				var all []Key
				for i := range w.Services {
					all = append(all, Key{w.Services[i].Namespace, w.Services[i].Name})
				}
				all = append(all, Key{"shop", "wbe"}) // there is none
				v := Look(w.Evidence)
				together := AskServices(v, all)
				for i, k := range all {
					want, err := Ask(v, Question{"service", k.Namespace, k.Name})
					if err != nil {
						t.Fatal(err)
					}
					for how, got := range map[string]Answer{"alone": AskServices(v, []Key{k})[0], "with the others": together[i]} {
						if !reflect.DeepEqual(got, want) {
							t.Errorf("%v, asked about %s:\n%s\nwant\n%s", k, how, asText(t, got), asText(t, want))
						}
					}
				}
			})
		}
	}
}

// neighbours are Services in all sorts of trouble.
func (w *world) neighbours() {
	w.behind(w.service("shop", "typo", map[string]string{"app": "neighbuor"}, 80))
	for i, name := range []string{"neighbour-1", "neighbour-2"} {
		w.pod("shop", name, map[string]string{"app": "neighbour"})
		w.Pods[len(w.Pods)-1].Spec.NodeName = nodeNames[i]
	}
	n := len(w.Pods)
	w.behind(w.service("shop", "neighbour", map[string]string{"app": "neighbour"}, 80), &w.Pods[n-2], &w.Pods[n-1])
	unready := w.pod("shop", "unready-1", map[string]string{"app": "unready"})
	unready.Spec.NodeName = nodeNames[0]
	unready.Status.Conditions[0].Status = corev1.ConditionFalse
	w.behind(w.service("shop", "unready", map[string]string{"app": "unready"}, 80), unready)
	w.slice(w.service("default", "by-hand", nil, 80), "192.0.2.77")
	w.service("default", "nobody", nil, 80)
	alias := w.service("default", "alias", nil, 80)
	alias.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "unready.shop.svc.cluster.local"}
	// An address that is another Service's.
	thief := w.service("default", "thief", nil, 80)
	thief.Spec.ExternalIPs = []string{w.Services[1].Spec.ClusterIP}
}

// sharedFault is one that several Services suffer from: what else is wrong with any of them is folded into it.
func (w *world) sharedFault(what string) {
	switch what {
	case "a lost node":
		w.Nodes[0].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Message: "gone"}}
	case "no controllers":
		w.Slices = slices.DeleteFunc(w.Slices, func(s discoveryv1.EndpointSlice) bool {
			return s.Labels[discoveryv1.LabelManagedBy] == sliceController && s.Namespace == "shop"
		})
	case "a namespace that ends":
		for i := range w.Namespaces {
			if w.Namespaces[i].Name == "shop" {
				at := metav1.NewTime(now.Add(-time.Hour))
				w.Namespaces[i].DeletionTimestamp = &at
			}
		}
	}
}

func asText(t *testing.T, a Answer) string {
	t.Helper()
	data, err := json.MarshalIndent(a, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestSeveralLooksAtFew: of 600 Services, checks of single ones look at those that were asked about, and at those that share a fault with others.
func TestSeveralLooksAtFew(t *testing.T) {
	w := newWorld(t)
	for i := range 600 {
		p := w.pod("shop", fmt.Sprintf("p%d", i), map[string]string{"app": fmt.Sprint(i)})
		w.behind(w.service("shop", fmt.Sprintf("s%d", i), map[string]string{"app": fmt.Sprint(i)}, 80), p)
	}
	asked := []Key{{"shop", "s1"}, {"shop", "s7"}}
	v := Look(w.Evidence)
	v.limitTo(asked, v.run(nil, false))
	if len(v.subjects) != len(asked) {
		t.Errorf("%d Services are looked at for %d", len(v.subjects), len(asked))
	}
	w.sharedFault("a lost node")
	v = Look(w.Evidence)
	v.limitTo(asked, v.run(nil, false))
	on := 0
	for _, s := range v.order {
		if slices.ContainsFunc(s.Pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == nodeNames[0] }) {
			on++
		}
	}
	if got := len(v.subjects); on < 150 || got < on || got > on+len(asked) {
		t.Errorf("%d Services are looked at; %d are on the lost node, and 2 were asked about", got, on)
	}
}

package node

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

func rulesOf(t testing.TB) *registrytest.Rules {
	return registrytest.For(t, New(), corev1.AddToScheme)
}

// node is a sound one, changed.
func node(change func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n"},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.1.0.0/24"}, ProviderID: "x://1"},
	}
	if change != nil {
		change(n)
	}
	return n
}

func TestDefaults(t *testing.T) {
	for name, c := range map[string]struct {
		one  string
		many []string
		want []string
	}{
		"none":     {},
		"one":      {"10.1.0.0/24", nil, []string{"10.1.0.0/24"}},
		"many":     {"", []string{"10.1.0.0/24", "fd00::/64"}, []string{"10.1.0.0/24", "fd00::/64"}},
		"both":     {"10.1.0.0/24", []string{"10.1.0.0/24", "fd00::/64"}, []string{"10.1.0.0/24", "fd00::/64"}},
		"disagree": {"10.2.0.0/24", []string{"10.1.0.0/24", "fd00::/64"}, []string{"10.2.0.0/24"}},
	} {
		n := node(func(n *corev1.Node) { n.Spec.PodCIDR, n.Spec.PodCIDRs = c.one, c.many })
		setDefaults(n)
		if !slices.Equal(n.Spec.PodCIDRs, c.want) || len(c.want) > 0 && n.Spec.PodCIDR != c.want[0] {
			t.Errorf("%s: %q and %q, want %q", name, n.Spec.PodCIDR, n.Spec.PodCIDRs, c.want)
		}
	}
	n := node(func(n *corev1.Node) { n.Status.Capacity = corev1.ResourceList{"cpu": resource.MustParse("1500001n")} })
	setDefaults(n)
	if cpu := n.Status.Allocatable["cpu"]; cpu.String() != "2m" {
		t.Errorf("allocatable is %s", cpu.String())
	}
}

func TestCreate(t *testing.T) {
	type N = corev1.Node
	for name, c := range map[string]struct {
		change func(*N)
		causes []string
	}{
		"sound":      {nil, nil},
		"CIDR":       {func(n *N) { n.Spec.PodCIDRs[0] = "10.1.0.1/24" }, []string{"spec.podCIDRs[0] FieldValueInvalid"}},
		"one family": {func(n *N) { n.Spec.PodCIDRs = []string{"10.1.0.0/24", "10.2.0.0/24"} }, []string{"spec.podCIDRs FieldValueInvalid"}},
		"no family": {func(n *N) { n.Spec.PodCIDRs = []string{"10.1.0.0/24", "x"} },
			[]string{"spec.podCIDRs FieldValueInvalid", "spec.podCIDRs InternalError", "spec.podCIDRs[1] FieldValueInvalid"}},
		"taint": {func(n *N) { n.Spec.Taints = []corev1.Taint{{Key: "a b"}} },
			[]string{"metadata.taints[0].effect FieldValueRequired", "metadata.taints[0].key FieldValueInvalid"}},
		"taint twice": {func(n *N) {
			n.Spec.Taints = []corev1.Taint{{Key: "a", Effect: "NoExecute"}, {Key: "a", Effect: "NoSchedule"}, {Key: "a", Value: "x", Effect: "NoExecute"}}
		}, []string{"metadata.taints[2] FieldValueDuplicate"}},
		"capacity": {func(n *N) {
			n.Status.Capacity = corev1.ResourceList{"cpu": resource.MustParse("-1"), "example.com/x": resource.MustParse("500m")}
			n.Status.Allocatable = corev1.ResourceList{}
		}, []string{"status.capacity.cpu FieldValueInvalid", "status.capacity.example.com/x FieldValueInvalid"}},
		"features": {func(n *N) { n.Status.DeclaredFeatures = []string{"B", "A", "A", "a"} },
			[]string{"status.declaredFeatures[1] FieldValueInvalid", "status.declaredFeatures[2] FieldValueDuplicate", "status.declaredFeatures[3] FieldValueInvalid"}},
		"name": {func(n *N) { n.Name = "A" }, []string{"metadata.name FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			if causes := rulesOf(t).Create(t, node(c.change)); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
		})
	}
}

// A new node is kept free of Pods until it says that it is ready, and may bring its status with it.
func TestTaintedAtFirst(t *testing.T) {
	n := node(func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
	})
	if causes := rulesOf(t).Create(t, n); causes != nil {
		t.Fatal(causes)
	}
	if len(n.Spec.Taints) != 1 || n.Spec.Taints[0].Key != corev1.TaintNodeNotReady || len(n.Status.Addresses) != 1 {
		t.Errorf("created as %+v", n)
	}
}

func TestUpdate(t *testing.T) {
	type N = corev1.Node
	for name, c := range map[string]struct {
		change func(*N)
		causes []string
	}{
		"nothing":       {nil, nil},
		"cordon":        {func(n *N) { n.Spec.Unschedulable = true }, nil},
		"more CIDRs":    {func(n *N) { n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, "fd00::/64") }, []string{"spec.podCIDRs FieldValueForbidden"}},
		"other CIDR":    {func(n *N) { n.Spec.PodCIDR = "10.9.0.0/24" }, []string{"spec.podCIDRs FieldValueForbidden"}},
		"provider":      {func(n *N) { n.Spec.ProviderID = "x://2" }, []string{"spec.providerID FieldValueInvalid"}},
		"no provider":   {func(n *N) { n.Spec.ProviderID = "" }, []string{"spec.providerID FieldValueInvalid"}},
		"taint":         {func(n *N) { n.Spec.Taints = []corev1.Taint{{Key: "a", Effect: "X"}} }, []string{"metadata.taints[0].effect FieldValueNotSupported"}},
		"status is not": {func(n *N) { n.Status.DeclaredFeatures = []string{"wrong"} }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			old := node(nil)
			setDefaults(old)
			old.ResourceVersion = "1"
			next := old.DeepCopy()
			if c.change != nil {
				c.change(next)
			}
			if causes := rulesOf(t).Update(t, next, old); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
		})
	}
}

func TestStatus(t *testing.T) {
	old := node(nil)
	old.ResourceVersion = "1"
	next := old.DeepCopy()
	next.Spec.Unschedulable = true
	address := corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}
	next.Status.Addresses = []corev1.NodeAddress{address, address}
	prepareStatus(t.Context(), next, old)
	if next.Spec.Unschedulable {
		t.Error("a status changed the spec")
	}
	errs := validateStatus(t.Context(), next, old)
	if len(errs) != 1 || errs[0].Field != "status.addresses[1]" {
		t.Errorf("refused because of %v", errs)
	}
}

func TestColumns(t *testing.T) {
	n := node(func(n *corev1.Node) {
		n.Labels = map[string]string{"node-role.kubernetes.io/worker": "", "kubernetes.io/role": "edge", "node-role.kubernetes.io/": ""}
		n.Spec.Unschedulable = true
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "n"}, {Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
		n.Status.NodeInfo = corev1.NodeSystemInfo{KubeletVersion: "v1.37.1", KernelVersion: "6.18", Architecture: "amd64"}
	})
	row := rulesOf(t).Row(t, n)
	for column, want := range map[string]string{
		"Status": "Ready,SchedulingDisabled", "Roles": "edge,worker", "Version": "v1.37.1", "Internal-IP": "10.0.0.1",
		"External-IP": "<none>", "OS-Image": "<unknown>", "Kernel-Version": "6.18 (amd64)", "Container-Runtime": "<unknown>",
	} {
		if row[column] != want {
			t.Errorf("%s is %q, want %q", column, row[column], want)
		}
	}
	if row := rulesOf(t).Row(t, node(nil)); row["Status"] != "Unknown" || row["Roles"] != "<none>" {
		t.Errorf("of a new one: %v", row)
	}
}

func TestAnnotations(t *testing.T) {
	for _, c := range []struct {
		key, value string
		field      string
	}{
		{taintsAnnotation, `[{"key":"a","effect":"NoSchedule"}]`, ""},
		{taintsAnnotation, `{`, "metadata.annotations"},
		{taintsAnnotation, `[{"key":"a"}]`, "metadata.annotations.scheduler.alpha.kubernetes.io/taints[0].effect"},
		{avoidAnnotation, `{"preferAvoidPods":[{}]}`, "metadata.annotations.scheduler.alpha.kubernetes.io/preferAvoidPods[0].PodSignature"},
		{avoidAnnotation, `{"preferAvoidPods":[{"podSignature":{"podController":{"controller":true}}}]}`, ""},
	} {
		errs := validateAnnotations(map[string]string{c.key: c.value})
		if len(errs) == 0 && c.field != "" || len(errs) > 0 && errs[0].Field != c.field {
			t.Errorf("%s=%s: %v, want something at %q", c.key, c.value, errs, c.field)
		}
	}
	n := node(func(n *corev1.Node) { n.Spec.DoNotUseExternalID = "e"; n.Spec.PodCIDRs = []string{"fd00:0::/64"} })
	if got := warnings(t.Context(), n, nil); len(got) != 2 {
		t.Errorf("warned %q", got)
	}
	if swap := (node(func(n *corev1.Node) { n.Status.NodeInfo.Swap = &corev1.NodeSwapStatus{Capacity: ptr.To[int64](0)} })); len(validateNode(swap)) != 1 {
		t.Error("no swap was taken")
	}
}

package pod

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/rules"
)

func TestUpdate(t *testing.T) {
	type P = corev1.Pod
	gated := func(p *P) {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a"}, {Name: "b"}}
		p.Spec.NodeSelector = map[string]string{"x": "y"}
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "k", Operator: corev1.NodeSelectorOpExists}}}},
		}}}
	}
	tolerant := func(p *P) { p.Spec.Tolerations = []corev1.Toleration{{Key: "x", Operator: "Exists"}} }
	terms := func(p *P) *[]corev1.NodeSelectorTerm {
		return &p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	const spec, selectorTerms = "spec FieldValueForbidden", "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
	for name, c := range map[string]struct {
		old, change func(*P)
		causes      []string
		generation  int64
	}{
		"nothing":        {nil, nil, nil, 1},
		"manifest again": {nil, func(p *P) { p.Spec = corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}} }, nil, 1},
		"label":          {nil, func(p *P) { p.Labels = map[string]string{"a": "b"} }, nil, 1},
		"image":          {nil, func(p *P) { p.Spec.Containers[0].Image = "j" }, nil, 2},
		"no image":       {nil, func(p *P) { p.Spec.Containers[0].Image = "" }, []string{"spec.containers[0].image FieldValueRequired"}, 2},
		"command":        {nil, func(p *P) { p.Spec.Containers[0].Command = []string{"x"} }, []string{spec}, 2},
		"container":      {nil, func(p *P) { p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "i"}) }, []string{"spec.containers FieldValueForbidden"}, 2},
		"node":           {nil, func(p *P) { p.Spec.NodeName = "n" }, []string{spec}, 2},
		"policy":         {nil, func(p *P) { p.Spec.RestartPolicy = "X" }, []string{spec, "spec.restartPolicy FieldValueNotSupported"}, 2},
		"priority":       {nil, func(p *P) { p.Spec.Priority, p.Spec.PriorityClassName = nil, "A" }, []string{spec, "spec.priorityClassName FieldValueInvalid"}, 2},
		"deadline":       {nil, func(p *P) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](9) }, nil, 2},
		"nearer":         {func(p *P) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](9) }, func(p *P) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](8) }, nil, 2},
		"later":          {func(p *P) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](9) }, func(p *P) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](10) }, []string{"spec.activeDeadlineSeconds FieldValueInvalid"}, 2},
		"no deadline":    {func(p *P) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](9) }, func(p *P) { p.Spec.ActiveDeadlineSeconds = nil }, []string{"spec.activeDeadlineSeconds FieldValueInvalid"}, 2},
		"toleration": {nil, func(p *P) {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "k", Operator: "Exists"})
		}, nil, 2},
		"seconds":          {nil, func(p *P) { p.Spec.Tolerations[0].TolerationSeconds = ptr.To[int64](1) }, nil, 2},
		"other toleration": {tolerant, func(p *P) { p.Spec.Tolerations[0].Key = "k" }, []string{"spec.tolerations FieldValueForbidden"}, 2},
		"gate opens":       {gated, func(p *P) { p.Spec.SchedulingGates = p.Spec.SchedulingGates[:1] }, nil, 2},
		"new gate": {gated, func(p *P) {
			p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "c"})
		}, []string{"spec.schedulingGates[2].name FieldValueForbidden"}, 2},
		"narrower": {gated, func(p *P) { p.Spec.NodeSelector["z"] = "z" }, nil, 2},
		"wider":    {gated, func(p *P) { delete(p.Spec.NodeSelector, "x") }, []string{"spec.nodeSelector FieldValueInvalid"}, 2},
		"more wanted": {gated, func(p *P) {
			(*terms(p))[0].MatchExpressions = append((*terms(p))[0].MatchExpressions, corev1.NodeSelectorRequirement{Key: "l", Operator: "Exists"})
		}, nil, 2},
		"other wanted":  {gated, func(p *P) { (*terms(p))[0].MatchExpressions[0].Key = "l" }, []string{selectorTerms + "[0] FieldValueInvalid"}, 2},
		"more terms":    {gated, func(p *P) { *terms(p) = append(*terms(p), corev1.NodeSelectorTerm{}) }, []string{selectorTerms + " FieldValueInvalid"}, 2},
		"no affinity":   {gated, func(p *P) { p.Spec.Affinity = nil }, []string{selectorTerms + " FieldValueInvalid"}, 2},
		"selector":      {nil, func(p *P) { p.Spec.NodeSelector = map[string]string{"a": "b"} }, []string{spec}, 2},
		"mirror":        {func(p *P) { p.Spec.NodeName = "n" }, func(p *P) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }, []string{"metadata.annotations[kubernetes.io/config.mirror] FieldValueForbidden"}, 1},
		"status is not": {nil, func(p *P) { p.Status.Phase = corev1.PodFailed }, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			old := stored(t, c.old)
			next := old.DeepCopy()
			if c.change != nil {
				c.change(next)
			}
			if causes := rulesOf(t).Update(t, next, old); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
			if next.Generation != c.generation || next.Status.Phase != corev1.PodPending {
				t.Errorf("generation %d, want %d; status %+v", next.Generation, c.generation, next.Status)
			}
		})
	}
}

func TestStatus(t *testing.T) {
	type P = corev1.Pod
	ended := func(code int32) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	reported := func(state corev1.ContainerState) func(*P) {
		return func(p *P) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: state}} }
	}
	for name, c := range map[string]struct {
		spec, old, change func(*P)
		causes            []string
	}{
		"addresses": {nil, nil, func(p *P) {
			p.Status.PodIP, p.Status.PodIPs = "10.0.0.1", []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}}
			p.Status.HostIP, p.Status.HostIPs = "10.0.0.9", []corev1.HostIP{{IP: "10.0.0.9"}}
		}, nil},
		"one family":     {nil, nil, func(p *P) { p.Status.PodIPs = []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "10.0.0.2"}} }, []string{"status.podIPs"}},
		"no address":     {nil, nil, func(p *P) { p.Status.PodIP = "x" }, []string{"status.podIPs[0]"}},
		"was odd":        {nil, func(p *P) { p.Status.PodIP = "010.0.0.1" }, nil, nil},
		"disagree":       {nil, nil, func(p *P) { p.Status.HostIP, p.Status.HostIPs = "10.0.0.1", []corev1.HostIP{{IP: "10.0.0.2"}} }, []string{"status.hostIPs[0].ip"}},
		"QoS":            {nil, nil, func(p *P) { p.Status.QOSClass = corev1.PodQOSGuaranteed }, []string{"status.qosClass"}},
		"QoS left out":   {nil, nil, func(p *P) { p.Status.QOSClass = "" }, nil},
		"condition":      {nil, nil, func(p *P) { p.Status.Conditions = []corev1.PodCondition{{Type: "a b", ObservedGeneration: -1}} }, []string{"status.conditions[0].observedGeneration", "status.conditions[0].Type"}},
		"nominated":      {nil, nil, func(p *P) { p.Status.NominatedNodeName = "n" }, nil},
		"nominated late": {func(p *P) { p.Spec.NodeName = "n" }, nil, func(p *P) { p.Status.NominatedNodeName = "m" }, []string{"status.nominatedNodeName"}},
		"restarted":      {nil, reported(ended(0)), reported(running), nil},
		"resurrected": {func(p *P) { p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure }, reported(ended(0)), reported(running),
			[]string{"status.containerStatuses[0].state"}},
		"after failure": {func(p *P) { p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure }, reported(ended(1)), reported(running), nil},
		"own policy": {func(p *P) { p.Spec.Containers[0].RestartPolicy = ptr.To(corev1.ContainerRestartPolicyNever) }, reported(ended(1)), reported(running),
			[]string{"status.containerStatuses[0].state"}},
		"own rule": {func(p *P) {
			p.Spec.Containers[0].RestartPolicy = ptr.To(corev1.ContainerRestartPolicyNever)
			p.Spec.Containers[0].RestartPolicyRules = []corev1.ContainerRestartRule{{
				Action: corev1.ContainerRestartRuleActionRestart, ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{Operator: corev1.ContainerRestartRuleOnExitCodesOpIn, Values: []int32{7}},
			}}
		}, reported(ended(7)), reported(running), nil},
		"user": {nil, nil, func(p *P) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", User: &corev1.ContainerUser{Linux: &corev1.LinuxContainerUser{UID: -1}}}}
		}, []string{"status.containerStatuses[0].user.linux.uid"}},
		"spec is not":   {nil, nil, func(p *P) { p.Spec.NodeName = "n" }, nil},
		"claim unheard": {nil, nil, func(p *P) { p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "x"}} }, []string{"status.resourceClaimStatuses[0].name"}},
		"finalizer":     {nil, nil, func(p *P) { p.Finalizers = []string{"mine"} }, []string{"metadata.finalizers[0]"}},
	} {
		t.Run(name, func(t *testing.T) {
			old := stored(t, c.spec)
			if c.old != nil {
				c.old(old)
			}
			setDefaults(old)
			next := old.DeepCopy()
			if c.change != nil {
				c.change(next)
			}
			setDefaults(next)
			prepareStatus(t.Context(), next, old)
			var fields []string
			for _, err := range validateStatus(t.Context(), next, old) {
				fields = append(fields, err.Field)
			}
			if !slices.Equal(fields, c.causes) {
				t.Errorf("refused because of %q, want %q", fields, c.causes)
			}
			if next.Spec.NodeName != old.Spec.NodeName || next.Status.QOSClass == "" {
				t.Errorf("became %+v", next)
			}
		})
	}
}

// A writer that doesn't know observedGeneration must not wipe it.
func TestStatusKeepsGenerations(t *testing.T) {
	old := stored(t, nil)
	old.Status.ObservedGeneration = 3
	old.Status.Conditions = []corev1.PodCondition{{Type: "Ready", ObservedGeneration: 2}, {Type: "Ready", ObservedGeneration: 4}}
	next := old.DeepCopy()
	next.Status.ObservedGeneration = 0
	next.Status.Conditions = []corev1.PodCondition{{Type: "Ready"}, {Type: "Ready"}, {Type: "Ready"}, {Type: "Initialized"}}
	prepareStatus(t.Context(), next, old)
	var got []int64
	for _, condition := range next.Status.Conditions {
		got = append(got, condition.ObservedGeneration)
	}
	if next.Status.ObservedGeneration != 3 || !slices.Equal(got, []int64{2, 4, 0, 0}) {
		t.Errorf("kept %d and %v", next.Status.ObservedGeneration, got)
	}
}

func TestFinalizersOnCreate(t *testing.T) {
	if errs := rules.Finalizers(pod(func(p *corev1.Pod) { p.Finalizers = []string{"orphan", "a/b", "c"} })); len(errs) != 1 || errs[0].Field != "metadata.finalizers[2]" {
		t.Errorf("refused because of %v", errs)
	}
}

package pod

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/recorded"
	"portal/internal/apiserver/registry/registrytest"
)

func rulesOf(t testing.TB) *registrytest.Rules {
	return registrytest.For(t, New(nil), corev1.AddToScheme)
}

// pod is a sound one, changed.
func pod(change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if change != nil {
		change(p)
	}
	return p
}

// stored is a pod as a create leaves it.
func stored(t testing.TB, change func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	p := pod(change)
	if causes := rulesOf(t).Create(t, p); causes != nil {
		t.Fatal(causes)
	}
	p.ResourceVersion = "1"
	return p
}

func TestRecorded(t *testing.T) {
	recorded.Replay(t, "pod/", rulesOf(t), func() runtime.Object { return &corev1.Pod{} })
}

func TestPullPolicy(t *testing.T) {
	for image, want := range map[string]corev1.PullPolicy{
		"i": corev1.PullAlways, "i:latest": corev1.PullAlways, "reg:5000/a/i": corev1.PullAlways,
		"i:1": corev1.PullIfNotPresent, "reg:5000/i:1": corev1.PullIfNotPresent, "i:latest:x": corev1.PullIfNotPresent,
		"i@sha256:" + strings.Repeat("a", 64):        corev1.PullIfNotPresent,
		"i:latest@sha256:" + strings.Repeat("a", 64): corev1.PullAlways,
		"UPPER": corev1.PullIfNotPresent,
	} {
		if got := pullPolicy(image); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}

func TestDefaults(t *testing.T) {
	p := stored(t, func(p *corev1.Pod) {
		p.Spec.HostNetwork = true
		p.Spec.DeprecatedServiceAccount = "sa"
		p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](-5)
		p.Spec.Volumes = []corev1.Volume{
			{Name: "a"},
			{Name: "b", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s"}}},
			{Name: "c", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}}}}}},
		}
		p.Spec.Containers[0] = corev1.Container{
			Name: "c", Image: "i:1",
			Ports: []corev1.ContainerPort{{ContainerPort: 80}},
			Env:   []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}}},
			Resources: corev1.ResourceRequirements{
				Limits:   corev1.ResourceList{"cpu": resource.MustParse("1500001n"), "memory": resource.MustParse("1Gi")},
				Requests: corev1.ResourceList{"memory": resource.MustParse("1Mi")},
			},
			LivenessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 1}}},
			Lifecycle:     &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{}}},
		}
		p.Spec.Containers[0].Lifecycle.PreStop.HTTPGet.Port.IntVal = 80
	})
	c := p.Spec.Containers[0]
	cpu := c.Resources.Requests["cpu"]
	for name, ok := range map[string]bool{
		"grace period": *p.Spec.TerminationGracePeriodSeconds == 1,
		"account":      p.Spec.ServiceAccountName == "sa",
		"links":        *p.Spec.EnableServiceLinks,
		"emptyDir":     p.Spec.Volumes[0].EmptyDir != nil,
		"mode":         *p.Spec.Volumes[1].Secret.DefaultMode == 0o644,
		"token":        *p.Spec.Volumes[2].Projected.Sources[0].ServiceAccountToken.ExpirationSeconds == 3600,
		"host port":    c.Ports[0].HostPort == 80 && c.Ports[0].Protocol == "TCP",
		"field":        c.Env[0].ValueFrom.FieldRef.APIVersion == "v1",
		"request":      cpu.String() == "2m",
		"probe":        c.LivenessProbe.PeriodSeconds == 10 && c.LivenessProbe.FailureThreshold == 3 && *c.LivenessProbe.GRPC.Service == "",
		"hook":         c.Lifecycle.PreStop.HTTPGet.Path == "/" && c.Lifecycle.PreStop.HTTPGet.Scheme == "HTTP",
		"QoS":          p.Status.QOSClass == corev1.PodQOSBurstable,
		"phase":        p.Status.Phase == corev1.PodPending,
	} {
		if !ok {
			t.Errorf("%s is wrong in %+v", name, p)
		}
	}
}

func TestQoS(t *testing.T) {
	list := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory)}
	}
	full := corev1.ResourceRequirements{Limits: list("1", "1Gi"), Requests: list("1", "1Gi")}
	for name, c := range map[string]struct {
		spec corev1.PodSpec
		want corev1.PodQOSClass
	}{
		"nothing":       {corev1.PodSpec{Containers: []corev1.Container{{}}}, corev1.PodQOSBestEffort},
		"all":           {corev1.PodSpec{Containers: []corev1.Container{{Resources: full}}}, corev1.PodQOSGuaranteed},
		"one of two":    {corev1.PodSpec{Containers: []corev1.Container{{Resources: full}, {}}}, corev1.PodQOSBurstable},
		"not init":      {corev1.PodSpec{InitContainers: []corev1.Container{{}}, Containers: []corev1.Container{{Resources: full}}}, corev1.PodQOSBurstable},
		"only requests": {corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: list("1", "1")}}}}, corev1.PodQOSBurstable},
		"whole Pod":     {corev1.PodSpec{Resources: &full, Containers: []corev1.Container{{}}}, corev1.PodQOSGuaranteed},
		"zero":          {corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: list("0", "0")}}}}, corev1.PodQOSBestEffort},
	} {
		if got := qosClass(&c.spec); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// What is said for the whole Pod is completed from its containers, and never made smaller than they need.
func TestPodResources(t *testing.T) {
	q := resource.MustParse
	p := stored(t, func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"cpu": q("1"), "memory": q("1Gi")}
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "i", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": q("2")}}})
		p.Spec.Resources = &corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": q("4")}}
	})
	r := p.Spec.Resources
	memory, limit := r.Requests["memory"], r.Limits["cpu"]
	if memory.String() != "1Gi" || limit.String() != "4" {
		t.Errorf("completed to %v", r)
	}
	if _, limited := r.Limits["memory"]; limited {
		t.Error("a limit was made although a container has none")
	}
}

func TestTolerations(t *testing.T) {
	for name, c := range map[string]struct {
		has  []corev1.Toleration
		want int
	}{
		"none":       {nil, 2},
		"everything": {[]corev1.Toleration{{Operator: corev1.TolerationOpExists}}, 1},
		"one":        {[]corev1.Toleration{{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}, 2},
		"other":      {[]corev1.Toleration{{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}, 3},
	} {
		spec := corev1.PodSpec{Tolerations: c.has}
		tolerateBriefly(&spec)
		if len(spec.Tolerations) != c.want {
			t.Errorf("%s: %d tolerations, want %d", name, len(spec.Tolerations), c.want)
		}
	}
}

// Fields of features that are alpha in Kubernetes are forgotten, and profiles in annotations become fields.
func TestDroppedAndAdopted(t *testing.T) {
	p := stored(t, func(p *corev1.Pod) {
		p.Annotations = map[string]string{
			"pod.beta.kubernetes.io/init-containers": "[]", appArmorPrefix + "c": "localhost/web",
		}
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Mode: ptr.To[int32](0o700)}}}}
		p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{StopSignal: ptr.To(corev1.SIGTERM)}
		p.Spec.Containers[0].LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: 1, Mode: ptr.To(corev1.GRPCProbeModeTLS)}}}
	})
	c := p.Spec.Containers[0]
	if c.Lifecycle != nil || c.LivenessProbe.GRPC.Mode != nil || p.Spec.Volumes[0].EmptyDir.Mode != nil || len(p.Annotations) != 1 {
		t.Errorf("kept: %+v", p)
	}
	if profile := c.SecurityContext.AppArmorProfile; profile.Type != corev1.AppArmorProfileTypeLocalhost || *profile.LocalhostProfile != "web" {
		t.Errorf("adopted %+v", profile)
	}
}

func TestLabelKeys(t *testing.T) {
	p := stored(t, func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web", "tier": "x"}
		selector := func() *metav1.LabelSelector { return &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}} }
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
			TopologyKey: "zone", LabelSelector: selector(), MatchLabelKeys: []string{"app", "missing"}, MismatchLabelKeys: []string{"tier"},
		}}}}
		p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
			MaxSkew: 1, TopologyKey: "zone", WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: selector(), MatchLabelKeys: []string{"app"},
		}}
	})
	term := p.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0]
	if got := metav1.FormatLabelSelector(term.LabelSelector); got != "a=b,app in (web),tier notin (x)" {
		t.Errorf("the term selects %s", got)
	}
	if got := metav1.FormatLabelSelector(p.Spec.TopologySpreadConstraints[0].LabelSelector); got != "a=b,app in (web)" {
		t.Errorf("the constraint selects %s", got)
	}
}

func TestGated(t *testing.T) {
	p := stored(t, func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/g"}} })
	if len(p.Status.Conditions) != 1 || p.Status.Conditions[0].Reason != corev1.PodReasonSchedulingGated || p.Status.Conditions[0].LastTransitionTime.IsZero() {
		t.Errorf("conditions are %+v", p.Status.Conditions)
	}
	if got := rulesOf(t).Row(t, p)["Status"]; got != "SchedulingGated" {
		t.Errorf("shown as %s", got)
	}
}

func TestGracePeriod(t *testing.T) {
	for name, c := range map[string]struct {
		node  string
		phase corev1.PodPhase
		asked *int64
		want  int64
	}{
		"unscheduled":   {"", corev1.PodPending, ptr.To[int64](5), 0},
		"spec":          {"n", corev1.PodRunning, nil, 30},
		"asked":         {"n", corev1.PodRunning, ptr.To[int64](5), 5},
		"at once":       {"n", corev1.PodRunning, ptr.To[int64](0), 0},
		"negative":      {"n", corev1.PodRunning, ptr.To[int64](-3), 1},
		"has succeeded": {"n", corev1.PodSucceeded, nil, 0},
		"has failed":    {"n", corev1.PodFailed, ptr.To[int64](5), 0},
	} {
		p := stored(t, func(p *corev1.Pod) { p.Spec.NodeName = c.node })
		p.Status.Phase = c.phase
		options := &metav1.DeleteOptions{GracePeriodSeconds: c.asked}
		if !(graceful{}).CheckGracefulDelete(t.Context(), p, options) || *options.GracePeriodSeconds != c.want {
			t.Errorf("%s: %d, want %d", name, *options.GracePeriodSeconds, c.want)
		}
	}
	if (graceful{}).CheckGracefulDelete(t.Context(), pod(nil), nil) {
		t.Error("graceful without options")
	}
}

func TestWarnings(t *testing.T) {
	p := pod(func(p *corev1.Pod) {
		p.Name = "a.b"
		p.Annotations = map[string]string{corev1.SeccompPodAnnotationKey: "unconfined", appArmorPrefix + "c": "unconfined"}
		p.Spec.HostAliases = []corev1.HostAlias{{IP: "10.0.0.1"}, {IP: "10.0.0.1"}}
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{GitRepo: &corev1.GitRepoVolumeSource{Repository: "r"}}}}
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "a", ContainerPort: 80}, {Name: "a", ContainerPort: 80, HostPort: 80}}
		p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "A", Value: "$(A)2"}, {Name: "A", Value: "3"}}
	})
	setDefaults(p)
	got := warnings(t.Context(), p, nil)
	for _, at := range []string{"metadata.name", "metadata.annotations[seccomp", "metadata.annotations[container.apparmor", "spec.hostAliases[1].ip",
		"spec.volumes[0].gitRepo", "spec.containers[0].ports[1]", "spec.containers[0].env[2]"} {
		if !slices.ContainsFunc(got, func(w string) bool { return strings.HasPrefix(w, at) }) {
			t.Errorf("no warning about %s in %q", at, got)
		}
	}
	if len(got) != 8 { // the port both overlaps and has another's name
		t.Errorf("%d warnings: %q", len(got), got)
	}
	if got := warnings(t.Context(), p, p); got != nil {
		t.Errorf("an update was warned %q", got)
	}
}

// FuzzCreate sends anything that is a Pod in JSON through all rules.
func FuzzCreate(f *testing.F) {
	for _, seed := range []string{
		`{"spec":{"containers":[{"name":"c","image":"i","ports":[{"containerPort":80}],"livenessProbe":{"httpGet":{"port":"x"}}}]}}`,
		`{"spec":{"volumes":[{"name":"a","projected":{"sources":[{},{"serviceAccountToken":{}}]}},null],"initContainers":[null,{"restartPolicy":"Always"}]}}`,
		`{"spec":{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{}},"podAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[{}]}},"resources":{"limits":{"cpu":"1"}}}}`,
		`{"spec":{"containers":[{"resources":{"limits":{"hugepages-2Mi":"3Mi","example.com/x":"1500m"}},"env":[{"valueFrom":{}}],"envFrom":[{}],"securityContext":{}}],"os":{},"hostUsers":false,"topologySpreadConstraints":[{}]}}`,
		`{"status":{"podIPs":[{"ip":"x"}],"conditions":[{}],"containerStatuses":[{"state":{"terminated":{}}}]}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p := &corev1.Pod{}
		if json.Unmarshal(data, p) != nil {
			return
		}
		p.Name, p.Namespace, p.ResourceVersion = "p", "default", "1"
		setDefaults(p)
		sent := p.DeepCopy()
		prepareCreate(t.Context(), p)
		if errs := validateCreate(t.Context(), p); len(errs) == 0 {
			warnings(t.Context(), p, nil)
			if len(validateClasses(&p.Spec)) == 0 { // other classes don't exist, so that admission refuses them
				same := p.DeepCopy()
				prepareUpdate(t.Context(), same, p)
				if errs := validateUpdate(t.Context(), same, p); len(errs) > 0 {
					t.Errorf("an update that changes nothing is refused: %v", errs)
				}
			}
		}
		summarize(sent)
		reported := sent.DeepCopy()
		prepareStatus(t.Context(), reported, p)
		validateStatus(t.Context(), reported, p)
		validateUpdate(t.Context(), sent, p)
	})
}

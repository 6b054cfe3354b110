package workload_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/controllerrevision"
	"portal/internal/apiserver/registry/daemonset"
	"portal/internal/apiserver/registry/deployment"
	"portal/internal/apiserver/registry/podtemplate"
	"portal/internal/apiserver/registry/registrytest"
	"portal/internal/apiserver/registry/replicaset"
	"portal/internal/apiserver/registry/replicationcontroller"
	"portal/internal/apiserver/registry/statefulset"
)

var (
	meta     = metav1.ObjectMeta{Name: "w", Namespace: "default"}
	selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "w"}}
)

func template() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "w"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i:1"}}},
	}
}

func newDeployment() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Selector: selector.DeepCopy(), Template: template()}}
}

func newReplicaSet() *appsv1.ReplicaSet {
	return &appsv1.ReplicaSet{ObjectMeta: meta, Spec: appsv1.ReplicaSetSpec{Selector: selector.DeepCopy(), Template: template()}}
}

func newStatefulSet() *appsv1.StatefulSet {
	return &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Selector: selector.DeepCopy(), Template: template(), ServiceName: "s"}}
}

func newDaemonSet() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Selector: selector.DeepCopy(), Template: template()}}
}

func newController() *corev1.ReplicationController {
	t := template()
	return &corev1.ReplicationController{ObjectMeta: meta, Spec: corev1.ReplicationControllerSpec{Template: &t}}
}

type causes []string

// refusals creates objects that are sound but for one thing.
func refusals[O runtime.Object](t *testing.T, rules *registrytest.Rules, sound func() O, cases map[string]struct {
	change func(O)
	want   causes
}) {
	t.Helper()
	if got := rules.Create(t, sound()); got != nil {
		t.Fatalf("a sound one is refused: %v", got)
	}
	for name, c := range cases {
		obj := sound()
		c.change(obj)
		if got := rules.Create(t, obj); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestDeployment(t *testing.T) {
	rules := registrytest.For(t, deployment.New(), appsv1.AddToScheme, corev1.AddToScheme)
	type D = *appsv1.Deployment
	rolling := func(unavailable, surge intstr.IntOrString) func(D) {
		return func(d D) {
			d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxUnavailable: &unavailable, MaxSurge: &surge}
		}
	}
	refusals(t, rules, newDeployment, map[string]struct {
		change func(D)
		want   causes
	}{
		"negative":          {func(d D) { d.Spec.Replicas = ptr.To[int32](-1) }, causes{"spec.replicas FieldValueInvalid"}},
		"no selector":       {func(d D) { d.Spec.Selector = nil }, causes{"spec.selector FieldValueRequired", "spec.template.metadata.labels FieldValueInvalid"}},
		"empty selector":    {func(d D) { d.Spec.Selector = &metav1.LabelSelector{} }, causes{"spec.selector FieldValueInvalid"}},
		"other labels":      {func(d D) { d.Spec.Template.Labels = nil }, causes{"spec.template.metadata.labels FieldValueInvalid"}},
		"bad labels":        {func(d D) { d.Spec.Template.Labels["!"] = "" }, causes{"spec.template.labels FieldValueInvalid"}},
		"no image":          {func(d D) { d.Spec.Template.Spec.Containers[0].Image = "" }, causes{"spec.template.spec.containers[0].image FieldValueRequired"}},
		"ends":              {func(d D) { d.Spec.Template.Spec.RestartPolicy = "Never" }, causes{"spec.template.spec.restartPolicy FieldValueNotSupported"}},
		"deadline":          {func(d D) { d.Spec.Template.Spec.ActiveDeadlineSeconds = ptr.To[int64](5) }, causes{"spec.template.spec.activeDeadlineSeconds FieldValueForbidden"}},
		"strategy":          {func(d D) { d.Spec.Strategy.Type = "X" }, causes{"spec.strategy FieldValueNotSupported"}},
		"recreate, rolling": {func(d D) { rolling(intstr.FromInt32(1), intstr.FromInt32(1))(d); d.Spec.Strategy.Type = "Recreate" }, causes{"spec.strategy.rollingUpdate FieldValueForbidden"}},
		"stuck":             {rolling(intstr.FromString("0%"), intstr.FromInt32(0)), causes{"spec.strategy.rollingUpdate.maxUnavailable FieldValueInvalid"}},
		"more than all":     {rolling(intstr.FromString("101%"), intstr.FromInt32(0)), causes{"spec.strategy.rollingUpdate.maxUnavailable FieldValueInvalid"}},
		"no percentage":     {rolling(intstr.FromInt32(1), intstr.FromString("a")), causes{"spec.strategy.rollingUpdate.maxSurge FieldValueInvalid"}},
		"impatient":         {func(d D) { d.Spec.MinReadySeconds, d.Spec.ProgressDeadlineSeconds = 9, ptr.To[int32](9) }, causes{"spec.progressDeadlineSeconds FieldValueInvalid"}},
		"priority":          {func(d D) { d.Spec.Template.Spec.PriorityClassName = "A" }, causes{"spec.template.spec.priorityClassName FieldValueInvalid"}},
		"annotation":        {func(d D) { d.Spec.Template.Annotations = map[string]string{corev1.PodDeletionCost: "x"} }, causes{"spec.template.annotations[controller.kubernetes.io/pod-deletion-cost] FieldValueInvalid"}},
		"host port left out": {func(d D) {
			d.Spec.Template.Spec.HostNetwork = true
			d.Spec.Template.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}}
		}, nil},
		"account's token": {func(d D) {
			d.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}}},
			}}}}
		}, nil},
	})

	d := newDeployment()
	rules.Create(t, d)
	if *d.Spec.Replicas != 1 || *d.Spec.RevisionHistoryLimit != 10 || *d.Spec.ProgressDeadlineSeconds != 600 ||
		d.Spec.Strategy.RollingUpdate.MaxSurge.StrVal != "25%" || d.Spec.Strategy.RollingUpdate.MaxUnavailable.StrVal != "25%" {
		t.Errorf("defaults: %+v", d.Spec)
	}
	if s := d.Spec.Template.Spec; s.DNSPolicy != "ClusterFirst" || s.Containers[0].ImagePullPolicy != "IfNotPresent" || s.EnableServiceLinks != nil {
		t.Errorf("defaults of the template: %+v", s)
	}
	for name, c := range map[string]struct {
		change     func(D)
		generation int64
		want       causes
	}{
		"nothing":    {func(D) {}, 1, nil},
		"labels":     {func(d D) { d.Labels = map[string]string{"a": "b"} }, 1, nil},
		"annotation": {func(d D) { d.Annotations = map[string]string{"a": "b"} }, 2, nil},
		"replicas":   {func(d D) { d.Spec.Replicas = ptr.To[int32](3) }, 2, nil},
		"status":     {func(d D) { d.Status.Replicas = 7 }, 1, nil},
		"selector": {func(d D) { d.Spec.Selector.MatchLabels["x"], d.Spec.Template.Labels["x"] = "y", "y" }, 2,
			causes{"spec.selector FieldValueInvalid"}},
	} {
		next := d.DeepCopy()
		c.change(next)
		if got := rules.Update(t, next, d.DeepCopy()); !slices.Equal(got, c.want) || next.Generation != c.generation || next.Status.Replicas != 0 {
			t.Errorf("%s: %v, generation %d", name, got, next.Generation)
		}
	}
	row := rules.Row(t, d)
	if row["Ready"] != "0/1" || row["Containers"] != "c" || row["Images"] != "i:1" || row["Selector"] != "app=w" {
		t.Errorf("row %v", row)
	}
}

func TestReplicaSet(t *testing.T) {
	rules := registrytest.For(t, replicaset.New(), appsv1.AddToScheme, corev1.AddToScheme)
	type S = *appsv1.ReplicaSet
	refusals(t, rules, newReplicaSet, map[string]struct {
		change func(S)
		want   causes
	}{
		"negative":     {func(s S) { s.Spec.Replicas = ptr.To[int32](-1) }, causes{"spec.replicas FieldValueInvalid"}},
		"min ready":    {func(s S) { s.Spec.MinReadySeconds = -1 }, causes{"spec.minReadySeconds FieldValueInvalid"}},
		"other labels": {func(s S) { s.Spec.Template.Labels = nil }, causes{"spec.template.metadata.labels FieldValueInvalid"}},
	})
}

func TestStatefulSet(t *testing.T) {
	rules := registrytest.For(t, statefulset.New(), appsv1.AddToScheme, corev1.AddToScheme)
	type S = *appsv1.StatefulSet
	claim := corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}},
	}}
	refusals(t, rules, newStatefulSet, map[string]struct {
		change func(S)
		want   causes
	}{
		"name":     {func(s S) { s.Name = "a.b" }, causes{"metadata.name FieldValueInvalid"}},
		"service":  {func(s S) { s.Spec.ServiceName = "a.b" }, causes{"spec.serviceName FieldValueInvalid"}},
		"policy":   {func(s S) { s.Spec.PodManagementPolicy = "X" }, causes{"spec.podManagementPolicy FieldValueInvalid"}},
		"strategy": {func(s S) { s.Spec.UpdateStrategy.Type = "X" }, causes{"spec.updateStrategy FieldValueInvalid"}},
		"partition": {func(s S) {
			s.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: ptr.To[int32](-1)}
		}, causes{"spec.updateStrategy.rollingUpdate.partition FieldValueInvalid"}},
		"on delete": {func(s S) {
			s.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: "OnDelete", RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{}}
		}, causes{"spec.updateStrategy.rollingUpdate FieldValueInvalid"}},
		"retention": {func(s S) {
			s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{WhenScaled: "X"}
		}, causes{"spec.persistentVolumeClaimRetentionPolicy.whenScaled FieldValueNotSupported"}},
		"ordinals":   {func(s S) { s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: -1} }, causes{"spec.ordinals.start FieldValueInvalid"}},
		"host names": {func(s S) { s.Spec.Template.Spec.Hostname = "!" }, nil},
		"claims are volumes": {func(s S) {
			s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{claim}
			s.Spec.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/d"}}
		}, nil},
		"no size": {func(s S) {
			c := claim.DeepCopy()
			c.Spec.Resources.Requests = nil
			s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{*c}
		}, causes{"spec.volumeClaimTemplates[0].spec.resources[storage] FieldValueRequired"}},
	})
	old := newStatefulSet()
	rules.Create(t, old)
	if *old.Spec.UpdateStrategy.RollingUpdate.Partition != 0 || old.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntVal != 1 ||
		old.Spec.PodManagementPolicy != "OrderedReady" || old.Spec.PersistentVolumeClaimRetentionPolicy.WhenDeleted != "Retain" {
		t.Errorf("defaults: %+v", old.Spec)
	}
	next := old.DeepCopy()
	next.Spec.ServiceName, next.Spec.PodManagementPolicy, next.Spec.Replicas = "x", "Parallel", ptr.To[int32](4)
	if got := rules.Update(t, next, old); !slices.Equal(got, causes{"spec.podManagementPolicy FieldValueInvalid", "spec.serviceName FieldValueInvalid"}) {
		t.Errorf("changed: %v", got)
	}
}

func TestDaemonSet(t *testing.T) {
	rules := registrytest.For(t, daemonset.New(), appsv1.AddToScheme, corev1.AddToScheme)
	type S = *appsv1.DaemonSet
	rolling := func(unavailable, surge int32) func(S) {
		return func(s S) {
			s.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateDaemonSet{MaxUnavailable: ptr.To(intstr.FromInt32(unavailable)), MaxSurge: ptr.To(intstr.FromInt32(surge))}
		}
	}
	refusals(t, rules, newDaemonSet, map[string]struct {
		change func(S)
		want   causes
	}{
		"strategy": {func(s S) { s.Spec.UpdateStrategy.Type = "X" }, causes{"spec.updateStrategy FieldValueNotSupported"}},
		"both":     {rolling(1, 1), causes{"spec.updateStrategy.rollingUpdate.maxSurge FieldValueInvalid"}},
		"neither":  {rolling(0, 0), causes{"spec.updateStrategy.rollingUpdate.maxUnavailable FieldValueRequired"}},
		"surge":    {rolling(0, 1), nil},
	})
	old := newDaemonSet()
	rules.Create(t, old)
	next := old.DeepCopy()
	next.Spec.Template.Spec.Containers[0].Image = "i:2"
	if got := rules.Update(t, next, old); got != nil || next.Generation != 2 || next.Annotations[appsv1.DeprecatedTemplateGeneration] != "2" {
		t.Errorf("%v: generation %d, templates %v", got, next.Generation, next.Annotations)
	}
}

func TestReplicationController(t *testing.T) {
	rules := registrytest.For(t, replicationcontroller.New(), corev1.AddToScheme)
	type C = *corev1.ReplicationController
	refusals(t, rules, newController, map[string]struct {
		change func(C)
		want   causes
	}{
		"no template":  {func(c C) { c.Spec.Template, c.Spec.Selector = nil, map[string]string{"a": "b"} }, causes{"spec.template FieldValueRequired"}},
		"no labels":    {func(c C) { c.Spec.Template.Labels = nil }, causes{"spec.selector FieldValueRequired"}},
		"other labels": {func(c C) { c.Spec.Selector = map[string]string{"a": "b"} }, causes{"spec.template.metadata.labels FieldValueInvalid"}},
	})
	c := newController()
	rules.Create(t, c)
	if c.Spec.Selector["app"] != "w" || c.Labels["app"] != "w" || *c.Spec.Replicas != 1 {
		t.Errorf("defaults: %+v", c)
	}
}

func TestPodTemplate(t *testing.T) {
	rules := registrytest.For(t, podtemplate.New(), corev1.AddToScheme)
	refusals(t, rules, func() *corev1.PodTemplate { return &corev1.PodTemplate{ObjectMeta: meta, Template: template()} }, map[string]struct {
		change func(*corev1.PodTemplate)
		want   causes
	}{
		"no containers": {func(p *corev1.PodTemplate) { p.Template.Spec.Containers = nil }, causes{"template.spec.containers FieldValueRequired"}},
	})
}

func TestControllerRevision(t *testing.T) {
	rules := registrytest.For(t, controllerrevision.New(), appsv1.AddToScheme)
	sound := func() *appsv1.ControllerRevision {
		return &appsv1.ControllerRevision{ObjectMeta: meta, Revision: 1, Data: runtime.RawExtension{Raw: []byte(`{"a":1}`)}}
	}
	refusals(t, rules, sound, map[string]struct {
		change func(*appsv1.ControllerRevision)
		want   causes
	}{
		"no data":   {func(r *appsv1.ControllerRevision) { r.Data.Raw = nil }, causes{"data FieldValueRequired"}},
		"no JSON":   {func(r *appsv1.ControllerRevision) { r.Data.Raw = []byte("{") }, causes{"data FieldValueInvalid"}},
		"no object": {func(r *appsv1.ControllerRevision) { r.Data.Raw = []byte("[]") }, causes{"data FieldValueRequired"}},
		"negative":  {func(r *appsv1.ControllerRevision) { r.Revision = -1 }, causes{"revision FieldValueInvalid"}},
	})
	next := sound()
	next.Revision, next.Data.Raw = 2, []byte(`{"a":2}`)
	if got := rules.Update(t, next, sound()); !slices.Equal(got, causes{"data FieldValueInvalid"}) {
		t.Errorf("changed: %v", got)
	}
}

// A Scale changes the number and nothing else.
func TestScale(t *testing.T) {
	storage := registrytest.Stored(t, replicationcontroller.New())
	ctx := request.WithNamespace(t.Context(), "default")
	rc := newController()
	rc.Spec.Replicas, rc.Spec.Selector = ptr.To[int32](2), map[string]string{"app": "w"}
	rc.Spec.Template.Spec.RestartPolicy, rc.Spec.Template.Spec.DNSPolicy = "Always", "Default"
	rc.Spec.Template.Spec.Containers[0].ImagePullPolicy, rc.Spec.Template.Spec.Containers[0].TerminationMessagePolicy = "Always", "File"
	created, err := storage["replicationcontrollers"].(rest.Creater).Create(ctx, rc, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	scaler := storage["replicationcontrollers/scale"].(rest.Patcher)
	read, err := scaler.Get(ctx, "w", &metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	scale := read.(*autoscalingv1.Scale)
	if scale.Spec.Replicas != 2 || scale.Status.Selector != "app=w" || scale.UID != created.(metav1.Object).GetUID() {
		t.Fatalf("%+v", scale)
	}
	update := func(change func(*autoscalingv1.Scale)) error {
		next := scale.DeepCopy()
		change(next)
		_, _, err := scaler.Update(ctx, "w", rest.DefaultUpdatedObjectInfo(next), rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
		return err
	}
	if err := update(func(s *autoscalingv1.Scale) { s.Spec.Replicas = -1 }); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.replicas") {
		t.Errorf("a negative number: %v", err)
	}
	if err := update(func(s *autoscalingv1.Scale) { s.UID = "other" }); !apierrors.IsConflict(err) {
		t.Errorf("another one's: %v", err)
	}
	if err := update(func(s *autoscalingv1.Scale) { s.Spec.Replicas = 5 }); err != nil {
		t.Fatal(err)
	}
	if err := update(func(s *autoscalingv1.Scale) { s.Spec.Replicas = 6 }); !apierrors.IsConflict(err) {
		t.Errorf("of an older version: %v", err)
	}
	now, err := storage["replicationcontrollers"].(rest.Getter).Get(context.WithoutCancel(ctx), "w", &metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := now.(*corev1.ReplicationController); *got.Spec.Replicas != 5 || got.Generation != 2 {
		t.Errorf("%d replicas, generation %d", *got.Spec.Replicas, got.Generation)
	}
}

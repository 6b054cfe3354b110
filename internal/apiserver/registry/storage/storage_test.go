package storage

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/registrytest"
)

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

// cases are objects of one kind, each made from a sound one, and what is wrong with them.
type cases[T any] map[string]struct {
	change func(*T)
	want   []string
}

func (c cases[T]) run(t *testing.T, r registry.Resource, sound func() *T) {
	t.Helper()
	rules := registrytest.For(t, r, storagev1.AddToScheme)
	for name, c := range c {
		obj := sound()
		c.change(obj)
		if got := rules.Create(t, any(obj).(runtime.Object)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// updates are the same for changes of a sound object.
func (c cases[T]) updates(t *testing.T, r registry.Resource, sound func() *T) {
	t.Helper()
	rules := registrytest.For(t, r, storagev1.AddToScheme)
	for name, c := range c {
		old, obj := sound(), sound()
		c.change(obj)
		rules.Scheme.Default(any(old).(runtime.Object))
		if got := rules.Update(t, any(obj).(runtime.Object), any(old).(runtime.Object)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func class() *storagev1.StorageClass {
	return &storagev1.StorageClass{ObjectMeta: named("fast"), Provisioner: "example.com/Disks", Parameters: map[string]string{"kind": "ssd"}}
}

func zones(values ...string) []corev1.TopologySelectorTerm {
	return []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: "zone", Values: values}}}}
}

func TestClasses(t *testing.T) {
	type C = *storagev1.StorageClass
	cases[storagev1.StorageClass]{
		"sound":          {func(c C) { c.AllowedTopologies = zones("a", "b") }, nil},
		"no provisioner": {func(c C) { c.Provisioner = "" }, []string{"provisioner FieldValueRequired"}},
		"provisioner":    {func(c C) { c.Provisioner = "a b" }, []string{"provisioner FieldValueInvalid"}},
		"parameters":     {func(c C) { c.Parameters[""] = "x" }, []string{"parameters FieldValueInvalid"}},
		"too long":       {func(c C) { c.Parameters["x"] = strings.Repeat("x", 256<<10) }, []string{"parameters FieldValueTooLong"}},
		"reclaim policy": {func(c C) { c.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRecycle) }, []string{"reclaimPolicy FieldValueNotSupported"}},
		"binding":        {func(c C) { c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingMode("Later")) }, []string{"volumeBindingMode FieldValueNotSupported"}},
		"no values":      {func(c C) { c.AllowedTopologies = zones() }, []string{"allowedTopologies[0].matchLabelExpressions[0].values FieldValueRequired"}},
		"value twice":    {func(c C) { c.AllowedTopologies = zones("a", "a") }, []string{"allowedTopologies[0].matchLabelExpressions[0].values[1] FieldValueDuplicate"}},
		"term twice": {func(c C) { c.AllowedTopologies = append(zones("a", "b"), zones("b", "a")...) },
			[]string{"allowedTopologies[1].matchLabelExpressions FieldValueDuplicate"}},
		"empty term": {func(c C) { c.AllowedTopologies = []corev1.TopologySelectorTerm{{}} }, []string{"allowedTopologies[0].matchLabelExpressions FieldValueDuplicate"}},
	}.run(t, NewClass(), class)
	cases[storagev1.StorageClass]{
		"expansion":   {func(c C) { c.AllowVolumeExpansion = ptr.To(true) }, nil},
		"parameters":  {func(c C) { c.Parameters["kind"] = "hdd" }, []string{"parameters FieldValueInvalid"}},
		"provisioner": {func(c C) { c.Provisioner = "example.com/tapes" }, []string{"provisioner FieldValueInvalid"}},
		"policy":      {func(c C) { c.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRetain) }, []string{"reclaimPolicy FieldValueInvalid"}},
		"binding": {func(c C) { c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer) },
			[]string{"volumeBindingMode FieldValueInvalid"}},
	}.updates(t, NewClass(), class)
}

func TestAttributes(t *testing.T) {
	type C = *storagev1.VolumeAttributesClass
	sound := func() C {
		return &storagev1.VolumeAttributesClass{ObjectMeta: named("gold"), DriverName: "example.com", Parameters: map[string]string{"iops": "9"}}
	}
	cases[storagev1.VolumeAttributesClass]{
		"sound":         {func(C) {}, nil},
		"no driver":     {func(c C) { c.DriverName = "" }, []string{"driverName FieldValueRequired"}},
		"no parameters": {func(c C) { c.Parameters = nil }, []string{"parameters FieldValueRequired"}},
	}.run(t, NewAttributes(), sound)
	cases[storagev1.VolumeAttributesClass]{
		"driver":     {func(c C) { c.DriverName = "example.org" }, []string{"driverName FieldValueForbidden"}},
		"parameters": {func(c C) { c.Parameters["iops"] = "10" }, []string{"parameters FieldValueForbidden"}},
	}.updates(t, NewAttributes(), sound)
}

func TestDrivers(t *testing.T) {
	type D = *storagev1.CSIDriver
	sound := func() D { return &storagev1.CSIDriver{ObjectMeta: named("disks.example.com")} }
	tokens := func(d D, life int64, audiences ...string) {
		for _, audience := range audiences {
			d.Spec.TokenRequests = append(d.Spec.TokenRequests, storagev1.TokenRequest{Audience: audience, ExpirationSeconds: &life})
		}
	}
	cases[storagev1.CSIDriver]{
		"sound":    {func(d D) { tokens(d, 600, "a", "b") }, nil},
		"policy":   {func(d D) { d.Spec.FSGroupPolicy = ptr.To(storagev1.FSGroupPolicy("Some")) }, []string{"spec.fsGroupPolicy FieldValueNotSupported"}},
		"mode":     {func(d D) { d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{"Brief"} }, []string{"spec.volumeLifecycleModes FieldValueNotSupported"}},
		"short":    {func(d D) { tokens(d, 599, "a") }, []string{"spec.tokenRequests[0].expirationSeconds FieldValueInvalid"}},
		"long":     {func(d D) { tokens(d, 1<<32+1, "a") }, []string{"spec.tokenRequests[0].expirationSeconds FieldValueInvalid"}},
		"audience": {func(d D) { tokens(d, 600, "a", "a") }, []string{"spec.tokenRequests[1].audience FieldValueDuplicate"}},
		"period":   {func(d D) { d.Spec.NodeAllocatableUpdatePeriodSeconds = ptr.To[int64](9) }, []string{"spec.nodeAllocatableUpdatePeriodSeconds FieldValueInvalid"}},
		"secrets":  {func(d D) { d.Spec.ServiceAccountTokenInSecrets = ptr.To(true) }, []string{"spec.serviceAccountTokenInSecrets FieldValueInvalid"}},
	}.run(t, NewDriver(), sound)
	cases[storagev1.CSIDriver]{
		"capacity": {func(d D) { d.Spec.StorageCapacity = ptr.To(true) }, nil},
		"attach":   {func(d D) { d.Spec.AttachRequired = ptr.To(false) }, []string{"spec.attachedRequired FieldValueInvalid"}},
		"modes": {func(d D) {
			d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}
		},
			[]string{"spec.volumeLifecycleModes FieldValueInvalid"}},
	}.updates(t, NewDriver(), sound)
}

func TestNodes(t *testing.T) {
	type N = *storagev1.CSINode
	sound := func() N {
		return &storagev1.CSINode{ObjectMeta: named("n1"), Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
			{Name: "disks.example.com", NodeID: "7", TopologyKeys: []string{"example.com/zone"}},
		}}}
	}
	cases[storagev1.CSINode]{
		"sound":      {func(N) {}, nil},
		"no name":    {func(n N) { n.Spec.Drivers[0].Name = "" }, []string{"spec.drivers[0].name FieldValueRequired"}},
		"long name":  {func(n N) { n.Spec.Drivers[0].Name = strings.Repeat("a", 64) }, []string{"spec.drivers[0].name FieldValueTooLong"}},
		"twice":      {func(n N) { n.Spec.Drivers = append(n.Spec.Drivers, n.Spec.Drivers[0]) }, []string{"spec.drivers[1].name FieldValueDuplicate"}},
		"no id":      {func(n N) { n.Spec.Drivers[0].NodeID = "" }, []string{"spec.drivers[0].nodeID FieldValueRequired"}},
		"long id":    {func(n N) { n.Spec.Drivers[0].NodeID = strings.Repeat("a", 257) }, []string{"spec.drivers[0].nodeID FieldValueInvalid"}},
		"count":      {func(n N) { n.Spec.Drivers[0].Allocatable = &storagev1.VolumeNodeResources{Count: ptr.To[int32](-1)} }, []string{"spec.drivers[0].allocatable.count FieldValueInvalid"}},
		"keys twice": {func(n N) { n.Spec.Drivers[0].TopologyKeys = []string{"a", "a"} }, []string{"spec.drivers[0] FieldValueDuplicate"}},
		"bad key":    {func(n N) { n.Spec.Drivers[0].TopologyKeys = []string{"a b"} }, []string{"spec.drivers[0] FieldValueInvalid"}},
	}.run(t, NewNode(), sound)
	cases[storagev1.CSINode]{
		"count":   {func(n N) { n.Spec.Drivers[0].Allocatable = &storagev1.VolumeNodeResources{Count: ptr.To[int32](3)} }, nil},
		"another": {func(n N) { n.Spec.Drivers = append(n.Spec.Drivers, storagev1.CSINodeDriver{Name: "b", NodeID: "7"}) }, nil},
		"gone":    {func(n N) { n.Spec.Drivers = nil }, nil},
		"id":      {func(n N) { n.Spec.Drivers[0].NodeID = "8" }, []string{"spec.drivers FieldValueInvalid"}},
	}.updates(t, NewNode(), sound)
}

func TestAttachments(t *testing.T) {
	type A = *storagev1.VolumeAttachment
	sound := func() A {
		return &storagev1.VolumeAttachment{ObjectMeta: named("a"), Spec: storagev1.VolumeAttachmentSpec{
			Attacher: "disks.example.com", NodeName: "n1", Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("v1")},
		}}
	}
	inline := func(change func(*corev1.PersistentVolumeSpec)) func(A) {
		return func(a A) {
			spec := &corev1.PersistentVolumeSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}}
			spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "disks.example.com", VolumeHandle: "v"}
			change(spec)
			a.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: spec}
		}
	}
	const in = "spec.source.inlineVolumeSpec."
	cases[storagev1.VolumeAttachment]{
		"sound":       {func(A) {}, nil},
		"inline":      {inline(func(*corev1.PersistentVolumeSpec) {}), nil},
		"no attacher": {func(a A) { a.Spec.Attacher = "" }, []string{"spec.attacher FieldValueRequired"}},
		"no node":     {func(a A) { a.Spec.NodeName = "" }, []string{"spec.nodeName FieldValueInvalid"}},
		"no source":   {func(a A) { a.Spec.Source = storagev1.VolumeAttachmentSource{} }, []string{"spec.source FieldValueRequired"}},
		"two sources": {func(a A) { a.Spec.Source.InlineVolumeSpec = &corev1.PersistentVolumeSpec{} }, []string{"spec.source FieldValueForbidden"}},
		"volume":      {func(a A) { a.Spec.Source.PersistentVolumeName = ptr.To("A") }, []string{"spec.source.persistentVolumeName FieldValueInvalid"}},
		"capacity": {inline(func(v *corev1.PersistentVolumeSpec) {
			v.Capacity = corev1.ResourceList{"storage": resource.MustParse("1")}
		}),
			[]string{in + "capacity FieldValueForbidden"}},
		"no driver": {inline(func(v *corev1.PersistentVolumeSpec) { v.CSI = nil }), []string{in + "csi FieldValueRequired"}},
		"no modes":  {inline(func(v *corev1.PersistentVolumeSpec) { v.AccessModes = nil }), []string{in + "accessModes FieldValueRequired"}},
	}.run(t, NewAttachment(), sound)
	cases[storagev1.VolumeAttachment]{
		"spec": {func(a A) { a.Spec.NodeName = "n2" }, []string{"spec FieldValueInvalid"}},
	}.updates(t, NewAttachment(), sound)
}

func TestCapacities(t *testing.T) {
	type C = *storagev1.CSIStorageCapacity
	sound := func() C {
		return &storagev1.CSIStorageCapacity{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "n"}, StorageClassName: "fast"}
	}
	cases[storagev1.CSIStorageCapacity]{
		"sound":    {func(C) {}, nil},
		"class":    {func(c C) { c.StorageClassName = "" }, []string{"storageClassName FieldValueInvalid"}},
		"negative": {func(c C) { c.Capacity = ptr.To(resource.MustParse("-1")) }, []string{"capacity FieldValueInvalid"}},
		"topology": {func(c C) { c.NodeTopology = &metav1.LabelSelector{MatchLabels: map[string]string{"!": ""}} }, []string{"nodeTopology.matchLabels FieldValueInvalid"}},
	}.run(t, NewCapacity(), sound)
	cases[storagev1.CSIStorageCapacity]{
		"capacity": {func(c C) { c.Capacity = ptr.To(resource.MustParse("1Gi")) }, nil},
		"class":    {func(c C) { c.StorageClassName = "slow" }, []string{"storageClassName FieldValueInvalid"}},
	}.updates(t, NewCapacity(), sound)
}

func TestTheDefaultClassIsTheNewestOneMarked(t *testing.T) {
	at := func(name string, minute int, key string) storagev1.StorageClass {
		c := storagev1.StorageClass{ObjectMeta: named(name)}
		c.CreationTimestamp = metav1.NewTime(time.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC))
		c.Annotations = map[string]string{key: "true"}
		return c
	}
	list := &storagev1.StorageClassList{Items: []storagev1.StorageClass{
		at("old", 1, defaultClass), at("b", 2, defaultClassBeta), at("a", 2, defaultClass), at("unmarked", 3, "x"),
	}}
	if got := Default(list.Items); got != "a" {
		t.Errorf("the default is %q", got)
	}
	rules := registrytest.For(t, NewClass(), storagev1.AddToScheme)
	if row := rules.Row(t, list); row["Name"] != "old" {
		t.Errorf("the first row is of %v", row["Name"])
	}
	list.Items = list.Items[2:]
	if row := rules.Row(t, list); row["Name"] != "a (default)" {
		t.Errorf("the first row is of %v", row["Name"])
	}
	if row := rules.Row(t, &list.Items[0]); row["Name"] != "a" {
		t.Errorf("a single class is shown as %v", row["Name"])
	}
}

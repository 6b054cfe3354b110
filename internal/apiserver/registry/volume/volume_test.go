package volume

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

func problems(errs field.ErrorList) string {
	var out []string
	for _, err := range errs {
		out = append(out, err.Field+" "+string(err.Type))
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

func gigabytes(text string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(text)}
}

func volumeOf(change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "v", ResourceVersion: "1", UID: "u"},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: gigabytes("1Gi"), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{Server: "s", Path: "/p"}},
		},
	}
	if change != nil {
		change(v)
	}
	return v
}

func TestVolumes(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.PersistentVolume)
		want   string
	}{
		"fine": {nil, ""},
		"nothing": {func(v *corev1.PersistentVolume) {
			v.Spec = corev1.PersistentVolumeSpec{PersistentVolumeReclaimPolicy: "Retain"}
		}, "spec FieldValueRequired, spec.accessModes FieldValueRequired, spec.capacity FieldValueRequired"},
		"two kinds": {func(v *corev1.PersistentVolume) { v.Spec.HostPath = &corev1.HostPathVolumeSource{Path: "/a"} },
			"spec.nfs FieldValueForbidden"},
		"wrong words": {func(v *corev1.PersistentVolume) {
			v.Spec.AccessModes, v.Spec.PersistentVolumeReclaimPolicy, v.Spec.StorageClassName, v.Spec.VolumeMode = []corev1.PersistentVolumeAccessMode{"X"}, "X", "A", ptr.To(corev1.PersistentVolumeMode("X"))
		}, "spec.accessModes[0] FieldValueNotSupported, spec.persistentVolumeReclaimPolicy FieldValueNotSupported, spec.storageClassName FieldValueInvalid, spec.volumeMode FieldValueNotSupported"},
		"no size":        {func(v *corev1.PersistentVolume) { v.Spec.Capacity = gigabytes("0") }, "spec.capacity[storage] FieldValueInvalid"},
		"other capacity": {func(v *corev1.PersistentVolume) { v.Spec.Capacity["cpu"] = resource.MustParse("1") }, "spec.capacity FieldValueNotSupported"},
		"local, nowhere": {func(v *corev1.PersistentVolume) {
			v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/a/../b"}}
		}, "spec.local.path FieldValueInvalid, spec.nodeAffinity FieldValueRequired"},
		"modes": {func(v *corev1.PersistentVolume) {
			v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod, corev1.ReadWriteOnce}
		}, "spec.accessModes FieldValueForbidden"},
	} {
		if got := problems(validate(&volumeOf(c.change).Spec)); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestVolumeUpdates(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.PersistentVolume)
		want   string
	}{
		"claimed":      {func(v *corev1.PersistentVolume) { v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "n", Name: "c"} }, ""},
		"another one":  {func(v *corev1.PersistentVolume) { v.Spec.NFS.Server = "t" }, "spec.persistentvolumesource FieldValueForbidden"},
		"another mode": {func(v *corev1.PersistentVolume) { v.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock) }, "spec.volumeMode FieldValueInvalid"},
	} {
		if got := problems(validateUpdate(t.Context(), volumeOf(c.change), volumeOf(nil))); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func claimOf(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "n", ResourceVersion: "1", UID: "u"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: gigabytes("1Gi")}, StorageClassName: ptr.To("a"),
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending},
	}
	if change != nil {
		change(c)
	}
	return c
}

func TestClaims(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.PersistentVolumeClaim)
		want   string
	}{
		"fine":    {nil, ""},
		"nothing": {func(c *corev1.PersistentVolumeClaim) { c.Spec = corev1.PersistentVolumeClaimSpec{} }, "spec.accessModes FieldValueRequired, spec.resources[storage] FieldValueRequired"},
		"no size": {func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = gigabytes("-1") }, "spec.resources[storage] FieldValueInvalid"},
		"source": {func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource, c.Spec.DataSourceRef = &corev1.TypedLocalObjectReference{Kind: "Pod", Name: "x"}, &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim"}
		}, "spec FieldValueInvalid, spec.dataSource FieldValueInvalid, spec.dataSourceRef.name FieldValueRequired"},
	} {
		if got := problems(validateClaim(&claimOf(c.change).Spec)); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestClaimUpdates(t *testing.T) {
	bound := func(c *corev1.PersistentVolumeClaim) {
		c.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: gigabytes("1Gi")}
		c.Spec.VolumeName = "v"
	}
	for name, c := range map[string]struct {
		before, change func(*corev1.PersistentVolumeClaim)
		want           string
	}{
		"bound now":           {nil, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" }, ""},
		"more, not bound":     {nil, func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = gigabytes("2Gi") }, "spec FieldValueForbidden"},
		"more":                {bound, func(c *corev1.PersistentVolumeClaim) { bound(c); c.Spec.Resources.Requests = gigabytes("2Gi") }, ""},
		"less":                {bound, func(c *corev1.PersistentVolumeClaim) { bound(c); c.Spec.Resources.Requests = gigabytes("500Mi") }, "spec.resources.requests.storage FieldValueForbidden"},
		"another volume":      {bound, func(c *corev1.PersistentVolumeClaim) { bound(c); c.Spec.VolumeName = "w" }, "spec FieldValueForbidden"},
		"another class":       {nil, func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = ptr.To("b") }, "spec FieldValueForbidden"},
		"the class by others": {func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = nil }, nil, ""},
	} {
		if got := problems(validateClaimUpdate(t.Context(), claimOf(c.change), claimOf(c.before))); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

func TestColumns(t *testing.T) {
	if got := modes([]corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOnce}); got != "RWO,RWX" {
		t.Errorf("modes are %q", got)
	}
}

package storage

import (
	"context"
	"slices"
	"strings"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

const (
	maxDriverName = 63
	maxNodeID     = 256

	minTokenLife = 10 * time.Minute
	maxTokenLife = int64(1) << 32
	// minAllocatablePeriod is in seconds.
	minAllocatablePeriod = 10
)

// NewDriver describes CSIDrivers.
func NewDriver() registry.Resource {
	type driver = storagev1.CSIDriver
	docs := storagev1.CSIDriverSpec{}.SwaggerDoc()
	return &registry.Kind[driver, *driver]{
		Served: storagev1.SchemeGroupVersion,
		Plural: "csidrivers", Singular: "csidriver", KindName: "CSIDriver",
		ClusterScoped: true,
		StrictUpdate:  true,
		NewList:       func() runtime.Object { return &storagev1.CSIDriverList{} },
		Default:       defaultDriver,
		PrepareUpdate: func(_ context.Context, d, old *driver) {
			if workload.Changed(d.Spec, old.Spec) {
				d.Generation = old.Generation + 1
			}
		},
		Validate: func(_ context.Context, d *driver) field.ErrorList {
			return append(rules.Finalizers(d), validateDriver(&d.Spec)...)
		},
		ValidateUpdate: func(_ context.Context, d, old *driver) field.ErrorList {
			errs := append(rules.MetaUpdate(d, old), validateDriver(&d.Spec)...)
			errs = append(errs, workload.Immutable(attachRequired, d.Spec.AttachRequired, old.Spec.AttachRequired)...)
			return append(errs, workload.Immutable(workload.At.Child("volumeLifecycleModes"), d.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes)...)
		},
		Warnings: func(_ context.Context, d, old *driver) []string {
			if len(d.Spec.TokenRequests) == 0 || d.Spec.ServiceAccountTokenInSecrets != nil ||
				old != nil && !workload.Changed(d.Spec.TokenRequests, old.Spec.TokenRequests) {
				return nil
			}
			return []string{"spec.serviceAccountTokenInSecrets: should be true, so that the driver gets tokens with the secrets and does not log them with the volume's context"}
		},
		Columns: []registry.Column[driver]{
			{Name: "AttachRequired", Type: "boolean", Description: docs["attachRequired"], Cell: func(d *driver) any { return or(d.Spec.AttachRequired, true) }},
			{Name: "PodInfoOnMount", Type: "boolean", Description: docs["podInfoOnMount"], Cell: func(d *driver) any { return or(d.Spec.PodInfoOnMount, false) }},
			{Name: "StorageCapacity", Type: "boolean", Description: docs["storageCapacity"], Cell: func(d *driver) any { return or(d.Spec.StorageCapacity, false) }},
			{Name: "TokenRequests", Description: docs["tokenRequests"], Cell: audiences},
			{Name: "RequiresRepublish", Type: "boolean", Description: docs["requiresRepublish"], Cell: func(d *driver) any { return or(d.Spec.RequiresRepublish, false) }},
			{Name: "Modes", Description: docs["volumeLifecycleModes"], Cell: modes},
			registry.Age[driver](),
		},
	}
}

// attachRequired is where mistakes in spec.attachRequired are reported, as in Kubernetes.
var attachRequired = workload.At.Child("attachedRequired")

func defaultDriver(d *storagev1.CSIDriver) {
	spec := &d.Spec
	workload.OrPoint(&spec.AttachRequired, true)
	for _, off := range []**bool{
		&spec.PodInfoOnMount, &spec.StorageCapacity, &spec.RequiresRepublish, &spec.SELinuxMount, &spec.PreventPodSchedulingIfMissing,
	} {
		workload.OrPoint(off, false)
	}
	workload.OrPoint(&spec.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
	if len(spec.VolumeLifecycleModes) == 0 {
		spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
}

func audiences(d *storagev1.CSIDriver) any {
	if d.Spec.TokenRequests == nil {
		return "<unset>"
	}
	var out []string
	for _, request := range d.Spec.TokenRequests {
		out = append(out, request.Audience)
	}
	return strings.Join(out, ",")
}

func modes(d *storagev1.CSIDriver) any {
	var out []string
	for _, mode := range d.Spec.VolumeLifecycleModes {
		out = append(out, string(mode))
	}
	if len(out) == 0 {
		return "<none>"
	}
	return strings.Join(out, ",")
}

func validateDriver(spec *storagev1.CSIDriverSpec) field.ErrorList {
	at := workload.At
	var errs field.ErrorList
	for _, needed := range []struct {
		at    *field.Path
		value *bool
	}{
		{attachRequired, spec.AttachRequired},
		{at.Child("podInfoOnMount"), spec.PodInfoOnMount},
		{at.Child("storageCapacity"), spec.StorageCapacity},
		{at.Child("seLinuxMount"), spec.SELinuxMount},
		{at.Child("preventPodSchedulingIfMissing"), spec.PreventPodSchedulingIfMissing},
	} {
		if needed.value == nil {
			errs = append(errs, field.Required(needed.at, ""))
		}
	}
	if policy := spec.FSGroupPolicy; policy != nil {
		errs = append(errs, rules.OneOf(at.Child("fsGroupPolicy"), *policy,
			storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)...)
	}
	for _, mode := range spec.VolumeLifecycleModes {
		errs = append(errs, rules.OneOf(at.Child("volumeLifecycleModes"), mode, storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)...)
	}
	if period := spec.NodeAllocatableUpdatePeriodSeconds; period != nil && *period < minAllocatablePeriod {
		errs = append(errs, field.Invalid(at.Child("nodeAllocatableUpdatePeriodSeconds"), *period, "must be 10 seconds or more"))
	}
	if spec.ServiceAccountTokenInSecrets != nil && len(spec.TokenRequests) == 0 {
		errs = append(errs, field.Invalid(at.Child("serviceAccountTokenInSecrets"), *spec.ServiceAccountTokenInSecrets, "needs spec.tokenRequests: there are no tokens without"))
	}
	return append(errs, validateTokenRequests(at.Child("tokenRequests"), spec.TokenRequests)...)
}

func validateTokenRequests(at *field.Path, requests []storagev1.TokenRequest) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, request := range requests {
		if seen[request.Audience] {
			errs = append(errs, field.Duplicate(at.Index(i).Child("audience"), request.Audience))
			continue
		}
		seen[request.Audience] = true
		life := request.ExpirationSeconds
		if life != nil && (*life < int64(minTokenLife.Seconds()) || *life > maxTokenLife) {
			errs = append(errs, field.Invalid(at.Index(i).Child("expirationSeconds"), *life, "must be from 10 minutes (600) to 2^32 seconds"))
		}
	}
	return errs
}

// validateDriverName wants a name that a CSI driver can have.
func validateDriverName(at *field.Path, name string) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	var errs field.ErrorList
	if len(name) > maxDriverName {
		errs = append(errs, field.TooLong(at, name, maxDriverName))
	}
	return append(errs, rules.DNSSubdomain(at, strings.ToLower(name))...)
}

// NewNode describes CSINodes: which drivers a node has.
func NewNode() registry.Resource {
	type node = storagev1.CSINode
	k := &registry.Kind[node, *node]{
		Served: storagev1.SchemeGroupVersion,
		Plural: "csinodes", Singular: "csinode", KindName: "CSINode",
		ClusterScoped: true,
		StrictUpdate:  true,
		NewList:       func() runtime.Object { return &storagev1.CSINodeList{} },
		Validate: func(_ context.Context, n *node) field.ErrorList {
			return append(rules.Finalizers(n), validateNode(&n.Spec)...)
		},
		ValidateUpdate: func(_ context.Context, n, old *node) field.ErrorList {
			errs := append(rules.MetaUpdate(n, old), validateNode(&n.Spec)...)
			return append(errs, unchangedDrivers(n.Spec.Drivers, old.Spec.Drivers)...)
		},
		Columns: []registry.Column[node]{
			{Name: "Drivers", Type: "integer", Description: "Drivers indicates the number of CSI drivers registered on the node",
				Cell: func(n *node) any { return int64(len(n.Spec.Drivers)) }},
			registry.Age[node](),
		},
	}
	registry.SpecAndStatus(k, func(n *node) *storagev1.CSINodeSpec { return &n.Spec }, func(n *node) *storagev1.CSINodeStatus { return &n.Status },
		func(_ context.Context, n, old *node) field.ErrorList { return rules.MetaUpdate(n, old) })
	k.PrepareCreate = func(_ context.Context, n *node) { n.Status = storagev1.CSINodeStatus{} }
	k.PrepareUpdate = func(_ context.Context, n, old *node) { n.Status = old.Status }
	// The status has the health of storage alone, of a feature that Kubernetes has off by default: what is written there is dropped.
	onlyStatus := k.Status.Prepare
	k.Status.Prepare = func(ctx context.Context, n, old *node) {
		onlyStatus(ctx, n, old)
		n.Status = old.Status
	}
	return k
}

func validateNode(spec *storagev1.CSINodeSpec) field.ErrorList {
	at := workload.At.Child("drivers")
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, driver := range spec.Drivers {
		at := at.Index(i)
		errs = append(errs, validateDriverName(at.Child("name"), driver.Name)...)
		if seen[driver.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), driver.Name))
		}
		seen[driver.Name] = true
		switch {
		case driver.NodeID == "":
			errs = append(errs, field.Required(at.Child("nodeID"), ""))
		case len(driver.NodeID) > maxNodeID:
			errs = append(errs, field.Invalid(at.Child("nodeID"), driver.NodeID, "must not be longer than 256 characters"))
		}
		if driver.Allocatable != nil {
			errs = append(errs, workload.NotNegative(at.Child("allocatable"), workload.P("count", driver.Allocatable.Count))...)
		}
		keys := map[string]bool{}
		for _, key := range driver.TopologyKeys { // they are reported at the driver, as in Kubernetes
			if key == "" {
				errs = append(errs, field.Required(at, "a topology key must not be empty"))
			}
			if keys[key] {
				errs = append(errs, field.Duplicate(at, key))
			}
			keys[key] = true
			errs = append(errs, rules.QualifiedName(at, key)...)
		}
	}
	return errs
}

// unchangedDrivers wants a driver to stay what it is as long as it is there; only how many volumes it can have may change.
func unchangedDrivers(now, before []storagev1.CSINodeDriver) field.ErrorList {
	var errs field.ErrorList
	for _, driver := range now {
		i := slices.IndexFunc(before, func(d storagev1.CSINodeDriver) bool { return d.Name == driver.Name })
		if i < 0 {
			continue
		}
		old := before[i]
		driver.Allocatable, old.Allocatable = nil, nil
		errs = append(errs, workload.Immutable(workload.At.Child("drivers"), driver, old)...)
	}
	return errs
}

package pod

import (
	// A digest in an image's name is understood for the hashes that are linked in.
	_ "crypto/sha256"
	_ "crypto/sha512"

	"github.com/distribution/reference"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// orElse sets what is still the zero value.
func orElse[T comparable](where *T, value T) {
	var zero T
	if *where == zero {
		*where = value
	}
}

// orPoint sets a pointer that is still nil.
func orPoint[T any](where **T, value T) {
	if *where == nil {
		*where = &value
	}
}

func setDefaults(pod *corev1.Pod) {
	spec := &pod.Spec
	if spec.TerminationGracePeriodSeconds != nil && *spec.TerminationGracePeriodSeconds < 0 {
		*spec.TerminationGracePeriodSeconds = 1
	}
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			requestLimits(&list[i].Resources)
			if spec.HostNetwork {
				openHostPorts(list[i].Ports)
			}
		}
	}
	orPoint(&spec.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	defaultAll(spec)
	defaultStatus(&pod.Status)
}

// defaultAll fills what Pods and the templates of Pods have alike.
func defaultAll(spec *corev1.PodSpec) {
	defaultSpec(spec)
	for i := range spec.Volumes {
		defaultVolume(&spec.Volumes[i])
	}
	for _, c := range containers(spec) {
		defaultContainer(c)
	}
	roundUp(spec.Overhead)
	if spec.Resources != nil {
		roundUp(spec.Resources.Limits)
		roundUp(spec.Resources.Requests)
	}
}

func defaultSpec(spec *corev1.PodSpec) {
	// serviceAccount is the old name of serviceAccountName: both are always there.
	orElse(&spec.ServiceAccountName, spec.DeprecatedServiceAccount)
	spec.DeprecatedServiceAccount = spec.ServiceAccountName
	orElse(&spec.DNSPolicy, corev1.DNSClusterFirst)
	orElse(&spec.RestartPolicy, corev1.RestartPolicyAlways)
	orPoint(&spec.SecurityContext, corev1.PodSecurityContext{})
	orPoint(&spec.TerminationGracePeriodSeconds, int64(corev1.DefaultTerminationGracePeriodSeconds))
	orElse(&spec.SchedulerName, corev1.DefaultSchedulerName)
}

// requestLimits asks for as much as may be used, where nothing else was asked for.
func requestLimits(r *corev1.ResourceRequirements) {
	if r.Limits == nil {
		return
	}
	if r.Requests == nil {
		r.Requests = corev1.ResourceList{}
	}
	for name, limit := range r.Limits {
		if _, asked := r.Requests[name]; !asked {
			r.Requests[name] = limit.DeepCopy()
		}
	}
}

// openHostPorts says what is true anyway of a container in the host's network.
func openHostPorts(ports []corev1.ContainerPort) {
	for i := range ports {
		orElse(&ports[i].HostPort, ports[i].ContainerPort)
	}
}

func defaultContainer(c *corev1.Container) {
	orElse(&c.ImagePullPolicy, pullPolicy(c.Image))
	orElse(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	orElse(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for i := range c.Ports {
		orElse(&c.Ports[i].Protocol, corev1.ProtocolTCP)
	}
	for i := range c.Env {
		from := c.Env[i].ValueFrom
		if from == nil {
			continue
		}
		if from.FieldRef != nil {
			orElse(&from.FieldRef.APIVersion, "v1")
		}
		if from.FileKeyRef != nil {
			orPoint(&from.FileKeyRef.Optional, false)
		}
	}
	roundUp(c.Resources.Limits)
	roundUp(c.Resources.Requests)
	for _, probe := range probes(c) {
		defaultProbe(probe)
	}
	for _, hook := range hooks(c) {
		defaultHTTP(hook.HTTPGet)
	}
}

func defaultProbe(probe *corev1.Probe) {
	orElse(&probe.TimeoutSeconds, 1)
	orElse(&probe.PeriodSeconds, 10)
	orElse(&probe.SuccessThreshold, 1)
	orElse(&probe.FailureThreshold, 3)
	defaultHTTP(probe.HTTPGet)
	if probe.GRPC != nil {
		orPoint(&probe.GRPC.Service, "")
	}
}

func defaultHTTP(get *corev1.HTTPGetAction) {
	if get == nil {
		return
	}
	orElse(&get.Path, "/")
	orElse(&get.Scheme, corev1.URISchemeHTTP)
}

// pullPolicy is to look for a newer image only where the name may come to mean another one: with the tag "latest",
// which is also meant where there is neither tag nor digest.
func pullPolicy(image string) corev1.PullPolicy {
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return corev1.PullIfNotPresent
	}
	tagged, hasTag := named.(reference.Tagged)
	_, hasDigest := named.(reference.Digested)
	if hasTag && tagged.Tag() == "latest" || !hasTag && !hasDigest {
		return corev1.PullAlways
	}
	return corev1.PullIfNotPresent
}

// roundUp keeps quantities at thousandths, which is as fine as anything downstream counts.
func roundUp(list corev1.ResourceList) {
	for name, quantity := range list {
		if quantity.RoundUp(resource.Milli) {
			continue
		}
		list[name] = quantity
	}
}

func defaultStatus(status *corev1.PodStatus) {
	switch {
	case status.PodIP == "" && len(status.PodIPs) > 0:
		status.PodIP = status.PodIPs[0].IP
	case status.PodIP != "" && (len(status.PodIPs) == 0 || status.PodIPs[0].IP != status.PodIP):
		// Where the two disagree the single field wins: older writers know no other.
		status.PodIPs = []corev1.PodIP{{IP: status.PodIP}}
	}
	for _, list := range [][]corev1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses, status.EphemeralContainerStatuses} {
		for i := range list {
			roundUp(list[i].AllocatedResources)
			if list[i].Resources != nil {
				roundUp(list[i].Resources.Limits)
				roundUp(list[i].Resources.Requests)
			}
		}
	}
}

func defaultVolume(v *corev1.Volume) {
	if v.VolumeSource == (corev1.VolumeSource{}) {
		v.EmptyDir = &corev1.EmptyDirVolumeSource{}
	}
	const readable = int32(0o644)
	switch {
	case v.HostPath != nil:
		orPoint(&v.HostPath.Type, corev1.HostPathUnset)
	case v.Secret != nil:
		orPoint(&v.Secret.DefaultMode, readable)
	case v.ConfigMap != nil:
		orPoint(&v.ConfigMap.DefaultMode, readable)
	case v.DownwardAPI != nil:
		orPoint(&v.DownwardAPI.DefaultMode, readable)
		defaultFiles(v.DownwardAPI.Items)
	case v.Projected != nil:
		orPoint(&v.Projected.DefaultMode, readable)
		for _, source := range v.Projected.Sources {
			if source.DownwardAPI != nil {
				defaultFiles(source.DownwardAPI.Items)
			}
			if source.ServiceAccountToken != nil {
				orPoint(&source.ServiceAccountToken.ExpirationSeconds, 60*60)
			}
		}
	case v.Image != nil:
		orElse(&v.Image.PullPolicy, pullPolicy(v.Image.Reference))
	default:
		defaultDisk(v)
	}
}

func defaultFiles(files []corev1.DownwardAPIVolumeFile) {
	for i := range files {
		if files[i].FieldRef != nil {
			orElse(&files[i].FieldRef.APIVersion, "v1")
		}
	}
}

// defaultDisk is for the kinds of volumes that need a storage system beside Portal.
func defaultDisk(v *corev1.Volume) {
	switch {
	case v.ISCSI != nil:
		orElse(&v.ISCSI.ISCSIInterface, "default")
	case v.RBD != nil:
		orElse(&v.RBD.RBDPool, "rbd")
		orElse(&v.RBD.RadosUser, "admin")
		orElse(&v.RBD.Keyring, "/etc/ceph/keyring")
	case v.AzureDisk != nil:
		orPoint(&v.AzureDisk.CachingMode, corev1.AzureDataDiskCachingReadWrite)
		orPoint(&v.AzureDisk.FSType, "ext4")
		orPoint(&v.AzureDisk.ReadOnly, false)
		orPoint(&v.AzureDisk.Kind, corev1.AzureSharedBlobDisk)
	case v.ScaleIO != nil:
		orElse(&v.ScaleIO.StorageMode, "ThinProvisioned")
		orElse(&v.ScaleIO.FSType, "xfs")
	case v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil:
		claim := &v.Ephemeral.VolumeClaimTemplate.Spec
		orPoint(&claim.VolumeMode, corev1.PersistentVolumeFilesystem)
		roundUp(claim.Resources.Limits)
		roundUp(claim.Resources.Requests)
	}
}

package pod

import (
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// validateVolumes validates volumes and gives the sound ones by name.
func validateVolumes(volumes []corev1.Volume, meta *metav1.ObjectMeta) (map[string]*corev1.VolumeSource, field.ErrorList) {
	sound := map[string]*corev1.VolumeSource{}
	made := map[string]bool{}
	for i := range volumes {
		if volumes[i].Ephemeral != nil && meta.Name != "" {
			made[meta.Name+"-"+volumes[i].Name] = true
		}
	}
	var errs field.ErrorList
	for i := range volumes {
		v, at := &volumes[i], atSpec.Child("volumes").Index(i)
		found := validateSource(at, v, meta)
		if v.Name == "" {
			found = append(found, field.Required(at.Child("name"), ""))
		} else {
			found = append(found, rules.DNSLabel(at.Child("name"), v.Name)...)
		}
		if sound[v.Name] != nil {
			found = append(found, field.Duplicate(at.Child("name"), v.Name))
		}
		if len(found) == 0 {
			sound[v.Name] = &v.VolumeSource
		}
		errs = append(errs, found...)
		if claim := v.PersistentVolumeClaim; claim != nil && made[claim.ClaimName] {
			errs = append(errs, field.Invalid(at.Child("persistentVolumeClaim", "claimName"), claim.ClaimName,
				"must not be one that is made for an ephemeral volume of this Pod"))
		}
	}
	return sound, errs
}

// source is a kind of volume: its field, whether it is set, and what is to be validated about it. Kinds that need a
// storage system beside Portal are counted and not looked into.
type source struct {
	name  string
	set   bool
	judge func(*field.Path) field.ErrorList
}

func sources(volume *field.Path, v *corev1.Volume, meta *metav1.ObjectMeta) []source {
	unseen := func(*field.Path) field.ErrorList { return nil }
	return []source{
		{"emptyDir", v.EmptyDir != nil, func(at *field.Path) field.ErrorList {
			if limit := v.EmptyDir.SizeLimit; limit != nil && limit.Sign() < 0 {
				return field.ErrorList{field.Forbidden(at.Child("sizeLimit"), "must not be negative")}
			}
			return nil
		}},
		{"hostPath", v.HostPath != nil, func(at *field.Path) field.ErrorList { return validateHostPath(at, v.HostPath) }},
		{"gitRepo", v.GitRepo != nil, func(at *field.Path) field.ErrorList {
			errs := required(at.Child("repository"), v.GitRepo.Repository)
			return append(errs, validateLocalPath(at.Child("directory"), v.GitRepo.Directory)...)
		}},
		{"gcePersistentDisk", v.GCEPersistentDisk != nil, unseen},
		{"awsElasticBlockStore", v.AWSElasticBlockStore != nil, unseen},
		{"secret", v.Secret != nil, func(at *field.Path) field.ErrorList {
			errs := required(at.Child("secretName"), v.Secret.SecretName)
			errs = append(errs, validateMode(at.Child("defaultMode"), v.Secret.DefaultMode)...)
			return append(errs, validateKeys(at.Child("items"), v.Secret.Items)...)
		}},
		{"nfs", v.NFS != nil, func(at *field.Path) field.ErrorList {
			errs := required(at.Child("server"), v.NFS.Server)
			errs = append(errs, required(at.Child("path"), v.NFS.Path)...)
			if !path.IsAbs(v.NFS.Path) {
				errs = append(errs, field.Invalid(at.Child("path"), v.NFS.Path, "must begin with /"))
			}
			return errs
		}},
		{"iscsi", v.ISCSI != nil, unseen},
		{"glusterfs", v.Glusterfs != nil, unseen},
		{"flocker", v.Flocker != nil, unseen},
		{"persistentVolumeClaim", v.PersistentVolumeClaim != nil, func(at *field.Path) field.ErrorList {
			return required(at.Child("claimName"), v.PersistentVolumeClaim.ClaimName)
		}},
		{"rbd", v.RBD != nil, unseen},
		{"cinder", v.Cinder != nil, unseen},
		{"cephFS", v.CephFS != nil, unseen},
		{"quobyte", v.Quobyte != nil, unseen},
		{"downwardAPI", v.DownwardAPI != nil, func(at *field.Path) field.ErrorList {
			errs := validateMode(at.Child("defaultMode"), v.DownwardAPI.DefaultMode)
			for i := range v.DownwardAPI.Items {
				errs = append(errs, validateFile(at, &v.DownwardAPI.Items[i])...)
			}
			return errs
		}},
		{"fc", v.FC != nil, unseen},
		{"flexVolume", v.FlexVolume != nil, unseen},
		{"configMap", v.ConfigMap != nil, func(at *field.Path) field.ErrorList {
			errs := required(at.Child("name"), v.ConfigMap.Name)
			errs = append(errs, validateMode(at.Child("defaultMode"), v.ConfigMap.DefaultMode)...)
			return append(errs, validateKeys(at.Child("items"), v.ConfigMap.Items)...)
		}},
		{"azureFile", v.AzureFile != nil, unseen},
		{"vsphereVolume", v.VsphereVolume != nil, unseen},
		{"photonPersistentDisk", v.PhotonPersistentDisk != nil, unseen},
		{"portworxVolume", v.PortworxVolume != nil, unseen},
		{"azureDisk", v.AzureDisk != nil, unseen},
		{"storageos", v.StorageOS != nil, unseen},
		{"projected", v.Projected != nil, func(at *field.Path) field.ErrorList { return validateProjected(at, v.Projected) }},
		{"scaleIO", v.ScaleIO != nil, unseen},
		{"csi", v.CSI != nil, func(at *field.Path) field.ErrorList { return validateCSI(at, v.CSI) }},
		{"ephemeral", v.Ephemeral != nil, func(at *field.Path) field.ErrorList { return validateEphemeral(volume, at, v, meta) }},
		{"image", v.Image != nil, func(at *field.Path) field.ErrorList {
			return append(required(at.Child("reference"), v.Image.Reference), validatePullPolicy(at.Child("pullPolicy"), v.Image.PullPolicy)...)
		}},
	}
}

// misspelt are the fields that answers have always called by another name when there is more than one source.
var misspelt = map[string]string{"downwardAPI": "downwarAPI"}

func validateSource(at *field.Path, v *corev1.Volume, meta *metav1.ObjectMeta) field.ErrorList {
	var errs field.ErrorList
	found := false
	for _, s := range sources(at, v, meta) {
		switch {
		case s.set && found:
			name := s.name
			if other, odd := misspelt[name]; odd {
				name = other
			}
			errs = append(errs, field.Forbidden(at.Child(name), "a volume has one source"))
		case s.set:
			found = true
			errs = append(errs, s.judge(at.Child(s.name))...)
		}
	}
	if !found {
		errs = append(errs, field.Required(at, "a source: emptyDir, configMap or another"))
	}
	return errs
}

func required(at *field.Path, value string) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return nil
}

func validateHostPath(at *field.Path, host *corev1.HostPathVolumeSource) field.ErrorList {
	if host.Path == "" {
		return field.ErrorList{field.Required(at.Child("path"), "")}
	}
	errs := validateNoBacksteps(at.Child("path"), host.Path)
	if host.Type != nil {
		errs = append(errs, rules.OneOf(at.Child("type"), *host.Type, corev1.HostPathUnset, corev1.HostPathDirectoryOrCreate,
			corev1.HostPathDirectory, corev1.HostPathFileOrCreate, corev1.HostPathFile, corev1.HostPathSocket,
			corev1.HostPathCharDev, corev1.HostPathBlockDev)...)
	}
	return errs
}

func validateMode(at *field.Path, mode *int32) field.ErrorList {
	if mode != nil && (*mode < 0 || *mode > 0o777) {
		return field.ErrorList{field.Invalid(at, *mode, "must be from 0 to 0777 (octal, 511 in JSON)")}
	}
	return nil
}

func validateKeys(at *field.Path, items []corev1.KeyToPath) field.ErrorList {
	var errs field.ErrorList
	for i, item := range items {
		at := at.Index(i)
		errs = append(errs, required(at.Child("key"), item.Key)...)
		errs = append(errs, required(at.Child("path"), item.Path)...)
		errs = append(errs, validateFreePath(at.Child("path"), item.Path)...)
		errs = append(errs, validateMode(at.Child("mode"), item.Mode)...)
	}
	return errs
}

func validateFile(at *field.Path, file *corev1.DownwardAPIVolumeFile) field.ErrorList {
	errs := required(at.Child("path"), file.Path)
	errs = append(errs, validateFreePath(at.Child("path"), file.Path)...)
	switch {
	case file.FieldRef != nil:
		errs = append(errs, validateFieldRef(at.Child("fieldRef"), file.FieldRef, forFiles)...)
		if file.ResourceFieldRef != nil {
			errs = append(errs, field.Invalid(at, "resource", "must be either fieldRef or resourceFieldRef"))
		}
	case file.ResourceFieldRef != nil:
		errs = append(errs, validateAmountRef(at.Child("resourceFieldRef"), file.ResourceFieldRef, true)...)
	default:
		errs = append(errs, field.Required(at, "fieldRef or resourceFieldRef"))
	}
	return append(errs, validateMode(at.Child("mode"), file.Mode)...)
}

// validateProjected validates a volume that gathers several sources: no two may write the same path.
func validateProjected(at *field.Path, projected *corev1.ProjectedVolumeSource) field.ErrorList {
	errs := validateMode(at.Child("defaultMode"), projected.DefaultMode)
	taken := map[string]bool{}
	take := func(path string) {
		if path == "" {
			return
		}
		if taken[path] {
			errs = append(errs, field.Invalid(at, path, "must not be written twice"))
		}
		taken[path] = true
	}
	for i := range projected.Sources {
		s, from := &projected.Sources[i], at.Child("sources").Index(i)
		kinds := 0
		if s.Secret != nil {
			kinds++
			errs = append(errs, required(from.Child("secret", "name"), s.Secret.Name)...)
			errs = append(errs, validateKeys(from.Child("secret", "items"), s.Secret.Items)...)
			for _, item := range s.Secret.Items {
				take(item.Path)
			}
		}
		if s.ConfigMap != nil {
			kinds++
			errs = append(errs, required(from.Child("configMap", "name"), s.ConfigMap.Name)...)
			errs = append(errs, validateKeys(from.Child("configMap", "items"), s.ConfigMap.Items)...)
			for _, item := range s.ConfigMap.Items {
				take(item.Path)
			}
		}
		if s.DownwardAPI != nil {
			kinds++
			for j := range s.DownwardAPI.Items {
				errs = append(errs, validateFile(from.Child("downwardAPI"), &s.DownwardAPI.Items[j])...)
				take(s.DownwardAPI.Items[j].Path)
			}
		}
		if s.ServiceAccountToken != nil {
			kinds++
			errs = append(errs, validateToken(at, from.Child("serviceAccountToken"), s.ServiceAccountToken)...)
		}
		if s.ClusterTrustBundle != nil {
			kinds++
			errs = append(errs, validateTrust(from.Child("clusterTrustBundle"), s.ClusterTrustBundle)...)
			take(s.ClusterTrustBundle.Path)
		}
		if s.PodCertificate != nil {
			kinds++
			errs = append(errs, validateCertificate(from.Child("podCertificate"), s.PodCertificate)...)
			take(s.PodCertificate.CredentialBundlePath)
			take(s.PodCertificate.KeyPath)
			take(s.PodCertificate.CertificateChainPath)
		}
		if kinds > 1 {
			errs = append(errs, field.Forbidden(from, "must be of one kind"))
		}
	}
	return errs
}

func validateToken(volume, at *field.Path, token *corev1.ServiceAccountTokenProjection) field.ErrorList {
	var errs field.ErrorList
	const shortest, longest = 10 * 60, 1 << 32
	switch seconds := token.ExpirationSeconds; {
	case seconds == nil:
		errs = append(errs, field.Required(at.Child("expirationSeconds"), ""))
	case *seconds < shortest || *seconds > longest:
		errs = append(errs, field.Invalid(at.Child("expirationSeconds"), *seconds, "must be from 600 to 4294967296"))
	}
	if token.Path == "" {
		return append(errs, field.Required(volume.Child("path"), ""))
	}
	return append(errs, validateFreePath(volume.Child("path"), token.Path)...)
}

func validateCSI(at *field.Path, csi *corev1.CSIVolumeSource) field.ErrorList {
	const longest = 63
	errs := required(at.Child("driver"), csi.Driver)
	if len(csi.Driver) > longest {
		errs = append(errs, field.TooLong(at.Child("driver"), "", longest))
	}
	if csi.Driver != "" {
		errs = append(errs, rules.DNSSubdomain(at.Child("driver"), strings.ToLower(csi.Driver))...)
	}
	if secret := csi.NodePublishSecretRef; secret != nil {
		if secret.Name == "" {
			errs = append(errs, field.Required(at.Child("nodePublishSecretRef", "name"), ""))
		} else {
			errs = append(errs, rules.DNSSubdomain(at.Child("name"), secret.Name)...)
		}
	}
	return errs
}

// validateEphemeral validates a claim that is made together with the Pod as far as its name and its size.
func validateEphemeral(volume, at *field.Path, v *corev1.Volume, meta *metav1.ObjectMeta) field.ErrorList {
	template := at.Child("volumeClaimTemplate")
	var errs field.ErrorList
	if claim := v.Ephemeral.VolumeClaimTemplate; claim == nil {
		errs = append(errs, field.Required(template, ""))
	} else {
		spec := template.Child("spec")
		if len(claim.Spec.AccessModes) == 0 {
			errs = append(errs, field.Required(spec.Child("accessModes"), ""))
		}
		size, asked := claim.Spec.Resources.Requests[corev1.ResourceStorage]
		switch {
		case !asked:
			errs = append(errs, field.Required(spec.Child("resources").Key(string(corev1.ResourceStorage)), ""))
		case size.Sign() <= 0:
			errs = append(errs, field.Invalid(spec.Child("resources").Key(string(corev1.ResourceStorage)), size.String(), "must be more than 0"))
		}
	}
	if meta.Name != "" && v.Name != "" {
		for _, err := range rules.DNSSubdomain(volume.Child("name"), meta.Name+"-"+v.Name) {
			err.Detail = "makes the claim's name, behind the Pod's: " + err.Detail
			errs = append(errs, err)
		}
	}
	return errs
}

// validateNoBacksteps rejects paths that lead out of where they begin.
func validateNoBacksteps(at *field.Path, text string) field.ErrorList {
	for _, part := range strings.Split(text, "/") {
		if part == ".." {
			return field.ErrorList{field.Invalid(at, text, "must not contain \"..\"")}
		}
	}
	return nil
}

// validateLocalPath wants a path below a place.
func validateLocalPath(at *field.Path, text string) field.ErrorList {
	var errs field.ErrorList
	if path.IsAbs(text) {
		errs = append(errs, field.Invalid(at, text, "must not begin with /"))
	}
	return append(errs, validateNoBacksteps(at, text)...)
}

// validateFreePath wants a path below a place that isn't one of those that are kept for turning versions over.
func validateFreePath(at *field.Path, text string) field.ErrorList {
	errs := validateLocalPath(at, text)
	if strings.HasPrefix(text, "..") && !strings.HasPrefix(text, "../") {
		errs = append(errs, field.Invalid(at, text, "must not begin with \"..\""))
	}
	return errs
}

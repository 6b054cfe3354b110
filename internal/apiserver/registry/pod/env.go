package pod

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// What of a Pod its own containers can be told, in variables and in files.
var (
	forVariables = map[string]bool{
		"metadata.name": true, "metadata.namespace": true, "metadata.uid": true,
		"spec.nodeName": true, "spec.serviceAccountName": true,
		"status.hostIP": true, "status.hostIPs": true, "status.podIP": true, "status.podIPs": true,
	}
	forFiles = map[string]bool{
		"metadata.name": true, "metadata.namespace": true, "metadata.labels": true, "metadata.annotations": true, "metadata.uid": true,
	}
	// known are paths that mean something, if not everywhere.
	known = map[string]bool{"spec.restartPolicy": true, "spec.schedulerName": true, "status.phase": true, "spec.host": true}
	// amounts are what of a container's resources it can be told.
	amounts = map[string]bool{
		"limits.cpu": true, "limits.memory": true, "limits.ephemeral-storage": true,
		"requests.cpu": true, "requests.memory": true, "requests.ephemeral-storage": true,
	}
)

func validateEnv(at *field.Path, c *corev1.Container) field.ErrorList {
	var errs field.ErrorList
	for i := range c.Env {
		at, variable := at.Child("env").Index(i), &c.Env[i]
		if variable.Name == "" {
			errs = append(errs, field.Required(at.Child("name"), ""))
		} else {
			errs = append(errs, rules.Each(at.Child("name"), variable.Name, validation.IsRelaxedEnvVarName(variable.Name))...)
		}
		if variable.ValueFrom != nil {
			errs = append(errs, validateValueFrom(at.Child("valueFrom"), variable)...)
		}
	}
	list := at.Child("envFrom")
	for i := range c.EnvFrom {
		at, from := list.Index(i), &c.EnvFrom[i]
		if from.Prefix != "" {
			errs = append(errs, rules.Each(at.Child("prefix"), from.Prefix, validation.IsRelaxedEnvVarName(from.Prefix))...)
		}
		if from.ConfigMapRef != nil {
			errs = append(errs, validateReference(at.Child("configMapRef", "name"), from.ConfigMapRef.Name)...)
		}
		if from.SecretRef != nil {
			errs = append(errs, validateReference(at.Child("secretRef", "name"), from.SecretRef.Name)...)
		}
		if (from.ConfigMapRef == nil) == (from.SecretRef == nil) {
			errs = append(errs, field.Invalid(list, "", "each must be either a configMapRef or a secretRef"))
		}
	}
	return errs
}

func validateReference(at *field.Path, name string) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return rules.Each(at, name, apivalidation.NameIsDNSSubdomain(name, true))
}

func validateValueFrom(at *field.Path, variable *corev1.EnvVar) field.ErrorList {
	from := variable.ValueFrom
	var errs field.ErrorList
	sources := 0
	for _, source := range []struct {
		name  string
		set   bool
		judge func(*field.Path) field.ErrorList
	}{
		{"fieldRef", from.FieldRef != nil, func(at *field.Path) field.ErrorList { return validateFieldRef(at, from.FieldRef, forVariables) }},
		{"resourceFieldRef", from.ResourceFieldRef != nil, func(at *field.Path) field.ErrorList {
			return validateAmountRef(at,
				from.ResourceFieldRef, false)
		}},
		{"configMapKeyRef", from.ConfigMapKeyRef != nil, func(at *field.Path) field.ErrorList {
			return validateKeyRef(at, from.ConfigMapKeyRef.Name, from.ConfigMapKeyRef.Key)
		}},
		{"secretKeyRef", from.SecretKeyRef != nil, func(at *field.Path) field.ErrorList {
			return validateKeyRef(at, from.SecretKeyRef.Name, from.SecretKeyRef.Key)
		}},
		{"fileKeyRef", from.FileKeyRef != nil, func(at *field.Path) field.ErrorList { return validateFileRef(at, from.FileKeyRef) }},
	} {
		if source.set {
			sources++
			errs = append(errs, source.judge(at.Child(source.name))...)
		}
	}
	switch {
	case sources == 0:
		errs = append(errs, field.Invalid(at, "", "must say where from: fieldRef, resourceFieldRef, configMapKeyRef, secretKeyRef or fileKeyRef"))
	case variable.Value != "":
		errs = append(errs, field.Invalid(at, "", "cannot be beside value"))
	case sources > 1:
		errs = append(errs, field.Invalid(at, "", "must be from one place"))
	}
	return errs
}

func validateKeyRef(at *field.Path, name, key string) field.ErrorList {
	errs := rules.DNSSubdomain(at.Child("name"), name)
	if key == "" {
		return append(errs, field.Required(at.Child("key"), ""))
	}
	return append(errs, rules.Each(at.Child("key"), key, validation.IsConfigMapKey(key))...)
}

func validateFileRef(at *field.Path, ref *corev1.FileKeySelector) field.ErrorList {
	var errs field.ErrorList
	for _, part := range []struct {
		name, value string
		judge       func(*field.Path, string) field.ErrorList
	}{
		{"key", ref.Key, func(at *field.Path, key string) field.ErrorList {
			return rules.Each(at, key, validation.IsRelaxedEnvVarName(key))
		}},
		{"volumeName", ref.VolumeName, rules.DNSLabel},
		{"path", ref.Path, validateNoBacksteps},
	} {
		if part.value == "" {
			errs = append(errs, field.Required(at.Child(part.name), ""))
			continue
		}
		errs = append(errs, part.judge(at.Child(part.name), part.value)...)
	}
	return errs
}

// validateEnvFiles wants the files that variables come from to be in an emptyDir, where another container writes them.
func validateEnvFiles(spec *corev1.PodSpec) field.ErrorList {
	sources := map[string]*corev1.VolumeSource{}
	for i := range spec.Volumes {
		sources[spec.Volumes[i].Name] = &spec.Volumes[i].VolumeSource
	}
	var errs field.ErrorList
	for at, c := range containers(spec) {
		for i := range c.Env {
			if c.Env[i].ValueFrom == nil || c.Env[i].ValueFrom.FileKeyRef == nil {
				continue
			}
			name := c.Env[i].ValueFrom.FileKeyRef.VolumeName
			at := at.Child("env").Index(i).Child("valueFrom", "fileKeyRef", "volumeName")
			if source := sources[name]; source == nil {
				errs = append(errs, field.NotFound(at, name))
			} else if source.EmptyDir == nil {
				errs = append(errs, field.Invalid(at, name, "must be an emptyDir"))
			}
		}
	}
	return errs
}

func validateFieldRef(at *field.Path, ref *corev1.ObjectFieldSelector, allowed map[string]bool) field.ErrorList {
	if ref.FieldPath == "" {
		return field.ErrorList{field.Required(at.Child("fieldPath"), "")}
	}
	path, key, keyed := splitKey(ref.FieldPath)
	switch {
	case ref.APIVersion != "v1":
		return field.ErrorList{field.Invalid(at.Child("fieldPath"), ref.FieldPath, "is of a Pod of apiVersion v1")}
	case keyed && path == "metadata.labels":
		return rules.QualifiedName(at, key)
	case keyed && path == "metadata.annotations":
		return rules.QualifiedName(at, strings.ToLower(key))
	case keyed, !forVariables[path] && !forFiles[path] && !known[path]:
		return field.ErrorList{field.Invalid(at.Child("fieldPath"), ref.FieldPath,
			"must be a path that can be asked for, such as metadata.name or metadata.labels['app']")}
	}
	if path == "spec.host" {
		path = "spec.nodeName"
	}
	return rules.OneOf(at.Child("fieldPath"), path, slices.Sorted(maps.Keys(allowed))...)
}

// splitKey takes metadata.labels['app'] apart.
func splitKey(text string) (path, key string, keyed bool) {
	inner, closed := strings.CutSuffix(text, "']")
	path, key, opened := strings.Cut(inner, "['")
	if !closed || !opened || path == "" {
		return text, "", false
	}
	return path, key, true
}

func validateAmountRef(at *field.Path, ref *corev1.ResourceFieldSelector, inFile bool) field.ErrorList {
	huge := strings.HasPrefix(ref.Resource, "requests.hugepages-") || strings.HasPrefix(ref.Resource, "limits.hugepages-")
	var errs field.ErrorList
	switch {
	case inFile && ref.ContainerName == "":
		errs = append(errs, field.Required(at.Child("containerName"), ""))
	case ref.Resource == "":
		errs = append(errs, field.Required(at.Child("resource"), ""))
	case !amounts[ref.Resource] && !huge:
		errs = append(errs, field.NotSupported(at.Child("resource"), ref.Resource, slices.Sorted(maps.Keys(amounts))))
	}
	if ref.Divisor.IsZero() || !amounts[ref.Resource] && !huge {
		return errs
	}
	units := []string{"1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"}
	if strings.HasSuffix(ref.Resource, ".cpu") {
		units = []string{"1m", "1"}
	}
	if !slices.Contains(units, ref.Divisor.String()) {
		errs = append(errs, field.Invalid(at.Child("divisor"), ref.Divisor.String(), "must be one of "+strings.Join(units, ", ")))
	}
	return errs
}

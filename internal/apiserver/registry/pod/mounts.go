package pod

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// validateMounts validates where a container sees volumes, as directories or as devices.
func validateMounts(at *field.Path, c *corev1.Container, volumes map[string]*corev1.VolumeSource) field.ErrorList {
	mounted, devices := map[string]string{}, map[string]string{}
	for _, mount := range c.VolumeMounts {
		mounted[mount.Name] = mount.MountPath
	}
	for _, device := range c.VolumeDevices {
		devices[device.Name] = device.DevicePath
	}
	var errs field.ErrorList
	paths := map[string]bool{}
	for i := range c.VolumeMounts {
		errs = append(errs, validateMount(at.Child("volumeMounts"), i, c, paths, devices, volumes)...)
	}
	return append(errs, validateDevices(at.Child("volumeDevices"), c.VolumeDevices, mounted, volumes)...)
}

func validateMount(list *field.Path, i int, c *corev1.Container, paths map[string]bool, devices map[string]string,
	volumes map[string]*corev1.VolumeSource) field.ErrorList {
	mount, at := &c.VolumeMounts[i], list.Index(i)
	errs := required(at.Child("name"), mount.Name)
	if volumes[mount.Name] == nil {
		errs = append(errs, field.NotFound(at.Child("name"), mount.Name))
	}
	errs = append(errs, required(at.Child("mountPath"), mount.MountPath)...)
	if paths[mount.MountPath] {
		errs = append(errs, field.Invalid(at.Child("mountPath"), mount.MountPath, "must not be used twice"))
	}
	paths[mount.MountPath] = true
	if _, device := devices[mount.Name]; device {
		errs = append(errs, field.Invalid(at.Child("name"), mount.Name, "must not be in volumeDevices too"))
	}
	if valueIn(devices, mount.MountPath) {
		errs = append(errs, field.Invalid(at.Child("mountPath"), mount.MountPath, "must not be a device's path too"))
	}
	// The paths of these errors lack the place in the list, as they always have.
	if mount.SubPath != "" {
		errs = append(errs, validateLocalPath(list.Child("subPath"), mount.SubPath)...)
	}
	if mount.SubPathExpr != "" {
		if mount.SubPath != "" {
			errs = append(errs, field.Invalid(at.Child("subPathExpr"), mount.SubPathExpr, "cannot be beside subPath"))
		}
		errs = append(errs, validateLocalPath(list.Child("subPathExpr"), mount.SubPathExpr)...)
	}
	if mount.MountPropagation != nil {
		errs = append(errs, rules.OneOf(list.Child("mountPropagation"), *mount.MountPropagation,
			corev1.MountPropagationBidirectional, corev1.MountPropagationHostToContainer, corev1.MountPropagationNone)...)
		privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
		if *mount.MountPropagation == corev1.MountPropagationBidirectional && !privileged {
			errs = append(errs, field.Forbidden(list.Child("mountPropagation"), "Bidirectional is for privileged containers"))
		}
	}
	return append(errs, validateReadOnly(list.Child("recursiveReadOnly"), mount)...)
}

func validateReadOnly(at *field.Path, mount *corev1.VolumeMount) field.ErrorList {
	if mount.RecursiveReadOnly == nil {
		return nil
	}
	errs := rules.OneOf(at, *mount.RecursiveReadOnly, corev1.RecursiveReadOnlyDisabled, corev1.RecursiveReadOnlyIfPossible,
		corev1.RecursiveReadOnlyEnabled)
	if len(errs) > 0 || *mount.RecursiveReadOnly == corev1.RecursiveReadOnlyDisabled {
		return errs
	}
	if !mount.ReadOnly {
		errs = append(errs, field.Forbidden(at, "needs readOnly"))
	}
	if mount.MountPropagation != nil && *mount.MountPropagation != corev1.MountPropagationNone {
		errs = append(errs, field.Forbidden(at, "cannot be together with mountPropagation"))
	}
	return errs
}

func validateDevices(list *field.Path, devices []corev1.VolumeDevice, mounted map[string]string,
	volumes map[string]*corev1.VolumeSource) field.ErrorList {
	var errs field.ErrorList
	names, paths := map[string]bool{}, map[string]bool{}
	for i, device := range devices {
		at := list.Index(i)
		errs = append(errs, required(at.Child("name"), device.Name)...)
		if names[device.Name] {
			errs = append(errs, field.Invalid(at.Child("name"), device.Name, "must not be used twice"))
		}
		names[device.Name] = device.Name != ""
		switch source := volumes[device.Name]; {
		case source == nil:
			errs = append(errs, field.NotFound(at.Child("name"), device.Name))
		case source.PersistentVolumeClaim == nil && source.Ephemeral == nil:
			errs = append(errs, field.Invalid(at.Child("name"), device.Name, "must be a persistentVolumeClaim or an ephemeral volume"))
		}
		errs = append(errs, required(at.Child("devicePath"), device.DevicePath)...)
		if paths[device.DevicePath] {
			errs = append(errs, field.Invalid(at.Child("devicePath"), device.DevicePath, "must not be used twice"))
		}
		if back := validateNoBacksteps(at.Child("devicePath"), device.DevicePath); len(back) > 0 {
			errs = append(errs, back...)
		} else {
			paths[device.DevicePath] = true
		}
		if _, mount := mounted[device.Name]; mount {
			errs = append(errs, field.Invalid(at.Child("name"), device.Name, "must not be in volumeMounts too"))
		}
		if valueIn(mounted, device.DevicePath) {
			errs = append(errs, field.Invalid(at.Child("devicePath"), device.DevicePath, "must not be a mount's path too"))
		}
	}
	return errs
}

func valueIn(m map[string]string, value string) bool {
	for _, v := range m {
		if v == value {
			return true
		}
	}
	return false
}

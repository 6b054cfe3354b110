package node

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"portal/internal/node/runtime"
	"portal/internal/node/runtime/shim"
	"portal/internal/node/spec"
)

// Volumes are folders below the data directory. Those with secrets, and those that are asked to be in memory, are a tmpfs that only the
// Pod's shim and containers see; this process reaches them through the shim.

func (a *Agent) volumesDir(uid types.UID) string {
	return filepath.Join(a.DataDir, "volumes", string(uid))
}

func (a *Agent) volume(pod *corev1.Pod, name string) string {
	return filepath.Join(a.volumesDir(pod.UID), name)
}

func (a *Agent) shm(pod *corev1.Pod) string { return a.volume(pod, ".shm") }

func volumeOf(pod *corev1.Pod, name string) *corev1.Volume {
	for i := range pod.Spec.Volumes {
		if pod.Spec.Volumes[i].Name == name {
			return &pod.Spec.Volumes[i]
		}
	}
	return nil
}

// written says whether a volume's files are written by the agent.
func written(v *corev1.Volume) bool {
	return v.ConfigMap != nil || v.Secret != nil || v.DownwardAPI != nil || v.Projected != nil
}

func readOnlyVolume(pod *corev1.Pod, name string) bool {
	v := volumeOf(pod, name)
	return v != nil && written(v)
}

// tmpfs are the volumes that are in memory.
func (a *Agent) tmpfs(pod *corev1.Pod) (out []shim.Tmpfs) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		switch {
		case v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory:
			out = append(out, shim.Tmpfs{Path: a.volume(pod, v.Name), Mode: "1777", Size: memoryBound(pod, v.EmptyDir, a.host.capacity.Memory().Value())})
		case written(v):
			out = append(out, shim.Tmpfs{Path: a.volume(pod, v.Name), Mode: "755", Size: 16 << 20})
		}
	}
	return out
}

// memoryBound is the most that a volume in memory may take: its limit, or what the Pod's containers may have together, or the node's
// memory; the smallest counts.
func memoryBound(pod *corev1.Pod, v *corev1.EmptyDirVolumeSource, node int64) int64 {
	bound, pods := node, int64(0)
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		limit := c.Resources.Limits.Memory().Value()
		if limit == 0 {
			pods = 0
			break
		}
		pods += limit
	}
	if pods > 0 {
		bound = min(bound, pods)
	}
	if v.SizeLimit != nil && v.SizeLimit.Value() > 0 {
		bound = min(bound, v.SizeLimit.Value())
	}
	return bound
}

// volumePath is where a volume is, in the shim's mount namespace.
func (a *Agent) volumePath(pod *corev1.Pod, name string) (string, error) {
	v := volumeOf(pod, name)
	switch {
	case v == nil:
		return "", fmt.Errorf("volumeMounts: there is no volume %q", name)
	case v.HostPath != nil:
		return v.HostPath.Path, nil
	case v.EmptyDir != nil || written(v):
		return a.volume(pod, name), nil
	}
	return "", fmt.Errorf("volume %s: is of a kind that this node does not have; use emptyDir, hostPath, configMap, secret, downwardAPI or projected", name)
}

// volumeError is why a volume could not be made.
type volumeError struct {
	volume string
	err    error
}

func (e *volumeError) Error() string { return fmt.Sprintf("volume %s: %v", e.volume, e.err) }
func (e *volumeError) Unwrap() error { return e.err }

// makeVolumes makes the folders, and writes the files.
func (a *Agent) makeVolumes(ctx context.Context, pod *corev1.Pod, sandbox *runtime.Pod, from fileSources) error {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if err := a.makeVolume(ctx, pod, v, sandbox, from); err != nil {
			return &volumeError{v.Name, err}
		}
	}
	return nil
}

func (a *Agent) makeVolume(ctx context.Context, pod *corev1.Pod, v *corev1.Volume, sandbox *runtime.Pod, from fileSources) error {
	path := a.volume(pod, v.Name)
	switch {
	case v.HostPath != nil:
		return hostPath(v.HostPath)
	case v.EmptyDir != nil:
		if v.EmptyDir.Medium == corev1.StorageMediumMemory {
			path = sandbox.Inside(path)
		} else if err := os.MkdirAll(path, 0o777); err != nil {
			return err
		}
		if err := os.Chmod(path, 0o777); err != nil {
			return err
		}
		return own(path, pod, 0o2777)
	case written(v):
		files, err := a.files(ctx, pod, v, from)
		if err != nil {
			return err
		}
		return writeFiles(sandbox.Inside(path), files, pod)
	}
	_, err := a.volumePath(pod, v.Name)
	return err
}

// own gives a volume to the group that its Pod's processes have.
func own(path string, pod *corev1.Pod, mode os.FileMode) error {
	s := pod.Spec.SecurityContext
	if s == nil || s.FSGroup == nil {
		return nil
	}
	if err := os.Chown(path, -1, int(*s.FSGroup)); err != nil {
		return err
	}
	return os.Chmod(path, mode&0o777|os.ModeSetgid)
}

// hostPath checks, or makes, what a path of the node should be.
func hostPath(h *corev1.HostPathVolumeSource) error {
	kind := ptr.Deref(h.Type, corev1.HostPathUnset)
	st, err := os.Stat(h.Path)
	missing := os.IsNotExist(err)
	switch kind {
	case corev1.HostPathUnset, corev1.HostPathDirectoryOrCreate: // without a type, nothing is checked, and runtimes make a folder
		if missing {
			return os.MkdirAll(h.Path, 0o755)
		}
	case corev1.HostPathFileOrCreate:
		if missing {
			f, err := os.OpenFile(h.Path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err == nil {
				err = f.Close()
			}
			return err
		}
	}
	if err != nil {
		return err
	}
	is := map[corev1.HostPathType]bool{
		corev1.HostPathUnset: true, corev1.HostPathDirectoryOrCreate: st.IsDir(), corev1.HostPathDirectory: st.IsDir(),
		corev1.HostPathFileOrCreate: st.Mode().IsRegular(), corev1.HostPathFile: st.Mode().IsRegular(), corev1.HostPathSocket: st.Mode()&os.ModeSocket != 0,
		corev1.HostPathCharDev: st.Mode()&os.ModeCharDevice != 0, corev1.HostPathBlockDev: st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0,
	}
	if !is[kind] {
		return fmt.Errorf("hostPath %s: is not a %s", h.Path, kind)
	}
	return nil
}

// file is one that the agent writes.
type file struct {
	data []byte
	mode os.FileMode
}

// fileSources is where the content of volumes comes from.
type fileSources struct {
	objects      spec.Objects
	tokens       *podTokens
	certificates *podCertificates
	addrs        []netip.Addr
}

// files are those of a volume, by their path in it.
func (a *Agent) files(ctx context.Context, pod *corev1.Pod, v *corev1.Volume, from fileSources) (map[string]file, error) {
	out := map[string]file{}
	objects, addrs := from.objects, from.addrs
	switch {
	case v.ConfigMap != nil:
		s := v.ConfigMap
		return out, fromConfigMap(out, objects, s.Name, s.Items, mode(s.DefaultMode), s.Optional)
	case v.Secret != nil:
		s := v.Secret
		return out, fromSecret(out, objects, s.SecretName, s.Items, mode(s.DefaultMode), s.Optional)
	case v.DownwardAPI != nil:
		return out, a.fromDownward(out, pod, v.DownwardAPI.Items, mode(v.DownwardAPI.DefaultMode), addrs)
	}
	m := mode(v.Projected.DefaultMode)
	for i, s := range v.Projected.Sources {
		var err error
		switch {
		case s.ConfigMap != nil:
			err = fromConfigMap(out, objects, s.ConfigMap.Name, s.ConfigMap.Items, m, s.ConfigMap.Optional)
		case s.Secret != nil:
			err = fromSecret(out, objects, s.Secret.Name, s.Secret.Items, m, s.Secret.Optional)
		case s.DownwardAPI != nil:
			err = a.fromDownward(out, pod, s.DownwardAPI.Items, m, addrs)
		case s.ServiceAccountToken != nil:
			err = fromToken(ctx, out, pod, s.ServiceAccountToken, m, from.tokens)
		case s.ClusterTrustBundle != nil:
			err = fromBundles(ctx, out, s.ClusterTrustBundle, m, a.bundles)
		case s.PodCertificate != nil:
			var c *credential
			if c, err = from.certificates.get(ctx, pod, certificateKey{v.Name, i}, s.PodCertificate); err == nil {
				c.put(out, s.PodCertificate, secretMode(pod, m))
			}
		default:
			err = fmt.Errorf("projected: has a source of a kind that this node does not have")
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func mode(m *int32) os.FileMode { return os.FileMode(ptr.Deref(m, 0o644)) & 0o777 }

func fromConfigMap(out map[string]file, objects spec.Objects, name string, items []corev1.KeyToPath, m os.FileMode, optional *bool) error {
	c, err := objects.ConfigMap(name)
	if err != nil {
		return unlessOptional(err, optional)
	}
	all := map[string][]byte{}
	for k, v := range c.Data {
		all[k] = []byte(v)
	}
	maps.Copy(all, c.BinaryData)
	return pick(out, "ConfigMap "+name, all, items, m, optional)
}

func fromSecret(out map[string]file, objects spec.Objects, name string, items []corev1.KeyToPath, m os.FileMode, optional *bool) error {
	s, err := objects.Secret(name)
	if err != nil {
		return unlessOptional(err, optional)
	}
	return pick(out, "Secret "+name, s.Data, items, m, optional)
}

func unlessOptional(err error, optional *bool) error {
	if _, missing := err.(*spec.MissingError); missing && ptr.Deref(optional, false) {
		return nil
	}
	return err
}

// pick takes all keys, or those that are listed.
func pick(out map[string]file, from string, all map[string][]byte, items []corev1.KeyToPath, m os.FileMode, optional *bool) error {
	if len(items) == 0 {
		for k, v := range all {
			out[k] = file{v, m}
		}
		return nil
	}
	for _, item := range items {
		data, ok := all[item.Key]
		if !ok {
			if ptr.Deref(optional, false) {
				continue
			}
			return fmt.Errorf("%s has no key %q", from, item.Key)
		}
		f := file{data, m}
		if item.Mode != nil {
			f.mode = mode(item.Mode)
		}
		out[item.Path] = f
	}
	return nil
}

func (a *Agent) fromDownward(out map[string]file, pod *corev1.Pod, items []corev1.DownwardAPIVolumeFile, m os.FileMode, addrs []netip.Addr) error {
	facts := spec.Facts{PodIPs: addrs, HostIPs: a.NodeIPs, Allocatable: a.host.capacity}
	for _, item := range items {
		var text string
		var err error
		switch {
		case item.FieldRef != nil:
			text, err = spec.Field(pod, item.FieldRef.FieldPath, facts)
		case item.ResourceFieldRef != nil:
			text, err = spec.Resource(pod, &corev1.Container{}, item.ResourceFieldRef, facts)
		}
		if err != nil {
			return err
		}
		f := file{[]byte(text), m}
		if item.Mode != nil {
			f.mode = mode(item.Mode)
		}
		out[item.Path] = f
	}
	return nil
}

func fromToken(ctx context.Context, out map[string]file, pod *corev1.Pod, t *corev1.ServiceAccountTokenProjection, m os.FileMode, tokens *podTokens) error {
	text, err := tokens.get(ctx, pod, t)
	if err != nil {
		return fmt.Errorf("a token for ServiceAccount %s: %w", pod.Spec.ServiceAccountName, err)
	}
	out[t.Path] = file{[]byte(text), secretMode(pod, m)}
	return nil
}

// secretMode is the mode of a file with a secret of the Pod's own: only its user reads it, unless somebody else has to.
func secretMode(pod *corev1.Pod, m os.FileMode) os.FileMode {
	if s := pod.Spec.SecurityContext; s != nil && s.FSGroup != nil {
		return 0o640
	}
	if m == 0o644 && !anyUser(pod) {
		return 0o600
	}
	return m
}

// anyUser says whether some container runs as a user that is not root.
func anyUser(pod *corev1.Pod) bool {
	set := func(n *int64) bool { return n != nil && *n != 0 }
	if s := pod.Spec.SecurityContext; s != nil && set(s.RunAsUser) {
		return true
	}
	return slices.ContainsFunc(slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers), func(c corev1.Container) bool {
		return c.SecurityContext != nil && set(c.SecurityContext.RunAsUser) || c.Image != "host"
	})
}

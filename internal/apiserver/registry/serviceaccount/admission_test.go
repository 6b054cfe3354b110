package serviceaccount

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

var (
	yes, no = true, false
	someone = &user.DefaultInfo{Name: "joe"}
	admin   = &user.DefaultInfo{Name: "admin", Groups: []string{user.SystemPrivilegedGroup}}
	node    = &user.DefaultInfo{Name: "system:node:n", Groups: []string{user.NodesGroup}}
)

// admit sends a Pod through both passes.
func admit(t *testing.T, p *Admission, pod *corev1.Pod, who user.Info) error {
	t.Helper()
	a := admission.NewAttributesRecord(pod, nil, corev1.SchemeGroupVersion.WithKind("Pod"), "x", pod.Name,
		corev1.SchemeGroupVersion.WithResource("pods"), "", admission.Create, &metav1.CreateOptions{}, false, who)
	if err := p.Admit(t.Context(), a, nil); err != nil {
		return err
	}
	return p.Validate(t.Context(), a, nil)
}

func bare(name string) *corev1.ServiceAccount {
	return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "x"}}
}

func plugin(accounts ...*corev1.ServiceAccount) *Admission {
	p := NewAdmission()
	p.Get = func(_ context.Context, resource, namespace, name string, _ bool) (metav1.Object, error) {
		for _, a := range accounts {
			if resource == "serviceaccounts" && namespace == "x" && a.Name == name {
				return a, nil
			}
		}
		return nil, apierrors.NewNotFound(corev1.Resource(resource), name)
	}
	return p
}

func pod(change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "x"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c"}}, InitContainers: []corev1.Container{{Name: "i"}},
	}}
	if change != nil {
		change(p)
	}
	return p
}

func TestAccountsOfPods(t *testing.T) {
	quiet := bare("quiet")
	quiet.AutomountServiceAccountToken = &no
	pulls := bare("pulls")
	pulls.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "registry"}}
	p := plugin(bare("default"), quiet, pulls)
	mounted := func(at string) corev1.VolumeMount { return corev1.VolumeMount{Name: "mine", MountPath: at} }
	for _, c := range []struct {
		name    string
		change  func(*corev1.Pod)
		account string
		mounts  [2]int // of the container, and of the init container
		volumes int
		pulls   string
	}{
		{"nothing said", nil, "default", [2]int{1, 1}, 1, ""},
		{"an account", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "pulls" }, "pulls", [2]int{1, 1}, 1, "registry"},
		{"pull secrets of its own", func(p *corev1.Pod) {
			p.Spec.ServiceAccountName, p.Spec.ImagePullSecrets = "pulls", []corev1.LocalObjectReference{{Name: "own"}}
		}, "pulls", [2]int{1, 1}, 1, "own"},
		{"the account wants no token", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "quiet" }, "quiet", [2]int{}, 0, ""},
		{"but the Pod does", func(p *corev1.Pod) {
			p.Spec.ServiceAccountName, p.Spec.AutomountServiceAccountToken = "quiet", &yes
		}, "quiet", [2]int{1, 1}, 1, ""},
		{"the Pod wants no token", func(p *corev1.Pod) { p.Spec.AutomountServiceAccountToken = &no }, "default", [2]int{}, 0, ""},
		{"a container has its own", func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts = append([]corev1.VolumeMount(nil), mounted(mountPath))
		}, "default", [2]int{1, 1}, 1, ""},
		{"all have their own", func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{mounted(mountPath)}
			p.Spec.InitContainers[0].VolumeMounts = []corev1.VolumeMount{mounted(mountPath)}
		}, "default", [2]int{1, 1}, 0, ""},
		{"a volume of that name", func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: volumePrefix + "mine"}} }, "default", [2]int{1, 1}, 1, ""},
	} {
		got := pod(c.change)
		if err := admit(t, p, got, someone); err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var pulled []string
		for _, s := range got.Spec.ImagePullSecrets {
			pulled = append(pulled, s.Name)
		}
		if got.Spec.ServiceAccountName != c.account || len(got.Spec.Containers[0].VolumeMounts) != c.mounts[0] ||
			len(got.Spec.InitContainers[0].VolumeMounts) != c.mounts[1] || len(got.Spec.Volumes) != c.volumes || strings.Join(pulled, ",") != c.pulls {
			t.Errorf("%s: account %q, mounts %v and %v, %d volumes, pulls with %q", c.name, got.Spec.ServiceAccountName,
				got.Spec.Containers[0].VolumeMounts, got.Spec.InitContainers[0].VolumeMounts, len(got.Spec.Volumes), pulled)
		}
	}
	if err := admit(t, p, pod(func(p *corev1.Pod) { p.Spec.ServiceAccountName = "none" }), someone); !apierrors.IsForbidden(err) {
		t.Errorf("a missing account: %v", err)
	}
}

// TestMirrorPods: mirror Pods stay as they are, and get nothing by what they name, whoever creates them.
func TestMirrorPods(t *testing.T) {
	p := plugin(bare("default"))
	mirror := func(change func(*corev1.Pod)) *corev1.Pod {
		out := pod(change)
		out.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		return out
	}
	plain := mirror(nil)
	if err := admit(t, p, plain, node); err != nil || plain.Spec.ServiceAccountName != "" || len(plain.Spec.Volumes) > 0 {
		t.Errorf("became %+v: %v", plain.Spec, err)
	}
	volume := func(v corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: v}} }
	}
	for name, change := range map[string]func(*corev1.Pod){
		"an account":  func(p *corev1.Pod) { p.Spec.ServiceAccountName = "default" },
		"a Secret":    volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s"}}),
		"a driver's":  volume(corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{NodePublishSecretRef: &corev1.LocalObjectReference{Name: "s"}}}),
		"pull secret": func(p *corev1.Pod) { p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}} },
		"a variable": func(p *corev1.Pod) {
			p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{}}}
		},
		"a token": volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}}}}),
	} {
		for who, u := range map[string]user.Info{"a node": node, "somebody else": someone, "an administrator": admin} {
			if err := admit(t, p, mirror(change), u); !apierrors.IsForbidden(err) {
				t.Errorf("%s, by %s: %v", name, who, err)
			}
		}
	}
}

func TestOnlyListedSecrets(t *testing.T) {
	strict := bare("default")
	strict.Annotations = map[string]string{enforceMountable: "true"}
	strict.Secrets = []corev1.ObjectReference{{Name: "listed"}}
	use := func(name string) *corev1.Pod {
		return pod(func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}}}
		})
	}
	p := plugin(strict)
	if err := admit(t, p, use("listed"), someone); err != nil {
		t.Error(err)
	}
	if err := admit(t, p, use("other"), someone); !apierrors.IsForbidden(err) {
		t.Errorf("a Secret that is not listed: %v", err)
	}
	strict.Annotations[enforceMountable] = "false"
	if err := admit(t, p, use("other"), someone); err != nil {
		t.Error(err)
	}
}

// TestNewNamespace: a Pod waits for the default account of its namespace, which is about to be created.
func TestNewNamespace(t *testing.T) {
	p := plugin()
	var asked atomic.Int32
	read := p.Get
	p.Get = func(ctx context.Context, resource, namespace, name string, live bool) (metav1.Object, error) {
		if asked.Add(1) > 5 {
			return bare(name), nil
		}
		return read(ctx, resource, namespace, name, live)
	}
	if err := admit(t, p, pod(nil), someone); err != nil {
		t.Error(err)
	}
}

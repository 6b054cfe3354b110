package serviceaccount

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/storage/names"

	"portal/internal/apiserver/tokens"
)

const (
	// AdmissionName is what flags call the admission of Pods' accounts.
	AdmissionName = "ServiceAccount"

	defaultAccount = "default"
	volumePrefix   = "kube-api-access-"
	mountPath      = "/var/run/secrets/kubernetes.io/serviceaccount"

	// In a new namespace a controller creates the default account. A Pod that comes earlier waits for it this long.
	accountWait = 5 * time.Second
	accountPoll = 20 * time.Millisecond
)

// Admission gives every Pod an account that exists, and a token of it.
type Admission struct {
	*admission.Handler
	// Get reads accounts.
	Get tokens.Getter
}

var (
	_ admission.MutationInterface   = &Admission{}
	_ admission.ValidationInterface = &Admission{}
)

// NewAdmission makes the plugin. Get must be set before it is used.
func NewAdmission() *Admission {
	return &Admission{Handler: admission.NewHandler(admission.Create, admission.Update)}
}

// Admit fills in account, token volume and image pull secrets of new Pods.
func (p *Admission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod := podOf(a)
	if pod == nil || a.GetOperation() != admission.Create || a.GetSubresource() != "" {
		return nil
	}
	if isMirror(pod) {
		return validateMirror(a, pod) // the kubelet deletes one that is not as it wrote it
	}
	if pod.Spec.ServiceAccountName == "" {
		pod.Spec.ServiceAccountName, pod.Spec.DeprecatedServiceAccount = defaultAccount, defaultAccount
	}
	account, err := p.account(ctx, a, pod)
	if err != nil {
		return err
	}
	if automounts(account, pod) {
		mountToken(pod)
	}
	if len(pod.Spec.ImagePullSecrets) == 0 {
		for _, secret := range account.ImagePullSecrets {
			pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: secret.Name})
		}
	}
	return nil
}

// Validate denies Pods whose account does not exist, after other plugins have had their say.
func (p *Admission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod := podOf(a)
	if pod == nil || a.GetOperation() != admission.Create && a.GetSubresource() != "ephemeralcontainers" {
		return nil
	}
	if isMirror(pod) && a.GetOperation() == admission.Create {
		return validateMirror(a, pod)
	}
	if pod.Spec.ServiceAccountName == "" {
		return admission.NewForbidden(a, errors.New("spec.serviceAccountName: must name the Pod's ServiceAccount"))
	}
	account, err := p.account(ctx, a, pod)
	if err != nil {
		return err
	}
	if enforced, _ := strconv.ParseBool(account.Annotations[enforceMountable]); !enforced {
		return nil
	}
	if err := onlyListed(account, pod, a.GetOperation() == admission.Create); err != nil {
		return admission.NewForbidden(a, err)
	}
	return nil
}

// podOf is the Pod that a request is about, or nil.
func podOf(a admission.Attributes) *corev1.Pod {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" && a.GetSubresource() != "ephemeralcontainers" {
		return nil
	}
	pod, _ := a.GetObject().(*corev1.Pod)
	return pod
}

func isMirror(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

// account reads the Pod's account. The default one of a new namespace may be about to be created.
func (p *Admission) account(ctx context.Context, a admission.Attributes, pod *corev1.Pod) (*corev1.ServiceAccount, error) {
	name := pod.Spec.ServiceAccountName
	account, err := p.read(ctx, a.GetNamespace(), name, false)
	if err != nil {
		account, err = p.read(ctx, a.GetNamespace(), name, true)
	}
	for end := time.Now().Add(accountWait); name == defaultAccount && apierrors.IsNotFound(err) && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(accountPoll):
		}
		account, err = p.read(ctx, a.GetNamespace(), name, false)
	}
	if err != nil {
		return nil, admission.NewForbidden(a, fmt.Errorf("spec.serviceAccountName: ServiceAccount %s/%s: %w", a.GetNamespace(), name, err))
	}
	return account, nil
}

func (p *Admission) read(ctx context.Context, namespace, name string, live bool) (*corev1.ServiceAccount, error) {
	obj, err := p.Get(ctx, "serviceaccounts", namespace, name, live)
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.ServiceAccount), nil
}

// automounts says whether the Pod's containers get a token: as the Pod says, or else its account, or else yes.
func automounts(account *corev1.ServiceAccount, pod *corev1.Pod) bool {
	for _, says := range []*bool{pod.Spec.AutomountServiceAccountToken, account.AutomountServiceAccountToken} {
		if says != nil {
			return *says
		}
	}
	return true
}

// mountToken mounts the token's volume in every container that has nothing at its place.
func mountToken(pod *corev1.Pod) {
	name, has := "", false
	for _, v := range pod.Spec.Volumes {
		if strings.HasPrefix(v.Name, volumePrefix) {
			name, has = v.Name, true
			break
		}
	}
	if !has {
		name = names.SimpleNameGenerator.GenerateName(volumePrefix)
	}
	needed := false
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			mounts := containers[i].VolumeMounts
			if slices.ContainsFunc(mounts, func(m corev1.VolumeMount) bool { return m.MountPath == mountPath }) {
				continue
			}
			containers[i].VolumeMounts = append(mounts, corev1.VolumeMount{Name: name, ReadOnly: true, MountPath: mountPath})
			needed = true
		}
	}
	if needed && !has {
		pod.Spec.Volumes = append(pod.Spec.Volumes, tokenVolume(name))
	}
}

// tokenVolume is what programs in a Pod need to reach the API.
func tokenVolume(name string) corev1.Volume {
	mode, seconds := corev1.ProjectedVolumeSourceDefaultMode, int64(tokens.WarnAfter)
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		DefaultMode: &mode,
		Sources: []corev1.VolumeProjection{{
			ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: corev1.ServiceAccountTokenKey, ExpirationSeconds: &seconds},
		}, {
			ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"},
				Items:                []corev1.KeyToPath{{Key: corev1.ServiceAccountRootCAKey, Path: corev1.ServiceAccountRootCAKey}},
			},
		}, {
			DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{
				Path:     corev1.ServiceAccountNamespaceKey,
				FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
			}}},
		}},
	}}}
}

// validateMirror denies a mirror Pod all that its account would otherwise decide about: a node must not get by a Pod of its own making
// what is not its business, and nobody may get around the Secrets that an account lists by means of an annotation.
func validateMirror(a admission.Attributes, pod *corev1.Pod) error {
	refuse := func(what string) error {
		return admission.NewForbidden(a, errors.New("a mirror Pod may not use "+what))
	}
	if pod.Spec.ServiceAccountName != "" {
		return refuse("a ServiceAccount (spec.serviceAccountName)")
	}
	for use := range secretsOf(pod, true) {
		return refuse("Secrets (" + use.field + ")")
	}
	for i, v := range pod.Spec.Volumes {
		if v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool { return s.ServiceAccountToken != nil }) {
			return refuse(fmt.Sprintf("tokens of ServiceAccounts (spec.volumes[%d].projected)", i))
		}
	}
	return nil
}

// onlyListed denies Secrets that the account does not list. whole is false for a Pod that gets ephemeral containers, the rest
// of which was validated before.
func onlyListed(account *corev1.ServiceAccount, pod *corev1.Pod, whole bool) error {
	mountable := func(name string) bool {
		return slices.ContainsFunc(account.Secrets, func(s corev1.ObjectReference) bool { return s.Name == name })
	}
	for use := range secretsOf(pod, whole) {
		if use.enforced && !mountable(use.name) {
			return fmt.Errorf("%s: ServiceAccount %s does not list the Secret %s", use.field, account.Name, use.name)
		}
	}
	if !whole {
		return nil
	}
	for i, pull := range pod.Spec.ImagePullSecrets {
		if !slices.Contains(account.ImagePullSecrets, pull) {
			return fmt.Errorf("spec.imagePullSecrets[%d]: ServiceAccount %s does not list %s", i, account.Name, pull.Name)
		}
	}
	return nil
}

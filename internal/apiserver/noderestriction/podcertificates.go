package noderestriction

import (
	"context"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// podCertificate lets a node ask for certificates in the name of its Pods, from the signers that these name in a volume.
func (r *Restriction) podCertificate(ctx context.Context, node string, a admission.Attributes) error {
	asked, ok := a.GetObject().(*certificatesv1.PodCertificateRequest)
	if a.GetOperation() != admission.Create || a.GetSubresource() != "" || !ok {
		return forbid(a, "a node creates requests for certificates of its Pods, and nothing else")
	}
	spec := &asked.Spec
	if string(spec.NodeName) != node {
		return forbid(a, "spec.nodeName: must be %s", node)
	}
	own, err := r.Nodes.Get(ctx, node, &metav1.GetOptions{})
	if err != nil {
		return err
	}
	if n, ok := own.(*corev1.Node); !ok || n.UID != spec.NodeUID {
		return forbid(a, "spec.nodeUID: the Node of this name has another uid")
	}
	pod, err := r.podOf(ctx, a, spec.PodName)
	if err != nil {
		return err
	}
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case pod.UID != spec.PodUID:
		return forbid(a, "spec.podUID: the Pod of this name has another uid")
	case pod.Spec.NodeName != node:
		return forbid(a, "spec.podName: the Pod is not on this node")
	case mirror:
		return forbid(a, "spec.podName: a mirror Pod has no identity in the API")
	case pod.Spec.ServiceAccountName != spec.ServiceAccountName:
		return forbid(a, "spec.serviceAccountName: the Pod's is %s", pod.Spec.ServiceAccountName)
	}
	account, err := r.Accounts.Get(request.WithNamespace(ctx, a.GetNamespace()), spec.ServiceAccountName, &metav1.GetOptions{})
	if err != nil {
		return err
	}
	if s, ok := account.(*corev1.ServiceAccount); !ok || s.UID != spec.ServiceAccountUID {
		return forbid(a, "spec.serviceAccountUID: the ServiceAccount of this name has another uid")
	}
	return r.podSigner(ctx, pod, spec, a)
}

// podSigner allows a signer that a volume of the Pod names, and else what the node has a permission for.
func (r *Restriction) podSigner(ctx context.Context, pod *corev1.Pod, spec *certificatesv1.PodCertificateRequestSpec, a admission.Attributes) error {
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			if source.PodCertificate != nil && source.PodCertificate.SignerName == spec.SignerName {
				return nil
			}
		}
	}
	const verb = "request-serviceaccounts-podcertificate-signer"
	decision, _, _ := r.Authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: a.GetUserInfo(), Verb: verb, APIGroup: a.GetResource().Group, APIVersion: a.GetResource().Version,
		// A resource in a role cannot have a slash.
		Resource:  strings.ReplaceAll(spec.SignerName, "/", ":"),
		Namespace: a.GetNamespace(), Name: spec.ServiceAccountName, ResourceRequest: true,
	})
	if decision != authorizer.DecisionAllow {
		return forbid(a, "spec.signerName: no volume of the Pod names %s, and the node lacks the verb %s on it", spec.SignerName, verb)
	}
	return nil
}

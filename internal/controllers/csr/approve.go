package csr

import (
	"context"
	"fmt"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"portal/internal/controllers/queue"
	"portal/internal/csr"
	"portal/internal/identity"
)

// NewApprover approves requests for the certificates by which nodes prove who they are, if whoever asks may have them: the
// permission is to create certificatesigningrequests/selfnodeclient, for a node that renews its own, or /nodeclient, for
// anybody else.
func NewApprover(deps Deps) (*Controller, error) {
	var c *Controller
	c, err := newController(deps, ApproverName, func(ctx context.Context, r *signingRequest) (queue.Result, error) {
		return c.approve(ctx, r)
	})
	return c, err
}

func (c *Controller) approve(ctx context.Context, r *signingRequest) (queue.Result, error) {
	approved, denied, _ := decided(r)
	if approved || denied || len(r.Status.Certificate) > 0 {
		return queue.Result{}, nil
	}
	switch r.Spec.SignerName {
	case identity.Signer:
		return c.approveComponent(ctx, r)
	case certificatesv1.KubeletServingSignerName:
		return c.approveServing(ctx, r)
	case certificatesv1.KubeAPIServerClientKubeletSignerName:
	default:
		return queue.Result{}, nil
	}
	request, err := csr.Parse(r.Spec.Request)
	if err != nil || csr.NodeClient(request, r.Spec.Usages) != nil {
		return queue.Result{}, nil // a person may look at it
	}
	permissions := []string{"nodeclient"}
	if r.Spec.Username == request.Subject.CommonName {
		permissions = []string{"selfnodeclient", "nodeclient"}
	}
	for _, permission := range permissions {
		allowed, err := c.allowed(ctx, r, permission)
		if err != nil {
			return queue.Result{}, fmt.Errorf("review access to %s: %w", permission, err)
		}
		if !allowed {
			continue
		}
		klog.FromContext(ctx).Info("certificate request approved", "request", r.Name, "subject", request.Subject.CommonName,
			"requestor", r.Spec.Username, "permission", permission)
		return c.decide(ctx, r, certificatesv1.CertificateApproved, "AutoApproved",
			fmt.Sprintf("%s may create certificatesigningrequests/%s", r.Spec.Username, permission))
	}
	// The permission may come later; the older the request, the less likely.
	return queue.Result{Again: min(max(c.age(r.CreationTimestamp.Time)/2, time.Second), 10*time.Minute)}, nil
}

// decide writes a condition of approval.
func (c *Controller) decide(ctx context.Context, r *signingRequest, condition certificatesv1.RequestConditionType, reason, message string) (queue.Result, error) {
	out := r.DeepCopy()
	out.Status.Conditions = append(out.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: condition, Status: corev1.ConditionTrue, Reason: reason, Message: message,
	})
	_, err := c.Client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, r.Name, out, metav1.UpdateOptions{})
	return queue.Result{Writes: 1}, err
}

// allowed asks the API server whether the requestor has a permission.
func (c *Controller) allowed(ctx context.Context, r *signingRequest, permission string) (bool, error) {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: r.Spec.Username, UID: r.Spec.UID, Groups: r.Spec.Groups, Extra: map[string]authorizationv1.ExtraValue{},
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: certificatesv1.GroupName, Version: "*", Resource: "certificatesigningrequests", Subresource: permission, Verb: "create",
		},
	}}
	for key, values := range r.Spec.Extra {
		review.Spec.Extra[key] = authorizationv1.ExtraValue(values)
	}
	review, err := c.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed, nil
}

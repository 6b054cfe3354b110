package csr

import (
	"context"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/klog/v2"

	"portal/internal/controllers/queue"
	"portal/internal/csr"
	"portal/internal/identity"
)

// approveComponent decides about a certificate of one of Portal's own parts: those who hold a token of the role may have any
// machine's, who has the identity already may renew it, and a node may have those of its own machine, a load balancer's if an
// administrator allows it. The permission is to create certificatesigningrequests/ROLEclient, /selfcomponentclient,
// /machinecomponentclient or /machinelbclient. Nobody else decides for this signer, so what is not allowed is denied, and who waits need not
// wait.
func (c *Controller) approveComponent(ctx context.Context, r *signingRequest) (queue.Result, error) {
	deny := func(message string) (queue.Result, error) {
		klog.FromContext(ctx).Info("certificate request denied", "request", r.Name, "requestor", r.Spec.Username, "why", message)
		return c.decide(ctx, r, certificatesv1.CertificateDenied, "NotAllowed", message)
	}
	request, err := csr.Parse(r.Spec.Request)
	if err != nil {
		return deny("spec.request: " + err.Error())
	}
	role, machine, err := csr.Component(request, r.Spec.Usages)
	if err != nil {
		return deny(err.Error())
	}
	permission := role.Review()
	switch r.Spec.Username {
	case request.Subject.CommonName:
		permission = identity.SelfReview
	case identity.Node.User(machine):
		permission = role.MachineReview()
	}
	allowed, err := c.allowed(ctx, r, permission)
	switch {
	case err != nil:
		return queue.Result{}, fmt.Errorf("review access to %s: %w", permission, err)
	case !allowed && permission == identity.LB.MachineReview():
		return deny(fmt.Sprintf("%s may not be %s: bind it to the ClusterRole %s, or start portal lb with a token of the role %s", r.Spec.Username, request.Subject.CommonName, identity.MachineLB, role))
	case !allowed:
		return deny(fmt.Sprintf("%s may not be %s: it needs a token of the role %s", r.Spec.Username, request.Subject.CommonName, role))
	}
	klog.FromContext(ctx).Info("certificate request approved", "request", r.Name, "subject", request.Subject.CommonName,
		"requestor", r.Spec.Username, "permission", permission)
	return c.decide(ctx, r, certificatesv1.CertificateApproved, "AutoApproved",
		fmt.Sprintf("%s may create certificatesigningrequests/%s", r.Spec.Username, permission))
}

package certificatesigningrequest

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"portal/internal/apiserver/registry/signer"
	"portal/internal/csr"
	"portal/internal/identity"
)

// Guard asks more of those who write requests than the right to write them: to approve or sign for a signer, one needs the
// verb approve or sign on that signer; and no request makes its requestor a member of system:masters. It is what
// Kubernetes calls CertificateApproval, CertificateSigning and CertificateSubjectRestriction.
type Guard struct {
	*admission.Handler
	Authorizer authorizer.UnconditionalAuthorizer
}

var _ admission.ValidationInterface = Guard{}

// NewGuard makes the guard.
func NewGuard(z authorizer.UnconditionalAuthorizer) Guard {
	return Guard{admission.NewHandler(admission.Create, admission.Update), z}
}

// Validate validates a write.
func (g Guard) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != certificatesv1.Resource("certificatesigningrequests") {
		return nil
	}
	r, ok := a.GetObject().(*signingRequest)
	if !ok {
		return nil
	}
	// The signer of the stored request counts: nobody can change it, but they could try.
	old, _ := a.GetOldObject().(*signingRequest)
	switch {
	case a.GetOperation() == admission.Create && a.GetSubresource() == "":
		return restrictSubject(a, r)
	case old == nil:
		return nil
	case a.GetSubresource() == "approval":
		return g.may(ctx, a, "approve", old.Spec.SignerName)
	case a.GetSubresource() == "status" && changed(r, old):
		return g.may(ctx, a, "sign", old.Spec.SignerName)
	}
	return nil
}

func changed(r, old *signingRequest) bool {
	return !bytes.Equal(r.Status.Certificate, old.Status.Certificate) ||
		!equality.Semantic.DeepEqual(r.Status.Conditions, old.Status.Conditions)
}

// may says why a user may not do something for a signer: they need the verb on the signer, or on all of its domain.
func (g Guard) may(ctx context.Context, a admission.Attributes, verb, name string) error {
	if signer.Allowed(ctx, g.Authorizer, a.GetUserInfo(), verb, name) {
		return nil
	}
	return admission.NewForbidden(a, fmt.Errorf("it needs the verb %q on the signer %q", verb, name))
}

func restrictSubject(a admission.Attributes, r *signingRequest) error {
	if r.Spec.SignerName != certificatesv1.KubeAPIServerClientSignerName {
		return nil
	}
	request, err := csr.Parse(r.Spec.Request)
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("spec.request: %w", err))
	}
	if slices.Contains(request.Subject.Organization, user.SystemPrivilegedGroup) {
		return admission.NewForbidden(a, fmt.Errorf("spec.request: %s signs no certificate for the group %s", r.Spec.SignerName, user.SystemPrivilegedGroup))
	}
	// Whoever had one could be anybody to API servers behind Services.
	if request.Subject.CommonName == identity.FrontProxy {
		return admission.NewForbidden(a, fmt.Errorf("spec.request: %s signs no certificate with the common name %s", r.Spec.SignerName, identity.FrontProxy))
	}
	return nil
}

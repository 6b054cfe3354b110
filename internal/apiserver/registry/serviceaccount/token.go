package serviceaccount

import (
	"context"
	"errors"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	tokenjwt "k8s.io/apiserver/pkg/authentication/token/jwt"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"

	"portal/internal/apiserver/tokens"
)

const (
	minSeconds     = 10 * 60
	maxSeconds     = 1 << 32
	defaultSeconds = 60 * 60
)

var tokenRequest = authenticationv1.SchemeGroupVersion.WithKind("TokenRequest")

// Tokens is what TokenRequests need.
type Tokens struct {
	Issuer *tokens.Issuer
	Get    tokens.Getter
}

// tokenREST answers requests for tokens.
type tokenREST struct{ *Tokens }

var (
	_ rest.NamedCreater                   = tokenREST{}
	_ rest.GroupVersionKindProvider       = tokenREST{}
	_ rest.SubresourceObjectMetaPreserver = tokenREST{}
)

// New gives an empty request.
func (tokenREST) New() runtime.Object { return &authenticationv1.TokenRequest{} }

// Destroy does nothing: there is no store.
func (tokenREST) Destroy() {}

// GroupVersionKind is that of the request, which is not of the ServiceAccount's group.
func (tokenREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind { return tokenRequest }

// PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate keeps the UID in the request, which says whose token is meant.
func (tokenREST) PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate() bool { return true }

// Create validates a request and issues the token.
func (r tokenREST) Create(ctx context.Context, name string, obj runtime.Object, admit rest.ValidateObjectFunc, _ *metav1.CreateOptions) (runtime.Object, error) {
	req, ok := obj.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, apierrors.NewBadRequest("the body must be a TokenRequest of authentication.k8s.io/v1")
	}
	namespace := request.NamespaceValue(ctx)
	if err := sameName(req, namespace, name); err != nil {
		return nil, err
	}
	// As it is now: a token is for what exists, not for what existed a moment ago.
	account, err := r.Get(ctx, "serviceaccounts", namespace, name, true)
	if err != nil {
		return nil, err
	}
	if req.UID != "" && req.UID != account.GetUID() {
		return nil, apierrors.NewConflict(schema.GroupResource{Group: tokenRequest.Group, Resource: tokenRequest.Kind}, name,
			fmt.Errorf("metadata.uid %s is not that of the ServiceAccount, which is %s", req.UID, account.GetUID()))
	}
	began := time.Now()
	r.complete(req, account, began)
	if errs := validateRequest(req); len(errs) > 0 {
		return nil, apierrors.NewInvalid(tokenRequest.GroupKind(), "", errs)
	}
	if admit != nil {
		if err := admit(ctx, req.DeepCopy()); err != nil {
			return nil, err
		}
	}
	ask := tokens.Request{Namespace: namespace, Account: ref(account), Audiences: req.Spec.Audiences}
	if err := r.bind(ctx, &ask, req.Spec.BoundObjectRef); err != nil {
		return nil, err
	}
	r.limit(ctx, req)
	ask.Seconds = *req.Spec.ExpirationSeconds
	issued, err := r.Issuer.Issue(ctx, ask)
	switch {
	case errors.Is(err, tokens.ErrKey):
		return nil, apierrors.NewServiceUnavailable(err.Error())
	case err != nil:
		return nil, apierrors.NewInternalError(fmt.Errorf("the token could not be signed: %w", err))
	}
	audit.AddAuditAnnotation(ctx, serviceaccount.IssuedCredentialIDAuditAnnotationKey, tokenjwt.CredentialIDForJTI(issued.ID))
	req.Status = authenticationv1.TokenRequestStatus{
		Token:               issued.Token,
		ExpirationTimestamp: metav1.NewTime(began.Add(time.Duration(*req.Spec.ExpirationSeconds) * time.Second)),
	}
	return req, nil
}

// sameName demands that the body, if it names an account, names that of the URL.
func sameName(req *authenticationv1.TokenRequest, namespace, name string) error {
	path := field.NewPath("metadata")
	var errs field.ErrorList
	switch {
	case req.Name != "" && req.Name != name:
		errs = field.ErrorList{field.Invalid(path.Child("name"), req.Name, "must be the name of the ServiceAccount, or left out")}
	case req.Namespace != "" && req.Namespace != namespace:
		errs = field.ErrorList{field.Invalid(path.Child("namespace"), req.Namespace, "must be the namespace of the ServiceAccount, or left out")}
	default:
		return nil
	}
	return apierrors.NewInvalid(tokenRequest.GroupKind(), name, errs)
}

// complete fills in what was left out.
func (r tokenREST) complete(req *authenticationv1.TokenRequest, account metav1.Object, now time.Time) {
	req.Name, req.Namespace, req.UID = account.GetName(), account.GetNamespace(), account.GetUID()
	req.CreationTimestamp = metav1.NewTime(now)
	req.Status = authenticationv1.TokenRequestStatus{}
	if len(req.Spec.Audiences) == 0 {
		req.Spec.Audiences = r.Issuer.Audiences
	}
	setTokenDefaults(req)
}

// AddDefaults teaches the scheme how long a token lives that nobody says it of.
func AddDefaults(scheme *runtime.Scheme) {
	scheme.AddTypeDefaultingFunc(&authenticationv1.TokenRequest{}, func(obj any) { setTokenDefaults(obj.(*authenticationv1.TokenRequest)) })
}

func setTokenDefaults(req *authenticationv1.TokenRequest) {
	if req.Spec.ExpirationSeconds == nil {
		seconds := int64(defaultSeconds)
		req.Spec.ExpirationSeconds = &seconds
	}
}

func validateRequest(req *authenticationv1.TokenRequest) field.ErrorList {
	var errs field.ErrorList
	path := field.NewPath("spec")
	// Tokens for webhooks are not served, as in Kubernetes without the feature; what is wrong with a request is said first.
	if isWebhook(req.Spec.BoundObjectRef) {
		if len(req.Spec.Audiences) != 1 {
			errs = append(errs, field.Invalid(path.Child("audiences"), req.Spec.Audiences, "must be one for a webhook configuration"))
		}
		if len(req.Spec.Attestations) != 1 {
			errs = append(errs, field.Invalid(path.Child("attestations"), req.Spec.Attestations, "must be one for a webhook configuration"))
		}
	} else if len(req.Spec.Attestations) > 0 {
		return field.ErrorList{field.Invalid(path.Child("attestations"), req.Spec.Attestations, "are for tokens bound to a webhook configuration")}
	}
	if seconds := *req.Spec.ExpirationSeconds; seconds < minSeconds {
		errs = append(errs, field.Invalid(path.Child("expirationSeconds"), seconds, fmt.Sprintf("must be at least %d (10 minutes)", minSeconds)))
	} else if seconds > maxSeconds {
		errs = append(errs, field.Invalid(path.Child("expirationSeconds"), seconds, "must be at most 2^32"))
	}
	return errs
}

func isWebhook(to *authenticationv1.BoundObjectReference) bool {
	return to != nil && to.APIVersion == "admissionregistration.k8s.io/v1" &&
		(to.Kind == "ValidatingWebhookConfiguration" || to.Kind == "MutatingWebhookConfiguration")
}

// bind looks up the object that the token is to live as long as.
func (r tokenREST) bind(ctx context.Context, ask *tokens.Request, to *authenticationv1.BoundObjectReference) error {
	if to == nil {
		return nil
	}
	kind := schema.FromAPIVersionAndKind(to.APIVersion, to.Kind)
	var obj metav1.Object
	var err error
	switch kind.GroupKind() {
	case schema.GroupKind{Kind: "Pod"}:
		if obj, err = r.Get(ctx, "pods", ask.Namespace, to.Name, true); err == nil {
			err = r.bindPod(ctx, ask, obj.(*corev1.Pod))
		}
	case schema.GroupKind{Kind: "Secret"}:
		if obj, err = r.Get(ctx, "secrets", ask.Namespace, to.Name, true); err == nil {
			ask.Secret = point(ref(obj))
		}
	case schema.GroupKind{Kind: "Node"}:
		if obj, err = r.Get(ctx, "nodes", "", to.Name, true); err == nil {
			ask.Node = point(ref(obj))
		}
	default:
		return apierrors.NewBadRequest(fmt.Sprintf("spec.boundObjectRef: a token can't be bound to %s: it must be a Pod, Secret or Node of v1", kind))
	}
	if err != nil {
		return err
	}
	if to.UID != "" && to.UID != obj.GetUID() {
		return apierrors.NewConflict(schema.GroupResource{Group: kind.Group, Resource: kind.Kind}, to.Name,
			fmt.Errorf("spec.boundObjectRef.uid %s is not that of the object: it may have been deleted and created anew", to.UID))
	}
	return nil
}

// bindPod also writes down where the Pod runs.
func (r tokenREST) bindPod(ctx context.Context, ask *tokens.Request, pod *corev1.Pod) error {
	if pod.Spec.ServiceAccountName != ask.Account.Name {
		return apierrors.NewBadRequest(fmt.Sprintf("spec.boundObjectRef: Pod %s runs as the ServiceAccount %q, not as %q",
			pod.Name, pod.Spec.ServiceAccountName, ask.Account.Name))
	}
	ask.Pod = point(ref(pod))
	if pod.Spec.NodeName == "" {
		return nil
	}
	node, err := r.Get(ctx, "nodes", "", pod.Spec.NodeName, false)
	if err != nil {
		node, err = r.Get(ctx, "nodes", "", pod.Spec.NodeName, true)
	}
	switch {
	case apierrors.IsNotFound(err):
		ask.Node = &tokens.Ref{Name: pod.Spec.NodeName} // who reads the token still learns where the Pod was sent
	case err != nil:
		return apierrors.NewInternalError(err)
	default:
		ask.Node = point(ref(node))
	}
	return nil
}

// limit shortens what lives longer than the server allows, and says so.
func (r tokenREST) limit(ctx context.Context, req *authenticationv1.TokenRequest) {
	most, asked := int64(r.Issuer.MaxExpiration/time.Second), *req.Spec.ExpirationSeconds
	if most > 0 && asked > most {
		warning.AddWarning(ctx, "", fmt.Sprintf("spec.expirationSeconds: %d was asked for, this server gives at most %d", asked, most))
		req.Spec.ExpirationSeconds = &most
	}
}

func ref(obj metav1.Object) tokens.Ref {
	return tokens.Ref{Name: obj.GetName(), UID: string(obj.GetUID())}
}

func point[T any](v T) *T { return &v }

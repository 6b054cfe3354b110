package apiserver

import (
	"k8s.io/apiserver/pkg/authentication/authenticator"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/accessreview"
	"portal/internal/apiserver/registry/admissionregistration"
	"portal/internal/apiserver/registry/certificatesigningrequest"
	"portal/internal/apiserver/registry/configmap"
	"portal/internal/apiserver/registry/endpoints"
	"portal/internal/apiserver/registry/endpointslice"
	"portal/internal/apiserver/registry/event"
	"portal/internal/apiserver/registry/flowcontrol"
	"portal/internal/apiserver/registry/ingress"
	"portal/internal/apiserver/registry/ingressclass"
	"portal/internal/apiserver/registry/ipaddress"
	"portal/internal/apiserver/registry/lease"
	"portal/internal/apiserver/registry/namespace"
	"portal/internal/apiserver/registry/node"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rbac"
	"portal/internal/apiserver/registry/secret"
	"portal/internal/apiserver/registry/service"
	"portal/internal/apiserver/registry/serviceaccount"
	"portal/internal/apiserver/registry/servicecidr"
	"portal/internal/apiserver/registry/tokenreview"
)

// resources are everything that the API serves. Another one is a folder under registry and a line here.
func (s *Server) resources(who authenticator.Request) []registry.Resource {
	allocation := &service.Allocation{
		Allocator: s.allocator, Families: s.families(), Claimed: s.tracker.claimed, Refresh: s.tracker.refresh,
		Reserved: s.reserved,
	}
	guard := &rbac.Guard{Index: s.roles, Authorizer: s.access}
	ttl := uint64(s.opts.EventTTL.Seconds())
	return []registry.Resource{
		namespace.New(),
		node.New(),
		pod.New(),
		allocation.Served(),
		endpoints.New(s.serviceAddress),
		event.New(ttl),
		secret.New(),
		configmap.New(),
		serviceaccount.New(&serviceaccount.Tokens{Issuer: s.issuer, Get: s.objects.get}),

		endpointslice.New(s.serviceAddress),

		servicecidr.New(),
		ipaddress.New(s.reserved),
		ingress.New(),
		ingressclass.New(),

		lease.New(),

		certificatesigningrequest.New(),

		event.NewEvents(ttl),

		rbac.NewRole(guard),
		rbac.NewClusterRole(guard),
		rbac.NewRoleBinding(guard),
		rbac.NewClusterRoleBinding(guard),

		admissionregistration.NewMutatingWebhooks(),
		admissionregistration.NewValidatingWebhooks(),
		admissionregistration.NewMutatingPolicies(s.mayRead),
		admissionregistration.NewMutatingBindings(s.mayRead, s.mutatingKind),
		admissionregistration.NewValidatingPolicies(s.mayRead),
		admissionregistration.NewValidatingBindings(s.mayRead, s.validatingKind),

		flowcontrol.NewLevels(),
		flowcontrol.NewSchemas(),

		accessreview.New(s.access),
		accessreview.NewSubject(s.access),
		accessreview.NewLocal(s.access),
		accessreview.NewRules(s.access),

		tokenreview.New(who, authenticator.Audiences(s.opts.Tokens.Audiences)),
		tokenreview.NewSelf(),
	}
}

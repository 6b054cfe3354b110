package apiserver

import (
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/accessreview"
	"portal/internal/apiserver/registry/admissionregistration"
	"portal/internal/apiserver/registry/apiservice"
	"portal/internal/apiserver/registry/autoscaler"
	"portal/internal/apiserver/registry/certificatesigningrequest"
	"portal/internal/apiserver/registry/clustertrustbundle"
	"portal/internal/apiserver/registry/configmap"
	"portal/internal/apiserver/registry/controllerrevision"
	"portal/internal/apiserver/registry/cronjob"
	"portal/internal/apiserver/registry/daemonset"
	"portal/internal/apiserver/registry/deployment"
	"portal/internal/apiserver/registry/disruption"
	"portal/internal/apiserver/registry/endpoints"
	"portal/internal/apiserver/registry/endpointslice"
	"portal/internal/apiserver/registry/event"
	"portal/internal/apiserver/registry/flowcontrol"
	"portal/internal/apiserver/registry/ingress"
	"portal/internal/apiserver/registry/ingressclass"
	"portal/internal/apiserver/registry/ipaddress"
	"portal/internal/apiserver/registry/job"
	"portal/internal/apiserver/registry/lease"
	"portal/internal/apiserver/registry/namespace"
	"portal/internal/apiserver/registry/node"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/podcertificaterequest"
	"portal/internal/apiserver/registry/podtemplate"
	"portal/internal/apiserver/registry/priorityclass"
	"portal/internal/apiserver/registry/rbac"
	"portal/internal/apiserver/registry/replicaset"
	"portal/internal/apiserver/registry/replicationcontroller"
	"portal/internal/apiserver/registry/resourcequota"
	"portal/internal/apiserver/registry/runtimeclass"
	"portal/internal/apiserver/registry/secret"
	"portal/internal/apiserver/registry/service"
	"portal/internal/apiserver/registry/serviceaccount"
	"portal/internal/apiserver/registry/servicecidr"
	"portal/internal/apiserver/registry/statefulset"
	"portal/internal/apiserver/registry/storage"
	"portal/internal/apiserver/registry/storageversionmigration"
	"portal/internal/apiserver/registry/tokenreview"
	"portal/internal/apiserver/registry/volume"
)

// resources are everything that the API serves. Another one is a folder under registry and a line here.
func (s *Server) resources(who authenticator.Request) []registry.Resource {
	allocation := &service.Allocation{
		Allocator: s.allocator, Families: s.families, Claimed: s.tracker.claimed, Refresh: s.tracker.refresh,
		Reserved: s.reserved,
	}
	guard := &rbac.Guard{Index: s.roles, Authorizer: s.access}
	ttl := uint64(s.opts.EventTTL.Seconds())
	autoscalers, oldAutoscalers := autoscaler.New()
	return []registry.Resource{
		namespace.New(),
		node.New(),
		pod.New(s.serviceAddress),
		podtemplate.New(),
		replicationcontroller.New(),
		allocation.Served(),
		endpoints.New(s.serviceAddress),
		event.New(ttl),
		secret.New(),
		configmap.New(),
		resourcequota.New(),
		volume.New(),
		volume.NewClaim(),
		serviceaccount.New(&serviceaccount.Tokens{Issuer: s.issuer, Get: s.objects.get}),

		deployment.New(),
		replicaset.New(),
		statefulset.New(),
		daemonset.New(),
		controllerrevision.New(),

		priorityclass.New(),
		runtimeclass.New(),

		autoscalers,
		oldAutoscalers,

		job.New(),
		cronjob.New(),

		disruption.New(),
		s.evictions,

		endpointslice.New(s.serviceAddress),

		storage.NewClass(),
		storage.NewAttributes(),
		storage.NewDriver(),
		storage.NewNode(),
		storage.NewAttachment(),
		storage.NewCapacity(),

		servicecidr.New(),
		ipaddress.New(s.reserved),
		ingress.New(),
		ingressclass.New(),

		lease.New(),

		certificatesigningrequest.New(),
		clustertrustbundle.New(),
		podcertificaterequest.New(s.access, time.Now),

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

		storageversionmigration.New(),

		apiservice.New(),

		accessreview.New(s.access),
		accessreview.NewSubject(s.access),
		accessreview.NewLocal(s.access),
		accessreview.NewRules(s.access),

		tokenreview.New(who, authenticator.Audiences(s.opts.Tokens.Audiences)),
		tokenreview.NewSelf(),
	}
}

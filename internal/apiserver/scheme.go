package apiserver

import (
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/autoscaler"
	"portal/internal/apiserver/registry/connect"
	"portal/internal/apiserver/registry/event"
	"portal/internal/apiserver/registry/serviceaccount"
)

// groups are the API groups whose types the scheme knows, served or not. Of several versions of a group the first one that has a
// kind is stored, and others are converted.
var groups = []struct {
	version schema.GroupVersion
	add     func(*runtime.Scheme) error
}{
	{corev1.SchemeGroupVersion, corev1.AddToScheme},
	{appsv1.SchemeGroupVersion, appsv1.AddToScheme},
	{autoscalingv2.SchemeGroupVersion, autoscalingv2.AddToScheme},
	{autoscalingv1.SchemeGroupVersion, autoscalingv1.AddToScheme}, // with the Scale of the scale subresources
	{batchv1.SchemeGroupVersion, batchv1.AddToScheme},
	{schedulingv1.SchemeGroupVersion, schedulingv1.AddToScheme},
	{nodev1.SchemeGroupVersion, nodev1.AddToScheme},
	{discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme},
	{networkingv1.SchemeGroupVersion, networkingv1.AddToScheme},
	{coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme},
	{eventsv1.SchemeGroupVersion, eventsv1.AddToScheme},
	{policyv1.SchemeGroupVersion, policyv1.AddToScheme},
	{rbacv1.SchemeGroupVersion, rbacv1.AddToScheme},
	{admissionregistrationv1.SchemeGroupVersion, admissionregistrationv1.AddToScheme},
	{flowcontrolv1.SchemeGroupVersion, flowcontrolv1.AddToScheme},
	{authorizationv1.SchemeGroupVersion, authorizationv1.AddToScheme},
	{authenticationv1.SchemeGroupVersion, authenticationv1.AddToScheme},
	{certificatesv1.SchemeGroupVersion, certificatesv1.AddToScheme},
	{storagev1.SchemeGroupVersion, storagev1.AddToScheme},
	{storagemigrationv1.SchemeGroupVersion, storagemigrationv1.AddToScheme},
	{apiregistrationv1.SchemeGroupVersion, apiregistrationv1.AddToScheme},
}

// newScheme knows every type twice: under its version, and under the internal version through which k8s.io/apiserver
// converts. Both are the same Go type, so that hardly anything is ever converted.
func newScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	versions := map[string][]schema.GroupVersion{}
	for _, group := range groups {
		utilruntime.Must(group.add(scheme))
		internal := schema.GroupVersion{Group: group.version.Group, Version: runtime.APIVersionInternal}
		for name, goType := range scheme.KnownTypes(group.version) {
			if goType.PkgPath() == "k8s.io/apimachinery/pkg/apis/meta/v1" {
				continue // list options and the like have a home of their own
			}
			if _, converted := scheme.KnownTypes(internal)[name]; converted || group.version == eventsv1.SchemeGroupVersion {
				continue // another version has been stored
			}
			object, err := scheme.New(group.version.WithKind(name))
			utilruntime.Must(err)
			scheme.AddKnownTypeWithName(internal.WithKind(name), object)
		}
		versions[group.version.Group] = append(versions[group.version.Group], group.version)
		utilruntime.Must(scheme.SetVersionPriority(versions[group.version.Group]...))
	}
	// Both groups' Events are one stored object.
	scheme.AddKnownTypes(schema.GroupVersion{Group: eventsv1.GroupName, Version: runtime.APIVersionInternal},
		&corev1.Event{}, &corev1.EventList{})
	utilruntime.Must(event.AddConversions(scheme))
	utilruntime.Must(connect.AddConversions(scheme))
	utilruntime.Must(autoscaler.AddConversions(scheme))
	serviceaccount.AddDefaults(scheme)
	return scheme
}

func addResources(scheme *runtime.Scheme, resources []registry.Resource) error {
	for _, r := range resources {
		if err := r.AddToScheme(scheme); err != nil {
			return err
		}
	}
	return nil
}

// storageCodecs encode what etcd keeps: protobuf, which costs less than JSON in time and space. Objects are stored in the
// first of their group's versions, and read from any.
func storageCodecs(scheme *runtime.Scheme, codecs serializer.CodecFactory) func(schema.GroupResource) runtime.Codec {
	encoder := protobuf.NewSerializer(scheme, scheme)
	return func(resource schema.GroupResource) runtime.Codec {
		version := scheme.PrioritizedVersionsForGroup(resource.Group)[0]
		internal := schema.GroupVersion{Group: resource.Group, Version: runtime.APIVersionInternal}
		return codecs.CodecForVersions(encoder, codecs.UniversalDeserializer(), version, internal)
	}
}

// storagePaths are where resources are kept whose place in etcd does not have their plural name, as in Kubernetes.
var storagePaths = map[schema.GroupResource]string{
	corev1.Resource("services"):  "services/specs",
	corev1.Resource("endpoints"): "services/endpoints",

	corev1.Resource("replicationcontrollers"): "controllers",

	apiregistrationv1.Resource("apiservices"): apiregistrationv1.GroupName + "/apiservices",
}

// unqualifiedGroups are those whose resources Kubernetes keeps under their plural names alone.
func unqualifiedGroups() map[string]bool {
	out := map[string]bool{}
	for _, group := range groups {
		out[group.version.Group] = true
	}
	return out
}

package audit

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/apiserver/registry/service"
)

// Problem is a kind of finding: the reason of its Events and the label of its metrics. Where Kubernetes has a word for
// it, it is Kubernetes'.
type Problem string

// What can be wrong.
const (
	// A Service has an address or port that it has not claimed.
	ClusterIPNotAllocated Problem = "ClusterIPNotAllocated"
	PortNotAllocated      Problem = "PortNotAllocated"
	// A Service has an address or port that belongs to another.
	ClusterIPAlreadyAllocated Problem = "ClusterIPAlreadyAllocated"
	PortAlreadyAllocated      Problem = "PortAlreadyAllocated"
	// A Service has an address or port that it could not have been given.
	ClusterIPOutOfRange Problem = "ClusterIPOutOfRange"
	PortOutOfRange      Problem = "PortOutOfRange"
	ClusterIPNotValid   Problem = "ClusterIPNotValid"
	// No Service has what is claimed.
	IPAddressNotAllocated Problem = "IPAddressNotAllocated"
	PortClaimOrphaned     Problem = "PortClaimOrphaned"
	// The claim does not say, or not in full, whose the address or port is.
	IPAddressWrongReference Problem = "IPAddressWrongReference"
	PortClaimWrongReference Problem = "PortClaimWrongReference"
	// What is stored can't be read.
	IPAddressUnreadable   Problem = "IPAddressUnreadable"
	PortClaimUnreadable   Problem = "PortClaimUnreadable"
	ServiceUnreadable     Problem = "ServiceUnreadable"
	ServiceCIDRUnreadable Problem = "ServiceCIDRUnreadable"
)

// Problems are all of them.
var Problems = []Problem{
	ClusterIPNotAllocated, PortNotAllocated, ClusterIPAlreadyAllocated, PortAlreadyAllocated,
	ClusterIPOutOfRange, PortOutOfRange, ClusterIPNotValid,
	IPAddressNotAllocated, PortClaimOrphaned, IPAddressWrongReference, PortClaimWrongReference,
	IPAddressUnreadable, PortClaimUnreadable, ServiceUnreadable, ServiceCIDRUnreadable,
}

// Finding is one thing that is not as the API server would have left it.
type Finding struct {
	Problem Problem `json:"problem"`
	// Service is the one concerned, as namespace/name; Claim the address or port.
	Service string `json:"service,omitempty"`
	Claim   string `json:"claim,omitempty"`
	// Message says what is wrong; Remedy what a repair does about it or, if there can be none, what the administrator
	// must do.
	Message    string `json:"message"`
	Remedy     string `json:"remedy"`
	Repairable bool   `json:"repairable"`

	// about is the object that the Event is about.
	about  corev1.ObjectReference
	repair *repair
}

func sortFindings(findings []Finding) {
	slices.SortFunc(findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Claim, b.Claim), cmp.Compare(a.Problem, b.Problem))
	})
}

func aboutService(o service.Owner) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: o.Namespace, Name: o.Name, UID: uid(o)}
}

func aboutAddress(c *Claim) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "IPAddress", Name: c.Key[len(addressPrefix):], UID: c.UID,
	}
}

// aboutAPI is for what belongs to no object: the Service that stands for the API itself.
func aboutAPI() corev1.ObjectReference {
	return aboutService(service.Owner{Namespace: "default", Name: "kubernetes"})
}

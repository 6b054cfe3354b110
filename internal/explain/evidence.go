package explain

import (
	"net/http"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/nodereport"
	"portal/internal/reports"
)

// Evidence is all that was read, at one time.
type Evidence struct {
	Now time.Time
	// Zone is the cluster's DNS zone.
	Zone string
	// Version is the API server's.
	Version string

	Namespaces     []corev1.Namespace
	Services       []corev1.Service
	Slices         []discoveryv1.EndpointSlice
	Endpoints      []corev1.Endpoints
	Pods           []corev1.Pod
	Nodes          []corev1.Node
	Leases         []coordinationv1.Lease
	Events         []corev1.Event
	Deployments    []appsv1.Deployment
	ReplicaSets    []appsv1.ReplicaSet
	StatefulSets   []appsv1.StatefulSet
	DaemonSets     []appsv1.DaemonSet
	Ingresses      []networkingv1.Ingress
	IngressClasses []networkingv1.IngressClass
	IPAddresses    []networkingv1.IPAddress
	ServiceCIDRs   []networkingv1.ServiceCIDR

	// Certificates are those that could be read, by where they are; of Secrets only the certificate.
	Certificates []Certificate
	// Secrets are the names of the Secrets that Ingresses refer to; the value says whether it exists.
	Secrets map[Ref]bool

	// ConfigMaps are those in which load balancers have security groups and certificates, by NAMESPACE/NAME.
	ConfigMaps map[string]map[string]string

	// Nodes' own reports, by the nodes' names.
	Reports map[string]*NodeReport
	// Parts are what the parts of nodes say about themselves in the API.
	Parts []reports.Report

	// Unseen are resources that could not be read, with the reason: nothing follows from their absence.
	Unseen map[string]string
	// Limited is the only namespace that could be read, or empty.
	Limited string
}

// Certificate is what matters of one.
type Certificate struct {
	Object              Ref
	Names               []string
	NotBefore, NotAfter time.Time
	// Err says that it can't be read as a certificate.
	Err string
}

// NodeReport is what a node says about itself, or why it says nothing.
type NodeReport struct {
	*nodereport.Report
	// Err is why there is no Report.
	Err string
	// Only are the Services, NAMESPACE/NAME, that the Report is limited to; none: it is about all.
	Only []string
	// Asked is whether somebody tried to get one.
	Asked bool
	// Unsupported: the node is there, and knows no such report: it is not Portal's.
	Unsupported bool
	// Skew is how far the node's clock is ahead of that of whoever asked.
	Skew time.Duration
	// Health is the answer of the proxy's /healthz: see http.StatusOK; 0: none.
	Health int
	// HealthErr is why there is none.
	HealthErr string
	// HealthBody is what it said.
	HealthBody string
}

// ProxyHealthy says whether the proxy answered that it is well.
func (r *NodeReport) ProxyHealthy() bool { return r != nil && r.Health == http.StatusOK }

// reports says whether the Report would have a Service, if the node serves it.
func (r *NodeReport) reports(s *Service) bool {
	return len(r.Only) == 0 || slices.ContainsFunc(r.Only, func(name string) bool {
		namespace, rest, _ := strings.Cut(name, "/")
		return rest == s.Name && namespace == s.Namespace
	})
}

// Package compile is from what the API has, Services with what they ask of their balancers, Ingresses, endpoints, Secrets, groups of addresses, to what
// one machine's balancer does and which packets are led there. It is pure: it asks nobody, and says what it would like to know.
package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/lb/capture"
	"portal/internal/lb/config"
	"portal/internal/lb/spec"
)

// Input is all that is known. Objects are not changed.
type Input struct {
	// Node is this machine's name, Zone where it is. Balancers are the addresses of all machines that may have balancers.
	Node, Zone string
	Balancers  []netip.Addr
	// Services are all of them, in any order. Ours says which of type LoadBalancer have their balancer here.
	Services []*corev1.Service
	Ours     func(*corev1.Service) bool
	// Slices are a Service's.
	Slices func(namespace, name string) []*discoveryv1.EndpointSlice
	// Secret is one as it is known.
	Secret func(namespace, name string) Secret
	// Certificates leads from the last part of an ARN to a Secret, NAMESPACE/NAME.
	Certificates map[string]string
	// Groups are named sets of addresses, each as it is written.
	Groups map[string]string
	// Buckets leads from a bucket's name to its URL; s3://NAME if it has none.
	Buckets map[string]string
	// Policy is a TLS policy by its name.
	Policy func(name string) (TLSPolicy, bool)

	// Ingresses are all of them, and Classes their classes. Entry is the Service whose addresses they share, NAMESPACE/NAME.
	Ingresses []*networkingv1.Ingress
	Classes   []*networkingv1.IngressClass
	Entry     string
	// Resolve is what a name was last resolved to; not known: nobody has asked yet.
	Resolve func(name string) (addrs []netip.Addr, known bool)
}

// Secret is what is known of one.
type Secret struct {
	// Known: it was asked for. Data is nil if it does not exist.
	Known bool
	Data  map[string][]byte
	// Err is why it can't be read.
	Err error
}

// TLSPolicy is which versions and suites are offered; NotOffered are suites of the policy that this program has not.
type TLSPolicy struct {
	Min, Max   uint16
	Suites     []uint16
	NotOffered []string
}

// Output is what follows.
type Output struct {
	Config  config.Config
	Capture capture.State
	// Problems are said to the user in Events.
	Problems []Problem
	// Secrets and Names are those that matter: to be followed, to be resolved.
	Secrets []SecretRef
	Names   []string
	// Ingresses are those that are served here.
	Ingresses []*networkingv1.Ingress
}

// SecretRef names a Secret.
type SecretRef struct{ Namespace, Name string }

// Problem is about one object: exactly one of Service and Ingress.
type Problem struct {
	Service *corev1.Service
	Ingress *networkingv1.Ingress
	spec.Problem
}

// Reasons of Events, beside those of the package spec.
const (
	// CertificateUnavailable: the Secret is missing, can't be read or can't be used; the port is closed.
	CertificateUnavailable = "CertificateUnavailable"
	// EndpointNotVerified: TLS to endpoints is spoken, and nobody's certificate verified.
	EndpointNotVerified = "EndpointNotVerified"
	// SecurityGroupNotFound: nobody is allowed because of it.
	SecurityGroupNotFound = "SecurityGroupNotFound"
	// UnknownPolicy: no TLS policy has that name; the default is used. PolicyLimited: some of its suites can't be offered.
	UnknownPolicy = "UnknownSecurityPolicy"
	PolicyLimited = "SecurityPolicyLimited"
)

// compiler gathers the output.
type compiler struct {
	Input
	out      Output
	services map[string]*corev1.Service
	secrets  map[SecretRef]bool
	names    map[string]bool
}

// Compile decides what this machine does.
func Compile(in Input) Output {
	c := &compiler{Input: in, services: map[string]*corev1.Service{}, secrets: map[SecretRef]bool{}, names: map[string]bool{}}
	c.out.Config = config.Config{Pools: map[string]*config.Pool{}, Certificates: map[string]*config.Certificate{}, Zone: in.Zone}
	c.Services = slices.SortedFunc(slices.Values(in.Services), func(a, b *corev1.Service) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, svc := range c.Services {
		c.services[svc.Namespace+"/"+svc.Name] = svc
	}
	for _, svc := range c.Services {
		c.service(svc)
	}
	c.ingresses()
	c.unused()
	for ref := range c.secrets {
		c.out.Secrets = append(c.out.Secrets, ref)
	}
	slices.SortFunc(c.out.Secrets, func(a, b SecretRef) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for name := range c.names {
		c.out.Names = append(c.out.Names, name)
	}
	slices.Sort(c.out.Names)
	return c.out
}

// unused takes out certificates that no listener has.
func (c *compiler) unused() {
	used := map[string]bool{}
	for _, l := range c.out.Config.Listeners {
		if l.TLS != nil {
			for _, name := range l.TLS.Certificates {
				used[name] = true
			}
		}
	}
	for name := range c.out.Config.Certificates {
		if !used[name] {
			delete(c.out.Config.Certificates, name)
		}
	}
}

func (c *compiler) problem(svc *corev1.Service, reason, format string, args ...any) {
	c.out.Problems = append(c.out.Problems, Problem{Service: svc, Problem: spec.Problem{Reason: reason, Message: fmt.Sprintf(format, args...)}})
}

func (c *compiler) ingressProblem(in *networkingv1.Ingress, reason, format string, args ...any) {
	c.out.Problems = append(c.out.Problems, Problem{Ingress: in, Problem: spec.Problem{Reason: reason, Message: fmt.Sprintf(format, args...)}})
}

// secret is one that matters, as it is known.
func (c *compiler) secret(ref SecretRef) Secret {
	c.secrets[ref] = true
	return c.Secret(ref.Namespace, ref.Name)
}

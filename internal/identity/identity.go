// Package identity names Portal's parts as the API knows them: users, groups, and the roles that a token to join with can have.
// What each may do is in portal/internal/rbac/policy; how it proves who it is, this package does not know.
package identity

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Users of the parts that run inside a server's process. They hold a token that exists in memory only.
const (
	// Controllers reads what all controllers share, and holds their Lease. Each controller writes with an account of its own.
	Controllers = "system:portal:controllers"
	// Membership keeps the endpoints of the kubernetes Service.
	Membership = "system:portal:membership"
	// Audit reports what is wrong with claims as Events.
	Audit = "system:portal:audit"
	// Up keeps the kube-dns Service of `portal up`.
	Up = "system:portal:up"
)

// NodeClient is who an API server is to nodes: by its certificate, which nodes know it by.
const NodeClient = "system:portal:node-client"

// FrontProxy is who an API server is to the API servers behind Services that it passes requests on to: they believe whoever has a
// certificate with this name who a request is from.
const FrontProxy = "portal-front-proxy"

// Role is what a machine joins a cluster as.
type Role string

// The roles. A node gets a kubelet's identity, the others one of Portal's own.
const (
	Node  Role = "node"
	Proxy Role = "proxy"
	DNS   Role = "dns"
	LB    Role = "lb"
)

// Roles are all of them.
var Roles = []Role{Node, Proxy, DNS, LB}

// Signer signs the certificates of Portal's own roles: the name of a signer as in certificates.k8s.io.
const Signer = "portal.dev/component-client"

// ParseRole reads a role's name.
func ParseRole(text string) (Role, error) {
	if !slices.Contains(Roles, Role(text)) {
		var names []string
		for _, r := range Roles {
			names = append(names, string(r))
		}
		return "", fmt.Errorf("%q is not one of %s", text, strings.Join(names, ", "))
	}
	return Role(text), nil
}

// BootstrapGroup is the group of a token that may join as the role, and as nothing else.
func (r Role) BootstrapGroup() string { return "system:bootstrappers:portal:" + string(r) }

// RoleOfGroup is the role that a bootstrap group stands for.
func RoleOfGroup(group string) (Role, bool) {
	for _, r := range Roles {
		if group == r.BootstrapGroup() {
			return r, true
		}
	}
	return "", false
}

// Group is that of everyone who has joined as the role.
func (r Role) Group() string {
	switch r {
	case Node:
		return "system:nodes"
	case Proxy:
		return "system:portal:proxies"
	}
	return "system:portal:" + string(r)
}

// User is who a machine is when it has joined as the role.
func (r Role) User(machine string) string {
	if r == Node {
		return "system:node:" + machine
	}
	return "system:portal:" + string(r) + ":" + machine
}

// Parse finds the role and machine of a user's name and groups, if they are what a component of Portal has: exactly one group,
// that of its role.
func Parse(user string, groups []string) (Role, string, error) {
	for _, r := range Roles {
		machine, found := strings.CutPrefix(user, r.User(""))
		if r == Node || !found {
			continue
		}
		if len(groups) != 1 || groups[0] != r.Group() {
			return "", "", fmt.Errorf("the organization must be %s alone", r.Group())
		}
		return r, machine, ValidMachine(machine)
	}
	return "", "", fmt.Errorf("the common name must begin with %s, %s or %s", Proxy.User(""), DNS.User(""), LB.User(""))
}

// ValidMachine says what is wrong with the name of a machine: it must be one that a Node could have.
func ValidMachine(name string) error {
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return fmt.Errorf("the machine's name %q can't be a Node's: %s", name, problems[0])
	}
	return nil
}

// Review is the subresource of certificatesigningrequests that a user must be allowed to create for a certificate to be
// approved: that of the role for a token, and that of renewals for somebody who has the identity already.
func (r Role) Review() string { return string(r) + "client" }

// SelfReview is Review for renewals.
const SelfReview = "selfcomponentclient"

// MachineReview is Review for a node that asks for another identity of its own machine. A load balancer writes what proxies everywhere
// follow: not every node may be one.
func (r Role) MachineReview() string {
	if r == LB {
		return "machinelbclient"
	}
	return "machinecomponentclient"
}

// MachineLB is the ClusterRole of nodes that may have a load balancer. Nobody is bound to it unless an administrator does so.
const MachineLB = "system:portal:machine-lb"

// LBCertificates is the ClusterRole of load balancers that may read Secrets, for TLS. Nobody is bound to it unless an administrator does so, for all
// namespaces or for some.
const LBCertificates = "system:portal:lb-certificates"

package noderestriction

import (
	"context"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"portal/internal/identity"
	"portal/internal/reports"
)

var nodeReports = schema.GroupResource{Group: reports.Group, Resource: reports.Resource}

// partOf are the parts that have an identity of their own.
var partOf = map[identity.Role]string{identity.Proxy: reports.Proxy, identity.DNS: reports.DNS, identity.LB: reports.LB}

// part narrows the reports that a machine's proxy, DNS server or balancer may write to its own.
func part(a admission.Attributes) error {
	if a.GetResource().GroupResource() != nodeReports {
		return nil
	}
	for role, name := range partOf {
		if !slices.Contains(a.GetUserInfo().GetGroups(), role.Group()) {
			continue
		}
		machine := machineOf(a.GetUserInfo(), role)
		if machine == "" {
			return forbid(a, "the user name %q does not say which machine's %s this is", a.GetUserInfo().GetName(), name)
		}
		return ownReport(a, machine, name)
	}
	return nil
}

func machineOf(who user.Info, role identity.Role) string {
	machine, _ := strings.CutPrefix(who.GetName(), role.User(""))
	if machine == who.GetName() {
		return ""
	}
	return machine
}

// report lets a node write the reports of its own parts.
func (r *Restriction) report(_ context.Context, node string, a admission.Attributes) error {
	return ownReport(a, node, reports.Parts...)
}

// ownReport checks that a report is of a machine and one of its parts, and that it goes when the machine's Node goes.
func ownReport(a admission.Attributes, machine string, parts ...string) error {
	node, part, ok := reports.SplitName(nameOf(a))
	if !ok || node != machine || !slices.Contains(parts, part) {
		return forbid(a, "this account writes the NodeReports of %s on node %s only, which are named NODE.PART", strings.Join(parts, ", "), machine)
	}
	if a.GetOperation() == admission.Delete {
		return nil
	}
	object, ok := a.GetObject().(*unstructured.Unstructured)
	if !ok {
		return forbid(a, "a NodeReport is expected, not %T", a.GetObject())
	}
	if said, _, _ := unstructured.NestedString(object.Object, "node"); said != node {
		return forbid(a, "node: must be %s", node)
	}
	if said, _, _ := unstructured.NestedString(object.Object, "part"); said != part {
		return forbid(a, "part: must be %s", part)
	}
	owners := object.GetOwnerReferences()
	if len(owners) != 1 || owners[0].APIVersion != "v1" || owners[0].Kind != "Node" || owners[0].Name != node || owners[0].Controller != nil || owners[0].BlockOwnerDeletion != nil {
		return forbid(a, "metadata.ownerReferences: must be the Node %s alone, which neither controls it nor waits for it", node)
	}
	if len(object.GetFinalizers()) > 0 {
		return forbid(a, "metadata.finalizers: a report has none")
	}
	return nil
}

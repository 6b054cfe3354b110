// Package rbac describes Roles, ClusterRoles and their bindings, and rejects those that grant more than their
// writer has. What rules mean is decided in portal/internal/rbac.
package rbac

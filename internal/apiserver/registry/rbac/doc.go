// Package rbac describes Roles, ClusterRoles and their bindings, and refuses to store one that grants more than its
// writer has. What rules mean is decided in portal/internal/rbac.
package rbac

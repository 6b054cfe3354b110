// Package rbac decides what users may do from roles and bindings, and whether a user who writes a role or binding would
// grant more than they have themselves. It is pure: it knows the published types and nothing of servers, watches or stores.
package rbac

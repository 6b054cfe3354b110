// Package trace says which way a packet takes through a cluster: the name it asks for, the frontend it meets, the route by its origin,
// the endpoints with their odds, what is rewritten, and where it ends. It is pure: objects of the API go in, a Report comes out. What
// becomes of a packet on a node is decided by packages plan and oracle; this one walks from node to node and finds words for it.
package trace

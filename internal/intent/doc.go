// Package intent holds what users asked for, cluster-wide: Services, their endpoints, nodes, namespaces and pods, in
// netip types and stripped to what the node side uses. It decides nothing about traffic and knows neither the API's
// types nor its client: package watch fills it, plan and dns read it.
//
// Everything that a reader gets is immutable. A change replaces a value; it never touches one that was handed out.
package intent

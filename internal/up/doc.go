// Package up holds what `portal up` needs besides the parts that it runs: temporary addresses on the loopback interface, and
// the objects by which the parts find each other. It runs none of the parts itself.
package up

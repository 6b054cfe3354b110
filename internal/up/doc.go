// Package up holds what `portal up` needs beside the parts it runs: addresses lent to the machine for as long as it runs,
// and the objects by which the parts find each other. It runs none of the parts itself.
package up

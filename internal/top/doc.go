// Package top counts what goes through Services on one machine: new and open connections, bytes and resets, by Service and endpoint. It
// reads the kernel's connection tracking: events say what begins and ends, dumps what is there in between. Nothing is counted while
// nobody asks, and when there is too much to count, events are sampled and dumps become seldom, which every Sample says.
package top

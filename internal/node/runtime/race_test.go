//go:build race

package runtime

// raced says that these tests were built with the race detector, which needs several times the memory.
const raced = true

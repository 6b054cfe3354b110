//go:build race

package web

// slack is for what the race detector keeps.
const slack = 3

//go:build !race

package web

const slack = 1

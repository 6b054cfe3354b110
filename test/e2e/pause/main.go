// Command pause does nothing until it is told to end: the program of the image registry.k8s.io/pause, for the end-to-end tests.
package main

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGINT, unix.SIGTERM)
	<-end
}

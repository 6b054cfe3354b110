// Command etcd is the stand-alone etcd server of the same version that Portal embeds,
// so that Portal and its peers can be measured on one and the same store.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }

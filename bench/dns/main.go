// Command dns measures Portal's DNS server beside CoreDNS, one after the other on the same API state, with dnsperf, and
// beside a bare UDP echo server: what the machine and the load generator allow at most.
//
// Figures are queries per second of the server's own processor time (the load generator shares the machine), memory,
// latency at a rate that both can serve, and the time from a change of the API to the answer. What counts is the ratio.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

type options struct {
	portal, coredns string
	kubeconfig      string
	services        int
	records         int
	seconds         int
	rate            int
}

func main() {
	log.SetFlags(0)
	var o options
	flag.StringVar(&o.portal, "portal", ".cache/bin/portal", "Portal's binary")
	flag.StringVar(&o.coredns, "coredns", ".cache/peers/coredns", "CoreDNS' binary")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "an API server to use; default: a portal server of its own")
	flag.IntVar(&o.services, "services", 10000, "Services with a cluster IP and two endpoints each")
	flag.IntVar(&o.records, "records", 100000, "records in the second round, by headless Services with 100 endpoints each; 0: no second round")
	flag.IntVar(&o.seconds, "seconds", 10, "length of each measurement")
	flag.IntVar(&o.rate, "rate", 10000, "queries per second at which latency is measured")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, o options) error {
	dir, err := os.MkdirTemp("", "bench-dns")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	kubeconfig := o.kubeconfig
	if kubeconfig == "" {
		api, err := startAPI(ctx, o.portal, dir)
		if err != nil {
			return err
		}
		defer api.stop()
		kubeconfig = filepath.Join(dir, "server", "admin.kubeconfig")
	}
	client, err := newClient(kubeconfig)
	if err != nil {
		return err
	}
	began := time.Now()
	if err := client.fillServices(ctx, o.services); err != nil {
		return err
	}
	fmt.Printf("%d Services written in %.0f s\n", o.services, time.Since(began).Seconds())
	stub, err := startStub()
	if err != nil {
		return err
	}
	defer stub.Close()
	b := &bench{options: o, dir: dir, kubeconfig: kubeconfig, upstream: stub.LocalAddr().String()}
	if err := b.echo(ctx); err != nil {
		return err
	}
	inside, outside := b.clusterNames(), b.outsideNames()
	if err := b.round(ctx, fmt.Sprintf("%d Services", o.services), inside, outside); err != nil {
		return err
	}
	if err := b.latencies(ctx, client); err != nil {
		return err
	}
	if o.records > 0 {
		headless := max(1, (o.records-o.services)/100)
		if err := client.fillHeadless(ctx, headless); err != nil {
			return err
		}
		title := fmt.Sprintf("%d Services and %d headless with 100 endpoints each", o.services, headless)
		if err := b.round(ctx, title, b.withEndpoints(headless), ""); err != nil {
			return err
		}
	}
	if len(b.missed) > 0 {
		return fmt.Errorf("\nmissed:\n  %s", strings.Join(b.missed, "\n  "))
	}
	fmt.Println("\nevery goal was met")
	return nil
}

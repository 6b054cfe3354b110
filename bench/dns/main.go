// Command dns measures Portal's DNS server beside CoreDNS on the same API server, with dnsperf.
//
// The load generator shares the machine, so what counts is the server's own CPU time: at saturation, and at a load of 20 % of what
// CoreDNS can serve, which is more like what servers do all day. The order of the subjects alternates from round to round.
package main

import (
	"context"
	"flag"
	"log"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	portal, coredns string
	kubeconfig      string
	services        int
	records         int
	seconds         int
	rounds          int
	output          string
}

func main() {
	log.SetFlags(0)
	var o options
	flag.StringVar(&o.portal, "portal", harness.Portal(), "Portal's binary")
	flag.StringVar(&o.coredns, "coredns", harness.Peer("coredns"), "CoreDNS' binary")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "API server to use; default: starts a portal server")
	flag.IntVar(&o.services, "services", 10000, "Services with a cluster IP and two endpoints each")
	flag.IntVar(&o.records, "records", 100000, "records in the second situation, with headless Services of 100 endpoints each; 0: skip it")
	flag.IntVar(&o.seconds, "seconds", 10, "length of each measurement")
	flag.IntVar(&o.rounds, "rounds", 2, "rounds, which alternate the order of the subjects")
	flag.StringVar(&o.output, "o", "", "JSON file to write the figures to")
	flag.Parse()
	report.Main("bench-dns", func(ctx context.Context, _ []string) (bool, error) {
		return report.InFolder("dns", func(dir string) (bool, error) { return run(ctx, o, dir) })
	})
}

func run(ctx context.Context, o options, dir string) (bool, error) {
	kubeconfig := o.kubeconfig
	if kubeconfig == "" {
		api, err := harness.StartPortal(dir, "--controllers", "none")
		if err != nil {
			return false, err
		}
		defer api.Kill()
		kubeconfig = api.Kubeconfig
	}
	connected, err := harness.Connect(kubeconfig)
	if err != nil {
		return false, err
	}
	client := client{connected}
	began := time.Now()
	if err := client.fillServices(ctx, o.services); err != nil {
		return false, err
	}
	report.Logf("%d Services written in %.0f s", o.services, time.Since(began).Seconds())
	stub, err := startStub()
	if err != nil {
		return false, err
	}
	defer stub.Close()
	b := &bench{options: o, dir: dir, kubeconfig: kubeconfig, upstream: stub.LocalAddr().String()}
	b.report = report.New("dns", "DNS", []string{peer}, []string{own})
	b.report.Note("The load comes from dnsperf on the same machine, from 32 clients. CPU time is that of the server alone.")
	if err := b.private(); err != nil {
		return false, err
	}
	if err := b.measureAll(ctx, client); err != nil {
		return false, err
	}
	return b.report.Finish(o.output)
}

// measureAll measures both situations.
func (b *bench) measureAll(ctx context.Context, client client) error {
	at := b.report.At("Services with a cluster IP", b.services, "Services")
	if err := b.compare(ctx, at, b.clusterNames(), b.outsideNames()); err != nil {
		return err
	}
	if err := b.latencies(ctx, at, client); err != nil {
		return err
	}
	if b.records == 0 {
		return nil
	}
	headless := max(1, (b.records-b.services)/100)
	if err := client.fillHeadless(ctx, headless); err != nil {
		return err
	}
	at = b.report.At("and headless Services of 100 endpoints each", headless, "headless Services")
	return b.compare(ctx, at, b.withEndpoints(headless), "")
}

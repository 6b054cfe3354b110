package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/bench/report"
	"portal/internal/reports"
	"portal/internal/reports/publish"
)

// nodes are the simulated ones, but for their Leases.
type nodes struct {
	c                      *cluster
	endReports, endWatches context.CancelFunc
	reporting, watching    sync.WaitGroup
	writes, failed         atomic.Int64
}

var parts = []string{reports.Proxy, reports.DNS, reports.Agent}

// between is the time between the starts of two nodes: this is not about how a server takes a thousand at once, on the same two processors.
const between = 40 * time.Millisecond

// startNodes has every node watch what a proxy watches and publish the reports of its parts; and endpoints change.
func startNodes(ctx context.Context, c *cluster) (*nodes, error) {
	watching, endWatches := context.WithCancel(ctx)
	ctx, endReports := context.WithCancel(watching)
	n := &nodes{c: c, endReports: endReports, endWatches: endWatches}
	for i := range c.nodes {
		config, client, err := c.connection()
		if err != nil {
			return n, err // stop ends those that have started
		}
		after := time.Duration(i) * between
		for _, path := range []string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"} {
			n.watching.Go(func() {
				if wait(watching, after) {
					n.watch(watching, client, path)
				}
			})
		}
		for _, part := range parts {
			n.reporting.Go(func() {
				if wait(ctx, after) {
					n.publish(ctx, config, nodeName(i), part)
				}
			})
		}
	}
	n.reporting.Go(func() { n.churn(ctx) })
	return n, nil
}

// churn changes endpoints, as often as asked for; less often if the server can't keep up.
func (n *nodes) churn(ctx context.Context) {
	ticker := time.NewTicker(time.Duration(float64(time.Second) / n.c.churn))
	defer ticker.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := n.c.change(ctx, i); err != nil && ctx.Err() == nil {
			n.failed.Add(1)
		}
	}
}

// connection is one of its own, as each node has: client-go shares one among clients with the same settings, unless they dial themselves.
func (c *cluster) connection() (*rest.Config, *kubernetes.Clientset, error) {
	config, dialer := rest.CopyConfig(c.config), &net.Dialer{Timeout: 10 * time.Second}
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return dialer.DialContext(ctx, network, address)
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, nil, err
	}
	config = &rest.Config{Host: c.config.Host, Transport: transport, QPS: -1, WarningHandler: rest.NoWarnings{}}
	client, err := kubernetes.NewForConfig(config)
	return config, client, err
}

// quiet ends reports and changes of endpoints; nodes go on watching.
func (n *nodes) quiet() {
	n.endReports()
	n.reporting.Wait()
}

func (n *nodes) stop() {
	n.quiet()
	n.endWatches()
	n.watching.Wait()
	if failed := n.failed.Swap(0); failed > 0 {
		report.Logf("%d requests of nodes failed", failed)
	}
}

// watch follows a resource as a proxy does, and drops what it gets.
func (n *nodes) watch(ctx context.Context, client *kubernetes.Clientset, path string) {
	for wait(ctx, rand.N(5*time.Second)) {
		stream, err := client.CoreV1().RESTClient().Get().AbsPath(path).Param("watch", "true").Param("allowWatchBookmarks", "true").
			Param("resourceVersion", n.c.version()).SetHeader("Accept", "application/vnd.kubernetes.protobuf;stream=watch").Stream(ctx)
		if err != nil {
			if ctx.Err() == nil {
				n.failed.Add(1)
			}
			continue
		}
		_, _ = io.Copy(io.Discard, stream) // until the server ends it
		_ = stream.Close()
	}
}

// version is one to watch from: what there is was listed.
func (c *cluster) version() string {
	list, err := c.client.CoreV1().Services("default").List(context.Background(), metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return ""
	}
	return list.ResourceVersion
}

const leaseInterval = 10 * time.Second

// keepLeases has nodes renew their Leases from now on: those of nodes that don't are lost, and their Pods not ready.
func (c *cluster) keepLeases(ctx context.Context) {
	ctx, c.release = context.WithCancel(ctx)
	for i := range c.nodes {
		c.leases.Go(func() {
			for d := rand.N(leaseInterval); wait(ctx, d); d = leaseInterval {
				if err := renew(ctx, c.client, nodeName(i)); err == nil {
					c.renewals.Add(1)
				} else if ctx.Err() == nil {
					c.expired.Add(1)
				}
			}
		})
	}
}

// renew renews a node's Lease as nodes do: it is read and written.
func renew(ctx context.Context, client kubernetes.Interface, name string) error {
	leases := client.CoordinationV1().Leases("kube-node-lease")
	now, seconds := metav1.NewMicroTime(time.Now()), int32(40)
	lease, err := leases.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		_, err = leases.Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: &seconds, RenewTime: &now},
		}, metav1.CreateOptions{})
		return err
	}
	lease.Spec.RenewTime = &now
	_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}

const (
	// Each part has trouble now and then, once in troubleEvery on average, for a while.
	troubleEvery, troubleFor = 30 * time.Minute, time.Minute
)

// publish reports as a part does.
func (n *nodes) publish(ctx context.Context, config *rest.Config, node, part string) {
	trouble := time.Now().Add(rand.N(2 * troubleEvery))
	p, err := publish.New(publish.Options{
		Config: config, Node: node, Part: part, Version: "bench", Log: slog.New(slog.DiscardHandler), Wrote: func(*reports.Report) { n.writes.Add(1) },
		Status: func() reports.Status {
			now := time.Now()
			if now.After(trouble.Add(troubleFor)) {
				trouble = now.Add(rand.N(2 * troubleEvery))
			}
			return status(part, n.c.changes.Load(), now.After(trouble))
		},
	})
	if err != nil {
		n.failed.Add(1)
		return
	}
	p.Run(ctx)
}

// status is what a part says: the revision of a proxy and of a DNS server moves on with each change, while an agent has none.
func status(part string, revision int64, trouble bool) reports.Status {
	services, now := 10000, metav1.NewTime(time.Now().Truncate(time.Second))
	s := reports.Status{State: reports.Running, Mode: "processes"}
	switch part {
	case reports.Proxy:
		s.Mode, s.Services, s.Limits = "nftables", &services, []string{"node ports are not served at loopback addresses"}
		s.Conntrack = &reports.Conntrack{Count: int(revision) % 1000, Max: 262144}
		s.Synced = &reports.Synced{Revision: fmt.Sprint(revision), Time: now}
	case reports.DNS:
		s.Mode = ""
		s.Synced = &reports.Synced{Revision: fmt.Sprint(revision), Time: now}
	}
	if trouble {
		s.State, s.Message = reports.Failing, "can't program the kernel: no buffer space available"
		s.LastError = &reports.Error{Message: "no buffer space available", Time: now}
	}
	return s
}

// reported waits until all parts have reported.
func (n *nodes) reported(ctx context.Context) error {
	return n.c.until(ctx, n.c.nodes*len(parts), "parts have reported", func(context.Context) (int, error) {
		return min(int(n.writes.Load()), n.c.nodes*len(parts)), nil
	})
}

const (
	share       = "of that, reports"
	shareTarget = 2 // percent
	// calibration is how many reports are written to find out what one costs.
	calibration = 2000
	// settle is how long the server gets to end what it does for changes that were.
	settle = 10 * time.Second
)

// measureReports is the share of the server's CPU time that goes into reports while endpoints change.
func measureReports(ctx context.Context, c *cluster, n *nodes, r *report.Report) error {
	at := r.At(fmt.Sprintf("reports of nodes, %.0f changes of endpoints a second", c.churn), c.nodes, "nodes")
	defer func() { at.WantWithin(portal, share, shareTarget) }()
	before, err := c.cpu()
	if err != nil {
		return err
	}
	writes, renewals, changes := n.writes.Load(), c.renewals.Load(), c.changes.Load()
	began := time.Now()
	for left := c.duration; left > 0; left = c.duration - time.Since(began) {
		report.Logf("measuring reports for another %s: %d written", left.Round(time.Second), n.writes.Load()-writes)
		if !wait(ctx, min(left, time.Minute)) {
			return ctx.Err()
		}
	}
	took := time.Since(began)
	after, err := c.cpu()
	if err != nil {
		return err
	}
	writes, renewals, changes = n.writes.Load()-writes, c.renewals.Load()-renewals, c.changes.Load()-changes
	n.quiet()
	one, err := c.costOfWrite(ctx)
	if err != nil {
		return err
	}
	total := after - before
	rate := func(n int64) float64 { return float64(n) / took.Seconds() }
	at.Lower(portal, "changes of endpoints", rate(changes), "/s")
	at.Lower(portal, "renewals of Leases", rate(renewals), "/s")
	at.Lower(portal, "reports", rate(writes), "/s")
	at.Lower(portal, "CPU of the server for one report", report.Milliseconds(one), "ms")
	at.Lower(portal, "CPU of the server", total.Seconds()/took.Seconds()*100, "% of a core")
	at.Lower(portal, share, float64(writes)*one.Seconds()/total.Seconds()*100, "%")
	r.Note("What a report costs is measured apart, with %d reports written while nodes watch as before, because the server collects garbage by how "+
		"many connections it has, and nothing else goes on but renewals of Leases; the share of reports is that times how many there were. Every node watches Services and EndpointSlices; each of its parts has trouble for %s, once in %s on average.", calibration, troubleFor, troubleEvery)
	return nil
}

// costOfWrite is what one update of a report costs the server, without what it does anyway.
func (c *cluster) costOfWrite(ctx context.Context) (time.Duration, error) {
	report.Logf("measuring what one report costs")
	known := make([]written, c.nodes)
	if err := report.Each(ctx, atOnce, c.nodes, func(i int) error { return known[i].read(ctx, c, nodeName(i)) }); err != nil {
		return 0, err
	}
	if !wait(ctx, settle) {
		return 0, ctx.Err()
	}
	idle, err := c.cpu()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if !wait(ctx, 10*time.Second) {
		return 0, ctx.Err()
	}
	start, err := c.cpu()
	if err != nil {
		return 0, err
	}
	background := (start - idle).Seconds() / time.Since(began).Seconds()
	profile := report.Profile(ctx, c.client.Discovery().RESTClient(), c.profiles, "reports")
	began = time.Now()
	err = report.Each(ctx, atOnce, calibration, func(i int) error { return known[i%c.nodes].rewrite(ctx, c, i) })
	if err != nil {
		return 0, err
	}
	end, err := c.cpu()
	spent := (end - start).Seconds() - background*time.Since(began).Seconds()
	return time.Duration(spent / calibration * float64(time.Second)), errors.Join(err, profile())
}

// written is a report as it was last written.
type written struct {
	mu sync.Mutex
	*reports.Report
}

func (w *written) path() string { return reports.APIPath + "/" + w.Name }

// read reads the report of a node's proxy.
func (w *written) read(ctx context.Context, c *cluster, node string) error {
	data, err := c.client.CoreV1().RESTClient().Get().AbsPath(reports.APIPath+"/"+reports.Name(node, reports.Proxy)).SetHeader("Accept", "application/json").Do(ctx).Raw()
	if err == nil {
		w.Report, err = reports.Parse(data)
	}
	return err
}

// rewrite replaces it as a publisher does, which knows what it wrote.
func (w *written) rewrite(ctx context.Context, c *cluster, i int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Status.Synced = &reports.Synced{Revision: fmt.Sprint(i), Time: metav1.NewTime(time.Now().Truncate(time.Second))}
	w.Status.Updated, w.ManagedFields = w.Status.Synced.Time, reports.NoManagers()
	data, err := json.Marshal(w.Report)
	if err != nil {
		return err
	}
	data, err = c.client.CoreV1().RESTClient().Put().AbsPath(w.path()).SetHeader("Content-Type", "application/json").SetHeader("Accept", "application/json").Body(data).Do(ctx).Raw()
	if err == nil {
		w.Report, err = reports.Parse(data)
	}
	return err
}

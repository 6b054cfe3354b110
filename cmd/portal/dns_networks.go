package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/dns/server"
)

// networksInterval is how often the cluster's networks are read again at most.
const networksInterval = time.Minute

// learnNetworks lets this machine's addresses and the cluster's networks use recursion: at start, and again when a client that
// is in none of them was refused. In most clusters they are private networks, which need none of this.
func learnNetworks(ctx context.Context, config *rest.Config, s *server.Server, log *slog.Logger) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Warn("the cluster's networks are not known", "err", err)
		return
	}
	warned := false
	for {
		list, err := clusterNetworks(ctx, client)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !warned {
			warned = true
			log.Info("can't read the cluster's networks; Pods and nodes with public addresses need --allow-recursion to resolve other names", "err", err)
		}
		s.AllowClusterNetworks(list)
		select {
		case <-ctx.Done():
			return
		case <-time.After(networksInterval):
		}
		select {
		case <-ctx.Done():
			return
		case <-s.RecursionRefused():
		}
	}
}

// clusterNetworks are the addresses of this machine, the ranges of Services, and the ranges and addresses of nodes. With an
// error it returns what it could read; an API without ServiceCIDRs is no error.
func clusterNetworks(ctx context.Context, client kubernetes.Interface) ([]netip.Prefix, error) {
	var out []netip.Prefix
	add := func(texts ...string) {
		for _, s := range texts {
			if p, err := netip.ParsePrefix(s); err == nil {
				out = append(out, p)
			} else if a, err := netip.ParseAddr(s); err == nil {
				out = append(out, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	local, _ := net.InterfaceAddrs()
	for _, a := range local {
		if n, ok := a.(*net.IPNet); ok {
			add(n.IP.String())
		}
	}
	ctx, cancel := context.WithTimeout(ctx, networksInterval)
	defer cancel()
	cached := metav1.ListOptions{ResourceVersion: "0"}
	var errs []error
	if ranges, err := client.NetworkingV1().ServiceCIDRs().List(ctx, cached); err == nil {
		for _, r := range ranges.Items {
			add(r.Spec.CIDRs...)
		}
	} else if !apierrors.IsNotFound(err) {
		errs = append(errs, err)
	}
	if nodes, err := client.CoreV1().Nodes().List(ctx, cached); err == nil {
		for _, n := range nodes.Items {
			add(n.Spec.PodCIDRs...)
			add(n.Spec.PodCIDR)
			for _, a := range n.Status.Addresses {
				add(a.Address)
			}
		}
	} else {
		errs = append(errs, err)
	}
	return out, errors.Join(errs...)
}

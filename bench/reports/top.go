package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/ipv4"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/bench/report"
	"portal/internal/lab"
	"portal/internal/top"
	"portal/test/harness"
)

const (
	topNode = "node1"
	// topInterval is the command's default.
	topInterval = 2 * time.Second
	// adapting is how many samples the command gets to find out how much it can take, topSamples how many are measured.
	adapting, topSamples = 6, 10
	topCPU               = "CPU of the command"
	topTarget            = 5 // percent of a core
	counted              = "connections that it reports"
)

// measureTop runs `portal top services` on a node of a lab while another process makes connections there.
func measureTop(ctx context.Context, o options, r *report.Report) error {
	at := r.At("portal top services, on a node of a lab", o.rate, "new connections a second")
	defer func() { at.WantWithin(portal, topCPU, topTarget) }()
	dir, err := os.MkdirTemp("", "bench-reports-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	report.Logf("starting a lab of one node")
	l, err := lab.Start(ctx, lab.Options{Name: fmt.Sprintf("bench%d", os.Getpid()), Nodes: 1, Dir: filepath.Join(dir, "lab"), Portal: harness.Portal()})
	if err != nil {
		return err
	}
	defer func() {
		if err := l.Close(); err != nil {
			report.Logf("closing the lab: %v", err)
		}
	}()
	to, err := topService(ctx, l)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	flooded := make(chan error, 1)
	go func() { flooded <- floodFrom(ctx, l.Node(topNode), to, o.rate) }()
	samples, err := followTop(ctx, l)
	cancel()
	if err := errors.Join(err, <-flooded); err != nil {
		return err
	}
	var cpu, rate, made, open, oneIn []float64
	said := map[string]bool{}
	for _, s := range samples {
		cpu, rate, made, open, oneIn = append(cpu, 100*s.cpu), append(rate, s.rate), append(made, s.made), append(open, s.open), append(oneIn, float64(s.OneIn))
		for _, note := range s.Notes {
			if strings.HasPrefix(note, "sampled:") {
				said[note] = true
			}
		}
	}
	at.Higher(portal, "connections that were made", report.Median(made), "/s")
	at.Higher(portal, counted, report.Median(rate), "/s")
	at.Lower(portal, "connections in the table", report.Median(open), "")
	at.Lower(portal, "connections for which one is counted", report.Median(oneIn), "")
	at.Lower(portal, topCPU, report.Mean(cpu), "% of a core")
	at.Lower(portal, topCPU+", the most in an interval", report.Max(cpu), "% of a core")
	at.WantWithin(portal, counted, 0.8*float64(o.rate))
	for note := range said {
		r.Note("top says: %q", note)
	}
	r.Note("The connections that top counts are UDP flows, each from another address and port. Its CPU time is read from outside, over %d intervals of %s.", topSamples, topInterval)
	return nil
}

// topService makes a Service whose endpoint is the node itself, and returns its address.
func topService(ctx context.Context, l *lab.Lab) (netip.AddrPort, error) {
	node, err := l.API.CoreV1().Nodes().Get(ctx, topNode, metav1.GetOptions{})
	if err != nil {
		return netip.AddrPort{}, err
	}
	address := ""
	for _, a := range node.Status.Addresses {
		if ip := net.ParseIP(a.Address); a.Type == corev1.NodeInternalIP && ip.To4() != nil {
			address = a.Address
		}
	}
	name, port, protocol := "names", int32(5353), corev1.ProtocolUDP
	svc, err := l.API.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "dns", Port: 53, Protocol: protocol}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return netip.AddrPort{}, err
	}
	portName := "dns"
	_, err = l.API.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &protocol}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{address}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return netip.AddrPort{}, err
	}
	to, err := netip.ParseAddr(svc.Spec.ClusterIP)
	return netip.AddrPortFrom(to, 53), err
}

// floodFrom has this program make connections on a machine, in a process of its own, until ctx ends.
func floodFrom(ctx context.Context, m *lab.Machine, to netip.AddrPort, rate int) error {
	if _, err := m.Exec(ctx, "ip", "route", "add", "local", floodRange, "dev", "lo"); err != nil {
		return err
	}
	// All get the node's address and one of its 64,000 ports on the way, which must be free again before they are used up.
	if err := m.Do(func() error { return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", []byte("2"), 0) }); err != nil {
		return err
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, own, "-flood", to.String(), "-rate", fmt.Sprint(rate))
	cmd.Stderr = os.Stderr
	if err := m.Run(cmd); err != nil && ctx.Err() == nil {
		return fmt.Errorf("make connections: %w", err)
	}
	return nil
}

// programmed is how long a proxy may take for a new Service.
const programmed = 10 * time.Second

// floodRange is where connections come from.
const floodRange = "10.1.0.0/16"

// flood makes UDP flows, each from another address and port, at a rate a second. Many are sent at once, so that this takes little of the machine.
func flood(ctx context.Context, address string, rate int) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil || !to.Addr().Is4() {
		return fmt.Errorf("-flood %q: must be an IPv4 address and a port", address)
	}
	const batch, sources = 64, 1 << 16 // addresses of floodRange
	messages := make([]ipv4.Message, batch)
	began, made := time.Now(), 0
	for port := 1024; ctx.Err() == nil; port = 1024 + (port-1023)%60000 {
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{Port: port})
		if err != nil {
			continue // somebody has the port
		}
		packets := ipv4.NewPacketConn(conn)
		for from := 0; from < sources && ctx.Err() == nil; from += batch {
			for i := range messages {
				source := ipv4.ControlMessage{Src: net.IPv4(10, 1, byte((from+i)>>8), byte(from+i))}
				messages[i] = ipv4.Message{Buffers: [][]byte{[]byte("?")}, OOB: source.Marshal(), Addr: net.UDPAddrFromAddrPort(to)}
			}
			for left := messages; len(left) > 0; {
				n, err := packets.WriteBatch(left, 0)
				if err != nil && made == 0 {
					if time.Since(began) > programmed {
						return errors.Join(fmt.Errorf("send to %s: %w", to, err), conn.Close())
					}
					time.Sleep(programmed / 100)
					continue
				}
				left, made = left[max(n, 1):], made+max(n, 0)
			}
			time.Sleep(time.Until(began.Add(time.Duration(made) * time.Second / time.Duration(rate))))
		}
		if err := conn.Close(); err != nil {
			return err
		}
	}
	return nil
}

// sample is one of the command's, with what it used since the last, seen from outside.
type sample struct {
	top.Sample
	cpu, rate, open float64
	made            float64 // connections a second, as the kernel counts them
}

// followTop runs the command, and returns its samples once it has adapted to what there is.
func followTop(ctx context.Context, l *lab.Lab) (out []sample, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Portal(), "top", "services", "-o", "json", "--interval", topInterval.String(), "--lab", l.Name, "--node", topNode)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer func() { cancel(); _ = cmd.Wait() }()
	decoder := json.NewDecoder(bufio.NewReader(stdout))
	var used time.Duration
	var last time.Time
	var before uint64
	for i := 0; len(out) < topSamples; i++ {
		var s sample
		if err := decoder.Decode(&s.Sample); err != nil {
			return nil, fmt.Errorf("portal top services: %w", err)
		}
		u, err := report.Read(cmd.Process.Pid)
		if err != nil {
			return nil, err
		}
		now := time.Now()
		sent, err := datagrams(l.Node(topNode))
		if err != nil {
			return nil, err
		}
		for _, x := range s.Services {
			if x.Name == "names" {
				s.rate, s.open = s.rate+x.Counts.NewRate, s.open+float64(x.Counts.Open)
			}
		}
		if i >= adapting {
			s.cpu = float64(u.CPU-used) / float64(now.Sub(last))
			s.made = float64(sent-before) / now.Sub(last).Seconds()
			out = append(out, s)
			report.Logf("top: %.0f new connections/s of %.0f, 1 in %d counted, %.1f %% of a core", s.rate, s.made, s.OneIn, 100*s.cpu)
		}
		used, last, before = u.CPU, now, sent
	}
	return out, nil
}

// datagrams is how many a machine has sent by UDP: all but a few are connections of the flood.
func datagrams(m *lab.Machine) (uint64, error) {
	var data []byte
	err := m.Do(func() (err error) {
		data, err = os.ReadFile("/proc/thread-self/net/snmp")
		return err
	})
	if err != nil {
		return 0, err
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "Udp:" {
			continue
		}
		if names == nil {
			names = fields
		} else if i := slices.Index(names, "OutDatagrams"); i > 0 && i < len(fields) {
			return strconv.ParseUint(fields[i], 10, 64)
		}
	}
	return 0, errors.New("/proc/net/snmp does not count datagrams")
}

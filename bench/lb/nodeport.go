package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"portal/bench/report"
)

// overhead is the figure of what is passed on by the proxy's rules alone.
const overhead = "time of a request by the balancer's address, compared with the node port"

// Its address comes from the network of a lab's nodes.
const labPool = "192.168.100.240-192.168.100.242"

// labObjects are a Service whose endpoint is a program on the node itself.
const labObjects = `apiVersion: v1
kind: Service
metadata: {name: bench}
spec:
  type: LoadBalancer
  ports: [{port: 80, targetPort: %[2]d}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: bench, labels: {kubernetes.io/service-name: bench}}
addressType: IPv4
endpoints: [{addresses: [%[1]s], nodeName: node1}]
ports: [{port: %[2]d}]
`

// nodePort compares a balancer's address with a node port of the same Service, from a client outside of a lab of one node. If the lab can't
// be had, the other figures stand.
func (b *bench) nodePort() {
	const name = "L4: the proxy's rules alone, beside the node port"
	if !b.wants(name) {
		return
	}
	if _, err := os.Stat(b.portal); err != nil {
		b.report.Note("The balancer's address was not compared with a node port: %s is not there (make build).", b.portal)
		return
	}
	report.Logf("the balancer's address and the node port")
	at := b.report.At(name, 0, "")
	times, err := b.besideNodePort()
	if err != nil {
		b.report.Note("The balancer's address could not be compared with a node port: %v.", err)
	} else {
		at.Lower(portal, overhead, times, "×")
	}
	at.WantWithin(portal, overhead, 1.05) // two runs of the same differ by as much
}

// besideNodePort is how many times as long a request takes by the balancer's address.
func (b *bench) besideNodePort() (float64, error) {
	l := &lab{b: b, name: "bench-lb-" + strconv.Itoa(os.Getpid())}
	defer l.stop()
	targets, err := l.start()
	if err != nil {
		return 0, fmt.Errorf("a lab: %w", err)
	}
	took := map[string][]float64{}
	order := slices.Clone(targets)
	for range askRounds {
		for _, address := range order {
			seconds, err := l.ask(address)
			if err != nil {
				return 0, err
			}
			took[address] = append(took[address], seconds)
		}
		slices.Reverse(order)
	}
	return report.Median(took[targets[0]]) / report.Median(took[targets[1]]), nil
}

// Both ways masquerade, from the same ports, and the node remembers connections for two minutes after their end: there are fewer than a client has ports.
const (
	askRounds = 40
	askTimes  = 300
)

// lab is a cluster of one node on this machine.
type lab struct {
	b       *bench
	name    string
	running []*exec.Cmd
}

func (l *lab) portal(args ...string) *exec.Cmd {
	return exec.CommandContext(l.b.ctx, l.b.portal, args...)
}

// on is a command on one of the lab's machines.
func (l *lab) on(machine string, command ...string) *exec.Cmd {
	return l.portal(append([]string{"lab", "exec", "--name", l.name, machine, "--"}, command...)...)
}

func (l *lab) kubectl(input string, args ...string) (string, error) {
	cmd := l.portal(append([]string{"kubectl", "--kubeconfig", l.b.path("lab/admin.kubeconfig")}, args...)...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// launch starts a program whose output is kept in a file, which it returns.
func (l *lab) launch(name string, cmd *exec.Cmd) (string, error) {
	output, err := os.Create(l.b.path(name + ".log"))
	if err != nil {
		return "", err
	}
	defer output.Close()
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return "", err
	}
	l.running = append(l.running, cmd)
	return output.Name(), nil
}

// start starts the lab, and returns where the Service is reached: at the balancer's address, and at the node port.
func (l *lab) start() ([]string, error) {
	log, err := l.launch("lab", l.portal("lab", "--name", l.name, "--nodes", "1", "--data-dir", l.b.path("lab"), "--load-balancer-pool", labPool))
	if err != nil {
		return nil, err
	}
	if err := l.eventually("the lab is ready", func() error {
		text, err := os.ReadFile(log)
		if err == nil && !bytes.Contains(text, []byte("The lab is ready")) {
			err = errors.New(string(text))
		}
		return err
	}); err != nil {
		return nil, err
	}
	node, err := l.kubectl("", "get", "node", "node1", "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`)
	if err != nil {
		return nil, err
	}
	node, _, _ = strings.Cut(node, " ")
	if _, err := l.kubectl(fmt.Sprintf(labObjects, node, firstPort), "apply", "-f", "-"); err != nil {
		return nil, err
	}
	conf, err := l.b.write("lab-endpoint.conf", fmt.Sprintf(nginxMain+`http { `+nginxTemporary+`
server { listen %[3]s:%[4]d backlog=8192; location / { default_type text/plain; return 200 "hello, world\n"; } } }
`, l.b.dir, "lab-endpoint", node, firstPort))
	if err != nil {
		return nil, err
	}
	if _, err := l.launch("lab-endpoint", l.on("node1", "nginx", "-c", conf)); err != nil {
		return nil, err
	}
	var targets []string
	err = l.eventually("the Service answers", func() error {
		out, err := l.kubectl("", "get", "service", "bench", "-o", "jsonpath={.status.loadBalancer.ingress[0].ip} {.spec.ports[0].nodePort}")
		if err != nil {
			return err
		}
		address, port, _ := strings.Cut(out, " ")
		if address == "" {
			return errors.New("it has no address")
		}
		targets = []string{address + ":80", node + ":" + port}
		for _, at := range targets {
			if out, err := l.on("client", "curl", "-sS", "--max-time", "2", "http://"+at+"/").CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", at, err, out)
			}
		}
		return nil
	})
	return targets, err
}

// ask is how many seconds requests from outside take, each over a connection of its own.
func (l *lab) ask(address string) (float64, error) {
	program, err := os.Executable()
	if err != nil {
		return 0, err
	}
	out, err := l.on("client", program, "-serve", "asker", "-endpoint", address).Output()
	if err != nil {
		return 0, fmt.Errorf("%s: %w: %s", address, err, out)
	}
	return strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
}

// runAsker makes the requests, one after the other, and prints how many seconds that took.
func runAsker(address string) error {
	begin := time.Now()
	for range askTimes {
		c, err := net.DialTimeout("tcp", address, time.Minute)
		if err != nil {
			return err
		}
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
		text, failed := io.ReadAll(c)
		_ = c.Close()
		if err := errors.Join(err, failed); err != nil || !bytes.Contains(text, []byte("hello, world")) {
			return fmt.Errorf("%s: %q %w", address, text, err)
		}
	}
	fmt.Println(time.Since(begin).Seconds())
	return nil
}

// stop ends the lab, and what runs on its machines with it.
func (l *lab) stop() {
	for _, cmd := range l.running[:min(len(l.running), 1)] {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	}
	for _, cmd := range l.running[min(len(l.running), 1):] {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

func (l *lab) eventually(what string, f func() error) error {
	if err := report.Until(l.b.ctx, 2*time.Minute, 200*time.Millisecond, f); err != nil {
		return fmt.Errorf("it took too long until %s: %w", what, err)
	}
	return nil
}

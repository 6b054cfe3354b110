package main

import (
	_ "embed"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"portal/internal/server"
)

// podsExample is a Service with three Pods behind it; example is a Service without a selector and an EndpointSlice with its one
// endpoint, for a machine that runs no Pods.
var (
	//go:embed example-pods.yaml
	podsExample string
	//go:embed example.yaml
	example string
)

// examplePort is where the endpoint of the example without Pods listens.
const examplePort = "8080"

// welcome prints where things are, and commands that end in an answer from a Service.
func welcome(out io.Writer, info server.Info, pods upPods, proxy partProxy, dns *upDNS, pools []string) error {
	where, try := "none", []string{
		"export KUBECONFIG=" + info.Kubeconfig,
		"portal kubectl get services --all-namespaces",
		"portal audit",
	}
	if dns != nil {
		where = dns.String()
		if dns.resolvConf == "" {
			a := dns.listen[0]
			try = append(try, fmt.Sprintf("dig @%s -p %d kubernetes.default.svc.%s", a.Addr(), a.Port(), upZone))
		}
	}
	lines, err := tryExample(info.DataDir, pods, proxy, dns)
	if err != nil {
		return err
	}
	try = append(try, lines...)
	ending := "Ctrl-C stops it"
	if pods.note == "" {
		ending += ", and its Pods"
	}
	_, err = fmt.Fprintf(out, `Portal is up.
  API         https://%s
  console     %s
  Pods        %s
  proxy       %s
  DNS         %s
  balancers   %s
  kubeconfig  %s

Try, in another terminal:
  %s

%s; what was created stays in %s.
`, info.Address, info.Console, pods, proxy, where, balancersLine(pools), info.Kubeconfig, strings.Join(try, "\n  "), ending, info.DataDir)
	return err
}

// balancersLine says what becomes of Services of type LoadBalancer.
func balancersLine(pools []string) string {
	if len(pools) == 0 {
		return "none: Services of type LoadBalancer stay pending; --load-balancer-pool gives them addresses"
	}
	return "addresses of " + strings.Join(pools, " and ")
}

// tryExample writes a manifest of a Service and returns the commands that use it: through the cluster IP, and by name.
func tryExample(dir string, pods upPods, proxy partProxy, dns *upDNS) ([]string, error) {
	path := filepath.Join(dir, "example.yaml")
	apply := "portal kubectl apply -f " + path
	byName := func(name string) string {
		return fmt.Sprintf(`unshare --mount sh -c "mount --bind %s /etc/resolv.conf && curl http://%s/"`, dns.resolvConf, name)
	}
	switch {
	case proxy.note != "":
		return nil, nil
	case pods.note == "":
		out := []string{
			apply,
			"portal kubectl wait --for=condition=Available deployment/image-processing",
			"curl http://$(portal kubectl get service my-service -o jsonpath={.spec.clusterIP})/",
		}
		if dns != nil && dns.resolvConf != "" {
			out = append(out, byName("my-service"))
		}
		return out, writeChanged(path, podsExample)
	case dns == nil || len(dns.endpoints) == 0:
		return nil, nil
	}
	endpoint, family, url := dns.endpoints[0], "IPv4", "http://$(portal kubectl get service web -o jsonpath={.spec.clusterIP})/"
	if i := slices.IndexFunc(dns.endpoints, netip.Addr.Is4); i >= 0 {
		endpoint = dns.endpoints[i]
	} else {
		family, url = "IPv6", "http://[$(portal kubectl get service web -o jsonpath={.spec.clusterIP})]/"
	}
	text := strings.NewReplacer("ADDRESS", endpoint.String(), "FAMILY", family, "PORT", examplePort).Replace(example)
	return []string{
		fmt.Sprintf(`(cd "$(mktemp -d)" && echo It works. >index.html && exec python3 -m http.server --bind %s %s) &`, endpoint, examplePort),
		apply, "curl " + url, byName("web"),
	}, writeChanged(path, text)
}

// writeChanged writes a file in place, which may be mounted somewhere, unless it says this already: on a full disk it would be emptied.
func writeChanged(path, text string) error {
	if there, err := os.ReadFile(path); err == nil && string(there) == text {
		return nil
	}
	return os.WriteFile(path, []byte(text), 0o644)
}

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

// example is a Service without a selector and an EndpointSlice with its one endpoint.
//
//go:embed example.yaml
var example string

// examplePort is where the endpoint of the example listens.
const examplePort = "8080"

// welcome prints where things are, and commands that end in an answer from a Service.
func welcome(out io.Writer, info server.Info, proxy upProxy, dns *upDNS) error {
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
		if len(dns.endpoints) > 0 && proxy.note == "" {
			lines, err := tryExample(info.DataDir, dns)
			if err != nil {
				return err
			}
			try = append(try, lines...)
		}
	}
	_, err := fmt.Fprintf(out, `Portal is up.
  API         https://%s
  proxy       %s
  DNS         %s
  kubeconfig  %s

Try, in another terminal:
  %s

Ctrl-C stops it; what was created stays in %s.
`, info.Address, proxy, where, info.Kubeconfig, strings.Join(try, "\n  "), info.DataDir)
	return err
}

// tryExample writes a manifest of a Service whose endpoint is an address of this machine, and returns the commands that
// use it: through the cluster IP, and by name.
func tryExample(dir string, dns *upDNS) ([]string, error) {
	endpoint, family, url := dns.endpoints[0], "IPv4", "http://$(portal kubectl get service web -o jsonpath={.spec.clusterIP})/"
	if i := slices.IndexFunc(dns.endpoints, netip.Addr.Is4); i >= 0 {
		endpoint = dns.endpoints[i]
	} else {
		family, url = "IPv6", "http://[$(portal kubectl get service web -o jsonpath={.spec.clusterIP})]/"
	}
	text := strings.NewReplacer("ADDRESS", endpoint.String(), "FAMILY", family, "PORT", examplePort).Replace(example)
	path := filepath.Join(dir, "example.yaml")
	return []string{
		fmt.Sprintf(`(cd "$(mktemp -d)" && echo It works. >index.html && exec python3 -m http.server --bind %s %s) &`, endpoint, examplePort),
		"portal kubectl apply -f " + path,
		"curl " + url,
		fmt.Sprintf(`unshare --mount sh -c "mount --bind %s /etc/resolv.conf && curl http://web/"`, dns.resolvConf),
	}, os.WriteFile(path, []byte(text), 0o644)
}

package nodereport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"portal/internal/proxy"
)

// Alias is what became of using a name that a Service of type ExternalName is an alias of, as a client of the Service would.
type Alias struct {
	// Name is the alias' target, As the name that clients use.
	Name string `json:"name"`
	As   string `json:"as"`
	// Unresolved is why DNS has no address for the name.
	Unresolved string `json:"unresolved,omitempty"`
	// Answers are those of its ports.
	Answers []AliasAnswer `json:"answers,omitempty"`
}

// AliasAnswer is what a port of the target says to both names.
type AliasAnswer struct {
	Port uint16 `json:"port"`
	// Error is why nothing can be sent.
	Error string `json:"error,omitempty"`
	// Status and TargetStatus are the answers to GET / with the alias and with the target as Host; 0: none.
	Status       int `json:"status,omitempty"`
	TargetStatus int `json:"targetStatus,omitempty"`
	// Certified are the names of the certificate, if TLS is spoken and it is not for the alias.
	Certified []string `json:"certified,omitempty"`
	// Rejected: the TLS handshake fails with the alias as server name, and succeeds with the target's.
	Rejected bool `json:"rejected,omitempty"`
}

// alias asks the target of an alias, at most at a few ports.
func alias(ctx context.Context, s *proxy.State, out *Alias, ports []uint16) {
	ctx, cancel := context.WithTimeout(ctx, 3*probeTime)
	defer cancel()
	addrs, err := clusterResolver(s).LookupNetIP(ctx, "ip", strings.TrimSuffix(out.Name, ".")+".")
	if err != nil || len(addrs) == 0 {
		out.Unresolved = lookupError(err)
		return
	}
	for _, port := range ports {
		to := netip.AddrPortFrom(addrs[0].Unmap(), port)
		if !reachable(to.Addr()) {
			out.Answers = append(out.Answers, AliasAnswer{Port: port, Error: "its address " + to.Addr().String() + " is each machine's own"})
			continue
		}
		out.Answers = append(out.Answers, ask(ctx, to, out))
	}
}

// reachable says whether an address can be an endpoint of a Service. Others lead to the node itself, or to the metadata of a cloud: who may read a
// node's state may not use the node to look at these.
func reachable(a netip.Addr) bool {
	a = a.Unmap()
	return !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast() && !a.IsUnspecified()
}

func ask(ctx context.Context, to netip.AddrPort, a *Alias) (out AliasAnswer) {
	out.Port = to.Port()
	if out.Error = dial(ctx, to); out.Error != "" {
		return out
	}
	if certificate, err := handshake(ctx, to, a.As); err == nil {
		if err := certificate.VerifyHostname(a.As); err != nil {
			out.Certified = certificate.DNSNames
			if len(out.Certified) == 0 {
				out.Certified = []string{certificate.Subject.CommonName}
			}
		}
	} else if _, err := handshake(ctx, to, a.Name); err == nil {
		out.Rejected = true
		return out
	}
	scheme := "http"
	if out.Certified != nil {
		scheme = "https"
	}
	out.Status, out.TargetStatus = get(ctx, scheme, to, a.As), get(ctx, scheme, to, a.Name)
	return out
}

// handshake speaks TLS with a server name. Whom the certificate is for is looked at, not who signed it.
func handshake(ctx context.Context, to netip.AddrPort, name string) (*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	c, err := (&tls.Dialer{Config: &tls.Config{ServerName: name, InsecureSkipVerify: true}}).DialContext(ctx, "tcp", to.String()) //nolint:gosec // nothing secret is sent
	if err != nil {
		return nil, err
	}
	defer c.Close()
	chain := c.(*tls.Conn).ConnectionState().PeerCertificates
	if len(chain) == 0 {
		return nil, errors.New("no certificate")
	}
	return chain[0], nil
}

// get is the status of GET / with a Host header; 0: no answer.
func get(ctx context.Context, scheme string, to netip.AddrPort, host string) int {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+"://"+to.String()+"/", nil)
	if err != nil {
		return 0
	}
	request.Host = host
	transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{ServerName: host, InsecureSkipVerify: true}} //nolint:gosec // nothing secret is sent
	response, err := transport.RoundTrip(request)
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	_, _ = io.CopyN(io.Discard, response.Body, 1<<10)
	return response.StatusCode
}

// clusterResolver asks the cluster's DNS, where the proxy serves it; without it, the machine's own.
func clusterResolver(s *proxy.State) *net.Resolver {
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Protocol != "UDP" || f.Port != 53 || f.Address == nil {
			continue
		}
		server := netip.AddrPortFrom(*f.Address, f.Port)
		return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, server.String())
		}}
	}
	return net.DefaultResolver
}

func lookupError(err error) string {
	var reason *net.DNSError
	switch {
	case errors.As(err, &reason) && reason.IsTimeout:
		return TimedOut
	case errors.As(err, &reason):
		return reason.Err
	}
	return "no address"
}

// Attempts are what a report is asked to try besides the Service that it is about.
type Attempts struct {
	// Dial are further addresses to connect to.
	Dial []netip.AddrPort
	// Alias, if not empty, is the target of an alias, As the alias' own name, and Ports those to ask.
	Alias, As string
	Ports     []uint16
}

// maxAttempts is how many addresses and ports may be named.
const maxAttempts = 10

// Encode writes them as parameters of a request.
func (w Attempts) Encode(set func(name, value string)) {
	for _, to := range w.Dial[:min(len(w.Dial), maxAttempts)] {
		set("dial", to.String())
	}
	if w.Alias == "" {
		return
	}
	set("alias", w.Alias)
	set("as", w.As)
	for _, p := range w.Ports[:min(len(w.Ports), maxAttempts)] {
		set("port", strconv.Itoa(int(p)))
	}
}

// readAttempts reads them.
func readAttempts(q map[string][]string) (out Attempts, err error) {
	for _, text := range q["dial"] {
		to, err := netip.ParseAddrPort(text)
		if err != nil || len(out.Dial) == maxAttempts {
			return out, errors.New("dial is " + strconv.Quote(text) + "; want ADDRESS:PORT, at most " + strconv.Itoa(maxAttempts) + " times")
		}
		if !reachable(to.Addr()) {
			return out, errors.New("dial is " + strconv.Quote(text) + ": loopback, link-local, multicast and unspecified addresses are not tried")
		}
		out.Dial = append(out.Dial, to)
	}
	for _, text := range q["port"] {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 || len(out.Ports) == maxAttempts {
			return out, errors.New("port is " + strconv.Quote(text) + "; want a number from 1 to 65535, at most " + strconv.Itoa(maxAttempts) + " times")
		}
		out.Ports = append(out.Ports, uint16(port))
	}
	if list := q["alias"]; len(list) == 1 {
		out.Alias = list[0]
	}
	if list := q["as"]; len(list) == 1 {
		out.As = list[0]
	}
	if (out.Alias == "") != (out.As == "") {
		return out, errors.New("alias and as: give both or none")
	}
	return out, nil
}

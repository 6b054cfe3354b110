// Package apiserver is Portal's REST API on k8s.io/apiserver: Options become a Server, which runs until its context
// ends. What a resource is stands in registry; how it is kept in store.
package apiserver

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation"

	"portal/internal/apiserver/authz"
	"portal/internal/apiserver/tokens"
	"portal/internal/instance"
	"portal/internal/pki"
	"portal/internal/store"
)

// Options are what an administrator can choose about the server.
type Options struct {
	DataDir          string
	Listen           string
	AdvertiseAddress string
	ServiceCIDRs     []string
	NodePorts        string
	TokenFile        string
	// AuthorizationModes are asked one after the other whether a request is allowed.
	AuthorizationModes []string
	ExtraSANs          []string
	// DenyExternalIPs rejects new spec.externalIPs (CVE-2020-8554).
	DenyExternalIPs bool
	// AllowPrivileged accepts Pods with privileged containers: to their node they are root.
	AllowPrivileged bool
	EventTTL        time.Duration

	Tokens TokenOptions
	// EnableAdmission and DisableAdmission name admission plugins. DefaultAccounts says that a controller gives every
	// namespace its default ServiceAccount: then the plugin ServiceAccount is on unless it is disabled. Without, no Pod
	// could be created.
	EnableAdmission, DisableAdmission []string
	DefaultAccounts                   bool

	// Lifetimes are those of the CA and of what it signs. AdoptCA registers this server's CA in an etcd whose cluster has
	// another, because that is lost.
	Lifetimes pki.Lifetimes
	AdoptCA   bool

	// PriorityAndFairness has users wait in turns for the server, by priority, instead of refusing whoever comes too much.
	PriorityAndFairness              bool
	MaxInFlight, MaxMutatingInFlight int
	RequestTimeout                   time.Duration
	MaxBodyBytes                     int64

	// NodeInstead, if set, says where a node is reached instead of at its address and port.
	NodeInstead func(address string) string
	// FilesBeside is the part of the process' file descriptors that is for other parts of it.
	FilesBeside float64
	// CPUs are how many there are to share among users; 0: as many as threads.
	CPUs int
	// OnLoad, if set, is called when the load changes, by one goroutine at a time. It must return at once.
	OnLoad func(Load)

	Store      store.Options
	Encryption EncryptionOptions
	Audit      AuditOptions
	Tracing    TracingOptions
}

// TokenOptions are how the tokens of ServiceAccounts are issued and checked.
type TokenOptions struct {
	// Issuers are those whose tokens are accepted; the first issues.
	Issuers []string
	// Audiences are what this server calls itself; none: Issuers.
	Audiences []string
	// SigningKeyFile and KeyFiles take the place of the key that the server makes for itself.
	SigningKeyFile string
	KeyFiles       []string
	KeysURI        string
	MaxExpiration  time.Duration
	Extend         bool
}

// DefaultOptions serve on loopback only.
func DefaultOptions() Options {
	return Options{
		DataDir:             "/var/lib/portal",
		Listen:              "127.0.0.1:6443",
		ServiceCIDRs:        []string{"10.96.0.0/16", "fd00:96::/112"},
		NodePorts:           "30000-32767",
		AuthorizationModes:  []string{authz.ModeNode, authz.ModeRBAC},
		EventTTL:            time.Hour,
		Tokens:              TokenOptions{Issuers: []string{"https://kubernetes.default.svc.cluster.local"}, Extend: true},
		Lifetimes:           pki.DefaultLifetimes(),
		PriorityAndFairness: true,
		MaxInFlight:         400,
		MaxMutatingInFlight: 200,
		RequestTimeout:      time.Minute,
		MaxBodyBytes:        3 << 20,
		Store:               store.DefaultOptions(),
		Audit:               DefaultAuditOptions(),
	}
}

// completed are Options in the types that the server works with.
type completed struct {
	Options
	host      string
	port      uint16
	advertise netip.Addr
	ranges    []netip.Prefix
	ports     utilnet.PortRange
}

// complete checks the options and names the flag of each mistake.
func (o Options) complete() (*completed, error) {
	c := &completed{Options: o}
	return c, errors.Join(c.completeListen(), c.completeRanges(), c.completeStore(), c.completeLimits(), c.completeAccess(),
		c.completeTokens(), c.completeAdmission(), c.Encryption.validate(), c.Audit.validate(), c.Tracing.validate())
}

// Validate says what is wrong with the options, naming the flags.
func (o Options) Validate() error {
	_, err := o.complete()
	return err
}

// Free says what another process uses of what this server needs: its port or its data directory. It changes nothing.
func (o Options) Free() error {
	c, err := o.complete()
	if err != nil {
		return err
	}
	listener, err := c.bind()
	if err != nil {
		return err
	}
	_ = listener.Close()
	if len(c.Store.Servers) > 0 {
		return nil
	}
	return withHolder(store.Free(c.Store.Dir))
}

// withHolder adds to an error about a data directory in use by whom, if that can be seen.
func withHolder(err error) error {
	var used *store.InUseError
	if errors.As(err, &used) {
		if h, found := instance.UserOf(used.Lock); found {
			used.Holder = h.String()
		}
	}
	return err
}

func (c *completed) bind() (net.Listener, error) {
	listener, err := net.Listen("tcp", c.Listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("--listen %s: %w: stop it, or choose another with --listen", c.Listen, instance.InUse(c.Listen, err))
	}
	if err != nil {
		return nil, fmt.Errorf("--listen %s: %w", c.Listen, err)
	}
	return listener, nil
}

func (c *completed) completeListen() error {
	host, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("--listen %q: must be host:port, e.g. 127.0.0.1:6443", c.Listen)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return fmt.Errorf("--listen %q: the port must be a number from 0 to 65535", c.Listen)
	}
	c.host, c.port = host, uint16(number)
	if c.AdvertiseAddress == "" {
		if addr, err := netip.ParseAddr(host); err == nil {
			c.advertise = advertisable(addr)
		} else {
			c.advertise = advertisable(netip.Addr{})
		}
		return nil
	}
	addr, err := netip.ParseAddr(c.AdvertiseAddress)
	if err != nil {
		return fmt.Errorf("--advertise-address %q: must be an IP address", c.AdvertiseAddress)
	}
	if addr.IsLoopback() || addr.IsUnspecified() || addr.IsMulticast() || addr.IsLinkLocalUnicast() {
		return fmt.Errorf("--advertise-address %s: must be an address that other machines can reach this server at", addr)
	}
	c.advertise = addr
	return nil
}

// advertisable is the address at which others reach a server that listens at addr: none if it listens on loopback only,
// and this machine's if it listens everywhere.
func advertisable(addr netip.Addr) netip.Addr {
	if addr.IsValid() && !addr.IsUnspecified() {
		if addr.IsLoopback() {
			return netip.Addr{}
		}
		return addr
	}
	ip, err := utilnet.ChooseHostInterface()
	if err != nil {
		return netip.Addr{}
	}
	host, _ := netip.AddrFromSlice(ip)
	return host.Unmap()
}

func (c *completed) completeRanges() error {
	const flag = "--service-cluster-ip-range"
	if len(c.ServiceCIDRs) == 0 || len(c.ServiceCIDRs) > 2 {
		return fmt.Errorf("%s: must be one range, or one of IPv4 and one of IPv6, comma separated", flag)
	}
	for _, text := range c.ServiceCIDRs {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return fmt.Errorf("%s %q: must be a CIDR, e.g. 10.96.0.0/16", flag, text)
		}
		if p != p.Masked() {
			return fmt.Errorf("%s %s: has bits beyond its length; did you mean %s?", flag, p, p.Masked())
		}
		if p.Addr().Is6() && p.Bits() < 64 {
			return fmt.Errorf("%s %s: an IPv6 range must be /64 or smaller", flag, p)
		}
		if p.Addr().BitLen()-p.Bits() < 2 {
			return fmt.Errorf("%s %s: is too small to hold a Service", flag, p)
		}
		c.ranges = append(c.ranges, p)
	}
	if len(c.ranges) == 2 && c.ranges[0].Addr().Is4() == c.ranges[1].Addr().Is4() {
		return fmt.Errorf("%s: two ranges must be one of IPv4 and one of IPv6", flag)
	}
	ports, err := utilnet.ParsePortRange(c.NodePorts)
	if err != nil || ports.Base < 1 {
		return fmt.Errorf("--service-node-port-range %q: must be two ports from 1 to 65535, e.g. 30000-32767", c.NodePorts)
	}
	c.ports = *ports
	return nil
}

func (c *completed) completeStore() error {
	if c.DataDir == "" {
		return errors.New("--data-dir: must name a folder")
	}
	dir, err := filepath.Abs(c.DataDir)
	if err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}
	c.DataDir = dir
	c.Store.Dir = filepath.Join(dir, "etcd")
	if (c.Store.CertFile == "") != (c.Store.KeyFile == "") {
		return errors.New("--etcd-certfile and --etcd-keyfile: one needs the other")
	}
	if len(c.Store.Servers) == 0 && (c.Store.CAFile != "" || c.Store.CertFile != "") {
		return errors.New("--etcd-cafile, --etcd-certfile and --etcd-keyfile: are for --etcd-servers, which is not given")
	}
	for _, server := range c.Store.Servers {
		if !strings.HasPrefix(server, "http://") && !strings.HasPrefix(server, "https://") {
			return fmt.Errorf("--etcd-servers %q: must be a URL, e.g. https://10.0.0.1:2379", server)
		}
	}
	return nil
}

func (c *completed) completeLimits() error {
	switch {
	case c.MaxInFlight < 1 || c.MaxMutatingInFlight < 1:
		return errors.New("--max-requests-inflight and --max-mutating-requests-inflight: must be at least 1")
	case c.RequestTimeout < time.Second:
		return errors.New("--request-timeout: must be at least 1s")
	case c.Lifetimes.Certificate < 5*time.Second || c.Lifetimes.Authority < 2*c.Lifetimes.Certificate:
		return errors.New("--certificate-lifetime: must be at least 5s, and --ca-lifetime at least twice as long")
	case c.EventTTL < time.Second:
		return errors.New("--event-ttl: must be at least 1s")
	case c.MaxBodyBytes < 1<<10:
		return errors.New("--max-request-bytes: must be at least 1024")
	}
	return nil
}

// completeAccess checks what says who may come, and by which name.
func (c *completed) completeAccess() error {
	if c.TokenFile != "" {
		if _, err := readTokens(c.TokenFile); err != nil {
			return err
		}
	}
	if err := authz.ValidateModes(c.AuthorizationModes); err != nil {
		return fmt.Errorf("--authorization-mode: %w", err)
	}
	for _, name := range c.ExtraSANs {
		if _, err := netip.ParseAddr(name); err == nil {
			continue
		}
		if len(validation.IsDNS1123Subdomain(name)) > 0 && len(validation.IsWildcardDNS1123Subdomain(name)) > 0 {
			return fmt.Errorf("--tls-san %q: must be an IP address or a DNS name", name)
		}
	}
	return nil
}

// completeTokens checks what is said about ServiceAccounts' tokens.
func (c *completed) completeTokens() error {
	t := &c.Tokens
	if len(t.Issuers) == 0 {
		return errors.New("--service-account-issuer: must be given, e.g. https://kubernetes.default.svc.cluster.local")
	}
	for i, issuer := range t.Issuers {
		if _, err := url.Parse(issuer); issuer == "" || strings.Contains(issuer, ":") && err != nil {
			return fmt.Errorf("--service-account-issuer %q: must be a URL, e.g. https://kubernetes.default.svc.cluster.local", issuer)
		}
		if slices.Contains(t.Issuers[:i], issuer) {
			return fmt.Errorf("--service-account-issuer %q: is given twice", issuer)
		}
	}
	if len(t.Audiences) == 0 {
		t.Audiences = t.Issuers
	}
	if slices.Contains(t.Audiences, "") {
		return errors.New("--api-audiences: must not have an empty one")
	}
	if t.KeysURI != "" {
		if u, err := url.Parse(t.KeysURI); err != nil || u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("--service-account-jwks-uri %q: must be an https URL", t.KeysURI)
		}
	}
	if t.MaxExpiration != 0 && (t.MaxExpiration < time.Hour || t.MaxExpiration > (1<<32)*time.Second) {
		return fmt.Errorf("--service-account-max-token-expiration %s: must be from 1h to %ds, or 0 for no limit", t.MaxExpiration, int64(1)<<32)
	}
	if t.SigningKeyFile != "" {
		data, err := os.ReadFile(t.SigningKeyFile)
		if err != nil {
			return fmt.Errorf("--service-account-signing-key-file: %w", err)
		}
		if _, err := tokens.ParseSigner(data); err != nil {
			return fmt.Errorf("--service-account-signing-key-file %s: %w", t.SigningKeyFile, err)
		}
	}
	_, err := readPublicKeys(t.KeyFiles)
	return err
}

// completeAdmission checks the names of plugins.
func (c *completed) completeAdmission() error {
	for flag, names := range map[string][]string{
		"--enable-admission-plugins": c.EnableAdmission, "--disable-admission-plugins": c.DisableAdmission,
	} {
		for _, name := range names {
			if !slices.Contains(admissionPlugins, name) {
				return fmt.Errorf("%s %q: must be one of %s", flag, name, strings.Join(admissionPlugins, ", "))
			}
			if slices.Contains(c.EnableAdmission, name) && slices.Contains(c.DisableAdmission, name) {
				return fmt.Errorf("--enable-admission-plugins and --disable-admission-plugins: both name %s", name)
			}
		}
	}
	return nil
}

// admission says whether a plugin is on, which is so by default or not.
func (c *completed) admission(name string, byDefault bool) bool {
	return slices.Contains(c.EnableAdmission, name) || byDefault && !slices.Contains(c.DisableAdmission, name)
}

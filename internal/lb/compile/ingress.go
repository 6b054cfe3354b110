package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/lb/capture"
	"portal/internal/lb/config"
	"portal/internal/lb/route"
	"portal/internal/lb/spec"
)

const (
	// ClassName is the class of Ingresses that are served here, and ClassController the controller of classes that are.
	ClassName, ClassController = "portal", "portal.dev/ingress"
	// RedirectAnnotation: "false" has hosts with TLS served without it as well.
	RedirectAnnotation = "portal.dev/ssl-redirect"
	// classAnnotation is how a class was named before there was a field.
	classAnnotation = "kubernetes.io/ingress.class"
)

// Reasons of Events about Ingresses.
const (
	// IngressConflict: an older Ingress has the same host and path, or a certificate is for a host that is another Ingress'.
	IngressConflict = "IngressConflict"
	// BackendUnsupported: it is no Service, or one that can't be used. BackendNotFound: there is none, or no such port.
	BackendUnsupported = "BackendUnsupported"
	BackendNotFound    = "BackendNotFound"
)

// The ports of the entry, as a client knows them.
const (
	HTTPPort  = 80
	HTTPSPort = 443
)

// Served are the Ingresses of Portal's classes, the oldest first.
func Served(all []*networkingv1.Ingress, classes []*networkingv1.IngressClass) (out []*networkingv1.Ingress) {
	ours, known, byDefault := map[string]bool{}, map[string]bool{}, false
	for _, class := range classes {
		known[class.Name] = true
		if class.Spec.Controller == ClassController {
			ours[class.Name] = true
			byDefault = byDefault || class.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true"
		}
	}
	if !known[ClassName] {
		ours[ClassName] = true // nobody has claimed the name
	}
	for _, in := range all {
		name := in.Annotations[classAnnotation]
		if in.Spec.IngressClassName != nil {
			name = *in.Spec.IngressClassName
		}
		if in.DeletionTimestamp == nil && (ours[name] || name == "" && byDefault) {
			out = append(out, in)
		}
	}
	slices.SortFunc(out, func(a, b *networkingv1.Ingress) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// site is what all Ingresses together make of the entry.
type site struct {
	*compiler
	six    bool // the family of the entry's addresses, for which endpoints are preferred
	routes []config.Route
	taken  map[string]*networkingv1.Ingress
	hosts  map[string]*networkingv1.Ingress // who was the first to have a route for a host
	// encrypted are the hosts that are led to HTTPS; an empty one: all of an Ingress without hosts.
	encrypted map[string]bool
}

// ingresses makes the entry's listeners.
func (c *compiler) ingresses() {
	c.out.Ingresses = Served(c.Ingresses, c.Classes)
	entry := c.services[c.Entry]
	if entry == nil || entry.DeletionTimestamp != nil || len(c.out.Ingresses) == 0 {
		return
	}
	addresses := published(entry)
	if len(addresses) == 0 {
		return
	}
	b, _ := spec.Read(entry)
	s := &served{compiler: c, svc: entry, b: b, owner: config.Owner{Kind: "Service", Namespace: entry.Namespace, Name: entry.Name}, addresses: addresses}
	s.filters(true)
	t := &site{compiler: c, taken: map[string]*networkingv1.Ingress{}, hosts: map[string]*networkingv1.Ingress{}, encrypted: map[string]bool{}, six: addresses[0].Is6()}
	for _, in := range c.out.Ingresses {
		t.add(in)
	}
	certificates := t.tls() // after all routes are known
	s.policy = s.findPolicy()
	for _, a := range addresses {
		for _, port := range []uint16{HTTPPort, HTTPSPort} {
			at := netip.AddrPortFrom(a, port)
			if !slices.ContainsFunc(b.Listeners, func(l spec.Listener) bool {
				return l.Port == port && protocolNumber(l.Protocol) == protocolNumber(corev1.ProtocolTCP)
			}) {
				continue
			}
			c.out.Capture.Ports = append(c.out.Capture.Ports, capture.Port{Address: at, Strict: true})
			l := config.Listener{
				Name: "ingress/" + at.String(), Owner: s.owner, Address: at, Protocol: config.HTTP, TrustedProxies: b.TrustedProxies,
				IdleTimeout: b.IdleTimeout, Tags: b.Tags, Limits: config.Limits{BodyBytes: b.BodyBytes}, AccessLog: s.accessLog(), Routes: t.plain(),
			}
			if port == HTTPSPort {
				if certificates == nil {
					continue // nothing to speak TLS with: the port is closed
				}
				l.Protocol, l.Routes = config.HTTPS, t.routes
				l.TLS = &config.TLS{
					Certificates: certificates.Certificates, Names: certificates.Names,
					MinVersion: s.policy.Min, MaxVersion: s.policy.Max, CipherSuites: s.policy.Suites,
				}
			}
			c.out.Config.Listeners = append(c.out.Config.Listeners, l)
		}
	}
}

// plain are the routes without TLS: those of encrypted hosts lead to the same address with it.
func (t *site) plain() (out []config.Route) {
	for _, r := range t.routes {
		if t.encrypted[t.redirectKey(r.Owner, r.Host)] {
			r = config.Route{Host: r.Host, Path: r.Path, Match: r.Match, Owner: r.Owner, Redirect: &config.Redirect{Scheme: "https", Status: 308}}
		}
		out = append(out, r)
	}
	return out
}

func (t *site) redirectKey(owner config.Owner, host string) string {
	return owner.Namespace + "/" + owner.Name + "/" + host
}

// add compiles one Ingress.
func (t *site) add(in *networkingv1.Ingress) {
	owner := config.Owner{Kind: "Ingress", Namespace: in.Namespace, Name: in.Name}
	secure := t.secure(in)
	add := func(host, path string, match config.PathMatch, backend *networkingv1.IngressBackend) {
		r := config.Route{Host: strings.ToLower(host), Path: path, Match: match, Owner: owner}
		if _, err := route.Compile([]config.Route{r}); err != nil {
			t.ingressProblem(in, spec.InvalidSpec, "host %q, path %q is not served: %v", host, path, err)
			return
		}
		if t.hosts[r.Host] == nil {
			t.hosts[r.Host] = in
		}
		key := route.Key(&r)
		if older := t.taken[key]; older != nil && older != in {
			t.ingressProblem(in, IngressConflict, "host %q, path %q (%s) is served by the older Ingress %s/%s", host, path, match, older.Namespace, older.Name)
			return
		}
		t.taken[key] = in
		t.backend(in, backend, &r)
		t.routes = append(t.routes, r)
		if secure(host) {
			t.encrypted[t.redirectKey(owner, r.Host)] = true
		}
	}
	for _, rule := range in.Spec.Rules {
		if rule.HTTP == nil || len(rule.HTTP.Paths) == 0 {
			if in.Spec.DefaultBackend != nil {
				add(rule.Host, "/", config.Prefix, in.Spec.DefaultBackend)
			}
			continue
		}
		for i := range rule.HTTP.Paths {
			p := &rule.HTTP.Paths[i]
			match, path := config.Prefix, p.Path // what an implementation may choose for ImplementationSpecific
			if p.PathType != nil && *p.PathType == networkingv1.PathTypeExact {
				match = config.Exact
			}
			if path == "" {
				path = "/"
			}
			add(rule.Host, path, match, &p.Backend)
		}
	}
	if in.Spec.DefaultBackend != nil {
		add("", "", config.Prefix, in.Spec.DefaultBackend)
	}
}

// secure says which of the Ingress' hosts are led to HTTPS.
func (t *site) secure(in *networkingv1.Ingress) func(host string) bool {
	hosts, all := map[string]bool{}, false
	redirect := in.Annotations[RedirectAnnotation]
	if redirect != "" && redirect != "true" && redirect != "false" {
		t.ingressProblem(in, spec.InvalidAnnotation, "%s: %q is not allowed: it must be \"true\" or \"false\"", RedirectAnnotation, redirect)
	}
	for _, entry := range in.Spec.TLS {
		// Hosts are led to HTTPS even if their certificate is missing: what is to be secret is not served in clear.
		all = all || len(entry.Hosts) == 0
		for _, h := range entry.Hosts {
			hosts[strings.ToLower(h)] = true
		}
	}
	return func(host string) bool {
		host = strings.ToLower(host)
		_, parent, _ := strings.Cut(host, ".")
		return redirect != "false" && (all || hosts[host] || host != "" && hosts["*."+parent])
	}
}

// noBackend is the response to clients where a backend can't be used.
const noBackend = "This site has no usable backend."

// backend sets where a route leads.
func (t *site) backend(in *networkingv1.Ingress, b *networkingv1.IngressBackend, r *config.Route) {
	refuse := func(reason, format string, args ...any) {
		t.ingressProblem(in, reason, "host %q, path %q: %s; it is answered with 503", r.Host, r.Path, fmt.Sprintf(format, args...))
		r.Status, r.Message = 503, noBackend
	}
	if b.Service == nil {
		kind := "nothing"
		if b.Resource != nil {
			kind = b.Resource.Kind + " " + b.Resource.Name
		}
		refuse(BackendUnsupported, "the backend is a resource (%s): only Services are supported", kind)
		return
	}
	svc := t.services[in.Namespace+"/"+b.Service.Name]
	if svc == nil {
		refuse(BackendNotFound, "there is no Service %s", b.Service.Name)
		return
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		t.external(svc, b.Service.Port, r, refuse)
		return
	}
	i := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool {
		return (p.Protocol == corev1.ProtocolTCP || p.Protocol == "") && (b.Service.Port.Name != "" && p.Name == b.Service.Port.Name || b.Service.Port.Name == "" && p.Port == b.Service.Port.Number)
	})
	if i < 0 {
		refuse(BackendNotFound, "Service %s has no TCP port %s", b.Service.Name, portText(b.Service.Port))
		return
	}
	port := &svc.Spec.Ports[i]
	r.Pool = fmt.Sprintf("ingress/%s/%s/%d", svc.Namespace, svc.Name, port.Port)
	if t.out.Config.Pools[r.Pool] != nil {
		return
	}
	balancer, _ := spec.Read(svc)
	pool := t.poolOf(svc, balancer, port.Name, uint16(port.Port), t.six, everywhere) // traffic policies are about the Service's own addresses
	if pool.Protocol = httpProtocol(port.AppProtocol); pool.Protocol.Encrypted() {
		var blind bool
		if pool.TLS, blind = (&served{compiler: t.compiler, svc: svc, b: balancer}).endpointCA(); blind {
			// What is wrong is said of the Service.
			r.Pool, r.Status, r.Message = "", 503, noBackend
			return
		}
	}
	t.out.Config.Pools[r.Pool] = pool
}

func portText(p networkingv1.ServiceBackendPort) string {
	if p.Name != "" {
		return strconv.Quote(p.Name)
	}
	return strconv.Itoa(int(p.Number))
}

// httpProtocol is what the endpoints of an Ingress' backend speak.
func httpProtocol(appProtocol *string) config.Protocol {
	if appProtocol == nil {
		return config.HTTP
	}
	switch strings.ToLower(*appProtocol) {
	case "https", "kubernetes.io/wss":
		return config.HTTPS
	}
	if speaksH2(*appProtocol) {
		return config.H2C
	}
	return config.HTTP
}

// external leads to what a name resolves to. A name that is an address says nothing that could be followed, and may be an address that nobody should reach.
func (t *site) external(svc *corev1.Service, port networkingv1.ServiceBackendPort, r *config.Route, refuse func(reason, format string, args ...any)) {
	name := strings.TrimSuffix(strings.ToLower(svc.Spec.ExternalName), ".")
	number := uint16(port.Number)
	for _, p := range svc.Spec.Ports {
		if port.Name != "" && p.Name == port.Name {
			number = uint16(p.Port)
		}
	}
	switch _, err := netip.ParseAddr(name); {
	case err == nil:
		refuse(BackendUnsupported, "the externalName %q of Service %s is an IP address: use an EndpointSlice for it", name, svc.Name)
		return
	case number == 0:
		refuse(BackendNotFound, "Service %s has no port %s", svc.Name, portText(port))
		return
	}
	t.names[name] = true
	r.Pool = fmt.Sprintf("external/%s/%s/%d", svc.Namespace, svc.Name, number)
	pool := &config.Pool{
		Owner: config.Owner{Kind: "Service", Namespace: svc.Namespace, Name: svc.Name}, Port: strconv.Itoa(int(number)), Protocol: config.HTTP,
		ConnectTimeout: config.DefaultConnectTimeout, Retries: config.DefaultRetries, Outlier: &defaultOutlier,
	}
	addrs, known := t.Resolve(name)
	var local []string
	for _, a := range addrs {
		a = a.Unmap()
		// A name of somebody's own must not lead to this machine's inside.
		if a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() || a.IsMulticast() {
			local = append(local, a.String())
			continue
		}
		pool.Endpoints = append(pool.Endpoints, config.Endpoint{Address: netip.AddrPortFrom(a, number), Name: name})
	}
	if known && len(pool.Endpoints) == 0 {
		if len(local) > 0 {
			refuse(BackendUnsupported, "the externalName %q of Service %s leads to %s, which is not allowed", name, svc.Name, strings.Join(local, ", "))
		} else {
			refuse(BackendNotFound, "the externalName %q of Service %s resolves to nothing", name, svc.Name)
		}
		r.Pool = ""
		return
	}
	slices.SortFunc(pool.Endpoints, func(a, b config.Endpoint) int { return a.Address.Compare(b.Address) })
	t.out.Config.Pools[r.Pool] = pool
}

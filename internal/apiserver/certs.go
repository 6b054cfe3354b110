package apiserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/klog/v2"

	"portal/internal/identity"
	"portal/internal/pki"
	"portal/internal/store"
)

const (
	// CertificatesPath is where the server lists its certificates (GET), and renews those named by ?name= (POST).
	// With ?revoke=true the keys of tokens before the renewed one are not accepted any more.
	CertificatesPath = "/portal/v1/certificates"

	// authorityPrefix holds the CA certificates of the cluster's servers, by fingerprint. authorityRoot is created once
	// for each cluster, so that of two servers with different CAs only one can be the first.
	authorityRoot   = store.Prefix + "/portal/authorities"
	authorityPrefix = authorityRoot + "/"

	// rewatchAfter is the pause before a watch on them that has ended is opened again.
	rewatchAfter = time.Second
)

// certificates keeps the server's certificates valid while it runs: the CA, the server's own and the administrator's. The
// CAs of all servers of the cluster are in etcd, and every server trusts all of them.
type certificates struct {
	authority     *pki.Authority
	etcd          *clientv3.Client
	dir           string
	server, admin pki.Request
	// nodes is who this server is to nodes, extensions who it is to API servers behind Services.
	nodes, extensions pki.Request
	// retry is how long to wait after a failure.
	retry time.Duration
	// unregistered is sent to when the CAs could not be compared with etcd.
	unregistered chan struct{}
	// writeConfig gives the administrator a new certificate; changed is called when a CA came or went.
	writeConfig func(admin pki.Pair, bundle []byte) error
	changed     func()
	// keys are the keys of tokens, which are listed and renewed with the certificates.
	keys   *tokenKeys
	issuer string

	// checking lets one check run at a time; mu guards what connections read.
	checking  sync.Mutex
	mu        sync.Mutex
	pair      pki.Pair
	nodePair  pki.Pair
	extPair   pki.Pair
	trusted   []byte
	verify    x509.VerifyOptions
	next      time.Time
	config    []byte
	listeners []dynamiccertificates.Listener
}

func (s *Server) openCertificates(ctx context.Context) (err error) {
	dir := filepath.Join(s.opts.DataDir, "pki")
	c := &certificates{
		etcd: s.store.Client(), dir: dir,
		server: pki.Request{File: "server", Name: "portal-server", Hosts: s.hosts()},
		admin:  pki.Request{File: "admin", Name: "portal-admin", Organizations: []string{user.SystemPrivilegedGroup}},
		nodes:  pki.Request{File: "node-client", Name: identity.NodeClient},

		extensions: pki.Request{File: "front-proxy-client", Name: identity.FrontProxy},

		retry: min(10*time.Second, s.opts.Lifetimes.Certificate/20), unregistered: make(chan struct{}, 1),

		writeConfig: s.writeKubeconfig,
		changed:     func() { s.loop.Check() },
	}
	if c.authority, err = pki.Open(dir, s.opts.Lifetimes); err != nil {
		return err
	}
	s.certs = c
	if err := c.join(ctx, s.opts.AdoptCA); err != nil {
		return err
	}
	return c.check()
}

// serve has the server's certificate stand for other names and addresses.
func (c *certificates) serve(hosts []string) {
	c.checking.Lock()
	c.server.Hosts = hosts
	c.checking.Unlock()
	if err := c.check(); err != nil {
		klog.ErrorS(err, "the server's certificate could not be made for the cluster's own addresses, retrying")
	}
}

// join makes sure that this server's CA is one of the cluster's: clients and servers of another would not trust it.
func (c *certificates) join(ctx context.Context, adopt bool) error {
	registered, err := c.registered(ctx)
	if err != nil {
		return fmt.Errorf("read the certificate authorities of this cluster: %w", err)
	}
	own := c.authority.Own()
	if len(registered) == 0 {
		first, err := c.etcd.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(authorityRoot), "=", 0)).
			Then(clientv3.OpPut(authorityRoot, ""), put(own[0])).Commit()
		if err != nil {
			klog.ErrorS(err, "certificate authority could not be registered in etcd, retrying")
			return nil
		}
		if !first.Succeeded { // all that was registered has expired, or another server was first
			if registered, err = c.registered(ctx); err != nil {
				return err
			}
		}
	}
	known := len(registered) == 0 || slices.ContainsFunc(own, func(cert *x509.Certificate) bool {
		return slices.ContainsFunc(registered, cert.Equal)
	})
	if !known && !adopt {
		return fmt.Errorf("the certificate authority in %s (%s) is not that of the cluster in this etcd (%s): "+
			"copy the folder pki of one of its servers here, or, if that is lost, start once with --adopt-ca",
			c.dir, fingerprint(own[0])[:16], fingerprint(registered[0])[:16])
	}
	return nil
}

func fingerprint(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}

func put(cert *x509.Certificate) clientv3.Op {
	return clientv3.OpPut(authorityPrefix+fingerprint(cert), string(pki.EncodeCertificates(cert)))
}

// registered are the CAs of the cluster that have not expired.
func (c *certificates) registered(ctx context.Context) ([]*x509.Certificate, error) {
	resp, err := c.etcd.Get(ctx, authorityPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	var out []*x509.Certificate
	for _, kv := range resp.Kvs {
		if certs, err := pki.ParseCertificates(kv.Value); err == nil && time.Now().Before(certs[0].NotAfter) {
			out = append(out, certs[0])
		}
	}
	return out, nil
}

// register writes this server's CAs to etcd, removes those that have expired, and trusts those of others.
func (c *certificates) register(ctx context.Context) error {
	resp, err := c.etcd.Get(ctx, authorityPrefix, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	var ops []clientv3.Op
	var peers []*x509.Certificate
	have := map[string]bool{}
	for _, kv := range resp.Kvs {
		certs, err := pki.ParseCertificates(kv.Value)
		if err != nil || !time.Now().Before(certs[0].NotAfter) {
			ops = append(ops, clientv3.OpDelete(string(kv.Key)))
			continue
		}
		have[strings.TrimPrefix(string(kv.Key), authorityPrefix)] = true
		peers = append(peers, certs[0])
	}
	for _, cert := range c.authority.Own() {
		if time.Now().Before(cert.NotAfter) && !have[fingerprint(cert)] {
			ops = append(ops, put(cert))
		}
	}
	c.authority.SetPeers(peers)
	if len(ops) == 0 {
		return nil
	}
	_, err = c.etcd.Txn(ctx).Then(ops...).Commit()
	return err
}

// check renews what is due, or what names say, and makes it known to the server, to etcd and to the administrator.
func (c *certificates) check(names ...string) error {
	c.checking.Lock()
	defer c.checking.Unlock()
	rotated, err := c.authority.Rotate(slices.Contains(names, "ca"))
	if err != nil {
		return fmt.Errorf("rotate the certificate authority: %w", err)
	}
	if rotated {
		klog.InfoS("certificate authority rotated, the one before stays trusted until it expires", "notAfter", c.authority.Own()[0].NotAfter)
	}
	// Other servers should know a CA before anybody comes with a certificate that it signed.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := c.register(ctx); err != nil {
		klog.ErrorS(err, "certificate authorities could not be compared with etcd, retrying", "in", c.retry)
		select {
		case c.unregistered <- struct{}{}:
		default:
		}
	}
	server, serverCert, err := c.authority.Issue(c.server, slices.Contains(names, c.server.File))
	if err != nil {
		return fmt.Errorf("renew the server's certificate: %w", err)
	}
	admin, adminCert, err := c.authority.Issue(c.admin, slices.Contains(names, c.admin.File))
	if err != nil {
		return fmt.Errorf("renew the administrator's certificate: %w", err)
	}
	nodes, nodesCert, err := c.authority.Issue(c.nodes, slices.Contains(names, c.nodes.File))
	if err != nil {
		return fmt.Errorf("renew the certificate for connections to nodes: %w", err)
	}
	extensions, extensionsCert, err := c.authority.Issue(c.extensions, slices.Contains(names, c.extensions.File))
	if err != nil {
		return fmt.Errorf("renew the certificate for connections to API servers behind Services: %w", err)
	}
	certs := map[string]*x509.Certificate{
		"ca": c.authority.Own()[0], c.server.File: serverCert, c.admin.File: adminCert, c.nodes.File: nodesCert, c.extensions.File: extensionsCert,
	}
	bundle := c.authority.Bundle()
	c.publish(server, nodes, extensions, bundle, certs)
	if config := slices.Concat(admin.Cert, bundle); !bytes.Equal(config, c.config) {
		if err := c.writeConfig(admin, bundle); err != nil {
			return err
		}
		c.config = config
	}
	return nil
}

// publish makes new connections use what is given.
func (c *certificates) publish(pair, nodes, extensions pki.Pair, bundle []byte, certs map[string]*x509.Certificate) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	c.mu.Lock()
	fresh, newCA := !bytes.Equal(pair.Cert, c.pair.Cert), !bytes.Equal(bundle, c.trusted)
	started := c.trusted != nil
	c.pair, c.nodePair, c.extPair, c.trusted = pair, nodes, extensions, bundle
	c.verify = x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	c.next = time.Time{}
	for name, cert := range certs {
		certificateExpiration.WithLabelValues(name).Set(float64(cert.NotAfter.Unix()))
		if at := pki.RenewAt(cert); c.next.IsZero() || at.Before(c.next) {
			c.next = at
		}
	}
	listeners := slices.Clone(c.listeners)
	c.mu.Unlock()
	if !fresh && !newCA || !started {
		return
	}
	if fresh {
		klog.InfoS("server certificate renewed", "notAfter", certs[c.server.File].NotAfter)
	}
	for _, l := range listeners {
		l.Enqueue()
	}
	if newCA {
		c.changed()
	}
}

// run renews until ctx ends.
func (c *certificates) run(ctx context.Context) {
	var peers clientv3.WatchChan
	for ctx.Err() == nil {
		if peers == nil { // before the check, which then sees what came until here
			peers = c.etcd.Watch(ctx, authorityPrefix, clientv3.WithPrefix())
		}
		c.mu.Lock()
		wait := time.Until(c.next)
		c.mu.Unlock()
		if err := c.check(); err != nil {
			klog.ErrorS(err, "certificates could not be renewed, retrying", "in", c.retry)
			wait = c.retry
		}
		timer := time.NewTimer(min(max(wait, 100*time.Millisecond), time.Hour))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-c.unregistered:
			pause(ctx, c.retry)
		case _, ok := <-peers:
			if !ok { // a watch that lost its connection and missed a compaction does not come back by itself
				peers = nil
				pause(ctx, rewatchAfter)
			}
		}
		timer.Stop()
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// bundle is every CA that is trusted, in PEM.
func (c *certificates) bundle() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.trusted
}

// agreed is every CA that is trusted, in PEM, in an order in which all servers of the cluster have them: for objects that each server
// writes. In a bundle the one that signs comes first, and that may be another for each server.
func (c *certificates) agreed() []byte {
	trusted := c.authority.Trusted()
	slices.SortFunc(trusted, func(a, b *x509.Certificate) int { return strings.Compare(fingerprint(a), fingerprint(b)) })
	return pki.EncodeCertificates(trusted...)
}

// forNodes is what this server shows to nodes.
func (c *certificates) forNodes() (cert, key []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodePair.Cert, c.nodePair.Key
}

// forExtensions is what this server shows to API servers behind Services.
func (c *certificates) forExtensions() (cert, key []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.extPair.Cert, c.extPair.Key
}

// ServeHTTP lists the certificates, and renews those that a POST names.
func (c *certificates) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet:
	case http.MethodPost:
		names := r.URL.Query()["name"]
		for _, name := range names {
			if known := []string{"ca", c.server.File, c.admin.File, c.nodes.File, c.extensions.File, tokenKey}; !slices.Contains(known, name) {
				http.Error(w, fmt.Sprintf("name %q: must be one of %s", name, strings.Join(known, ", ")), http.StatusBadRequest)
				return
			}
		}
		if slices.Contains(names, tokenKey) {
			if err := c.keys.renew(r.Context(), r.URL.Query().Get("revoke") == "true"); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		}
		if err := c.check(names...); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	default:
		w.Header().Set("Allow", "GET, POST")
		http.Error(w, "GET lists certificates, POST renews those that ?name= names", http.StatusMethodNotAllowed)
		return
	}
	list, err := pki.List(c.dir)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(append(list, c.keys.list(c.issuer)...))
}

// servingCertificate and clientAuthority are certificates as k8s.io/apiserver reads them.
type (
	servingCertificate struct{ *certificates }
	clientAuthority    struct{ *certificates }
)

var (
	_ dynamiccertificates.CertKeyContentProvider = servingCertificate{}
	_ dynamiccertificates.CAContentProvider      = clientAuthority{}
)

// AddListener adds one that is notified of every change.
func (c *certificates) AddListener(l dynamiccertificates.Listener) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listeners = append(c.listeners, l)
}

func (servingCertificate) Name() string { return "server" }

func (s servingCertificate) CurrentCertKeyContent() (cert, key []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pair.Cert, s.pair.Key
}

func (clientAuthority) Name() string { return "client-ca" }

func (c clientAuthority) CurrentCABundleContent() []byte { return c.bundle() }

func (c clientAuthority) VerifyOptions() (x509.VerifyOptions, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.verify, true
}

package apiserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/pki"
)

// asAdministrator sends a request on a new connection with what admin.kubeconfig holds at the moment; roots replaces the CAs
// that it trusts.
func asAdministrator(s *Server, roots *x509.CertPool) error {
	config, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig())
	if err != nil {
		return err
	}
	tlsConfig, err := restclient.TLSConfigFor(config)
	if err != nil {
		return err
	}
	if roots != nil {
		tlsConfig.RootCAs = roots
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: tlsConfig, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Get(config.Host + servicesPath)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET: %s", resp.Status)
	}
	return nil
}

// TestCertificatesRotateUnderLoad: with certificates that live for seconds, clients that reconnect notice nothing, neither
// those that read the kubeconfig anew nor those that know only the first CA.
func TestCertificatesRotateUnderLoad(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.Lifetimes = pki.Lifetimes{Authority: 20 * time.Second, Certificate: 9 * time.Second}
	s := start(t, opts)
	firstCA := s.certs.authority.Own()[0]
	first := x509.NewCertPool()
	first.AddCert(firstCA)

	var requests, failures atomic.Int64
	ctx, stop := context.WithCancel(context.Background())
	var load sync.WaitGroup
	for _, roots := range []*x509.CertPool{nil, nil, first} {
		load.Go(func() {
			for ctx.Err() == nil {
				if roots == first && time.Until(firstCA.NotAfter) < time.Second {
					return
				}
				requests.Add(1)
				if err := asAdministrator(s, roots); err != nil {
					failures.Add(1)
					t.Errorf("only the first CA: %v: %v", roots == first, err)
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	serving := map[string]bool{}
	eventually(t, func() error {
		conn, err := tls.Dial("tcp", s.Address(), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it only looks
		if err != nil {
			return err
		}
		defer conn.Close()
		serving[conn.ConnectionState().PeerCertificates[0].SerialNumber.String()] = true
		if own := s.certs.authority.Own(); own[0].Equal(firstCA) || len(serving) < 3 {
			return fmt.Errorf("%d server certificates and %d CAs so far", len(serving), len(own))
		}
		return nil
	})
	time.Sleep(time.Second)
	stop()
	load.Wait()
	t.Logf("%d requests, %d failed, %d server certificates", requests.Load(), failures.Load(), len(serving))
	info, err := os.Stat(s.Kubeconfig())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("admin.kubeconfig: %v %v", info.Mode(), err)
	}
}

// TestForeignAuthorityIsRefused: a server with another CA than the cluster's says so and does not start, unless told to.
func TestForeignAuthorityIsRefused(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	_, stop := startStoppable(t, opts)
	stop()
	if err := os.RemoveAll(filepath.Join(opts.DataDir, "pki")); err != nil {
		t.Fatal(err)
	}
	s, err := New(context.Background(), opts)
	if err == nil {
		s.Close()
		t.Fatal("a server with another CA started")
	}
	if text := err.Error(); !strings.Contains(text, "--adopt-ca") || strings.Contains(text, "\n") {
		t.Errorf("it says %q", text)
	}
	opts.AdoptCA = true
	_, stop = startStoppable(t, opts)
	stop()
	opts.AdoptCA = false
	_, stop = startStoppable(t, opts) // it is the cluster's now
	stop()
}

// TestServersAgreeOnAuthorities: after one of two servers has rotated its CA, both write the same objects, so that they don't
// take turns in writing them for ever.
func TestServersAgreeOnAuthorities(t *testing.T) {
	t.Parallel()
	s := start(t, testOptions(t))
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(s.certs.dir)); err != nil {
		t.Fatal(err)
	}
	peer, err := pki.Open(dir, s.opts.Lifetimes)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.certs.check("ca"); err != nil {
		t.Fatal(err)
	}
	peer.SetPeers(s.certs.authority.Own())
	other := &Server{client: s.client, certs: &certificates{authority: peer, trusted: peer.Bundle()}}
	if first, second := s.certs.authority.Own()[0], peer.Own()[0]; first.Equal(second) {
		t.Fatal("both sign with the same CA")
	}
	if !bytes.Equal(s.RootCA(), other.RootCA()) {
		t.Errorf("the CA that Pods get depends on which server leads:\n%s%s", s.RootCA(), other.RootCA())
	}
	ctx := t.Context()
	version := func() string {
		config, err := s.client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, authenticationConfig, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return config.ResourceVersion
	}
	if err := s.ensureAuthenticationConfig(ctx); err != nil {
		t.Fatal(err)
	}
	before := version()
	if err := other.ensureAuthenticationConfig(ctx); err != nil {
		t.Fatal(err)
	}
	if after := version(); after != before {
		t.Errorf("the other server wrote it again: version %s after %s", after, before)
	}
}

// lostWatch is an etcd client whose first watch ends at once, as one does that lost its connection and missed a compaction.
type lostWatch struct {
	clientv3.Watcher
	lost sync.Once
}

func (w *lostWatch) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	ended := make(chan clientv3.WatchResponse)
	first := false
	w.lost.Do(func() { first = true })
	if first {
		close(ended)
		return ended
	}
	return w.Watcher.Watch(ctx, key, opts...)
}

// unreachable is an etcd client whose reads fail as long as it is set to.
type unreachable struct {
	clientv3.KV
	now atomic.Bool
}

func (u *unreachable) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if u.now.Load() {
		return nil, errors.New("etcd does not answer")
	}
	return u.KV.Get(ctx, key, opts...)
}

// TestAuthorityIsRegisteredSoon: a CA that could not be registered in etcd when it was made is, as soon as etcd answers: other
// servers don't trust it before.
func TestAuthorityIsRegisteredSoon(t *testing.T) {
	t.Parallel()
	etcd := &unreachable{}
	s, stop := startStoppable(t, testOptions(t), func(s *Server) {
		etcd.KV = s.certs.etcd.KV
		s.certs.etcd, s.certs.retry = &clientv3.Client{KV: etcd, Watcher: s.certs.etcd.Watcher}, 100*time.Millisecond
	})
	defer stop()
	etcd.now.Store(true)
	if err := s.certs.check("ca"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	etcd.now.Store(false)
	eventually(t, func() error {
		registered, err := s.certs.registered(t.Context())
		if err == nil && !slices.ContainsFunc(registered, s.certs.authority.Own()[0].Equal) {
			err = errors.New("the new CA is not registered")
		}
		return err
	})
}

// TestPeersAreTrustedAfterLostWatch: CAs of other servers are trusted at once also after the watch on them was lost.
func TestPeersAreTrustedAfterLostWatch(t *testing.T) {
	t.Parallel()
	s, stop := startStoppable(t, testOptions(t), func(s *Server) {
		etcd := s.certs.etcd
		s.certs.etcd = &clientv3.Client{KV: etcd.KV, Watcher: &lostWatch{Watcher: etcd.Watcher}}
	})
	defer stop()
	peer, err := pki.Open(t.TempDir(), s.opts.Lifetimes)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * rewatchAfter) // or the first look after the start would find it
	if _, err := s.store.Client().Txn(t.Context()).Then(put(peer.Own()[0])).Commit(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if !bytes.Contains(s.certs.bundle(), pki.EncodeCertificates(peer.Own()[0])) {
			return errors.New("the CA of another server is not trusted")
		}
		return nil
	})
}

package apiserver

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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

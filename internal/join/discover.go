package join

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/bootstrap"
	"portal/internal/pki"
)

// infoPath is where a cluster says which CAs it has. Anybody may read it.
const infoPath = "/api/v1/namespaces/kube-public/configmaps/" + bootstrap.ClusterInfo

// failure is an error that goes on as long as nobody does something about it.
type failure struct{ error }

func (f *failure) Unwrap() error { return f.error }

// fail makes an error that is not retried.
func fail(format string, args ...any) error { return &failure{fmt.Errorf(format, args...)} }

func permanent(err error) bool {
	var f *failure
	return errors.As(err, &f)
}

// notYet is an error that may be over in a moment, and is one for good if it is not: a token that a server hasn't heard of, or
// roles that it hasn't read yet.
type notYet struct{ error }

func (n *notYet) Unwrap() error { return n.error }

// discover finds the CAs of a cluster. What it asks first is asked of somebody unknown: it sends nothing secret, and believes
// only what the hash or the token's signature confirms.
func discover(ctx context.Context, o *Options) ([]byte, error) {
	info, err := ask(ctx, o.Server, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // verified below, by hash or signature
	if err != nil {
		return nil, err
	}
	trusted, err := believe(info, o)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	for _, cert := range trusted {
		roots.AddCert(cert)
	}
	// The same again over a connection that these CAs vouch for: from now on it is the cluster that answers.
	if info, err = ask(ctx, o.Server, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}); err != nil {
		return nil, err
	}
	all, err := authorities(info, o.Server)
	return pki.EncodeCertificates(all...), err
}

// believe returns the CAs that the hashes name, or all of those that the token has signed.
func believe(info *corev1.ConfigMap, o *Options) ([]*x509.Certificate, error) {
	all, err := authorities(info, o.Server)
	if err != nil {
		return nil, err
	}
	if len(o.Hashes) > 0 {
		named := slices.DeleteFunc(slices.Clone(all), func(c *x509.Certificate) bool { return !slices.Contains(o.Hashes, bootstrap.Hash(c)) })
		if len(named) == 0 {
			return nil, fail("the CA of %s has the hash %s, which is not what --ca-hash says: it is another cluster's, or somebody is in between. The token was not sent",
				o.Server, bootstrap.Hash(all[0]))
		}
		return named, nil
	}
	signature, ok := info.Data[bootstrap.SignaturePrefix+o.Token.ID]
	if !ok {
		return nil, &notYet{fmt.Errorf("%s does not know the token %s…: it is wrong, has expired, or was deleted. `portal token create` makes another", o.Server, o.Token.ID)}
	}
	if !o.Token.Signed(info.Data[bootstrap.KubeconfigKey], signature) {
		return nil, fail("%s has signed its CA with another token: the one given is wrong, or somebody is in between. It was not sent", o.Server)
	}
	return all, nil
}

// authorities are the CAs in cluster-info.
func authorities(info *corev1.ConfigMap, server string) ([]*x509.Certificate, error) {
	_, certs, err := Cluster(info)
	if err != nil {
		return nil, fail("%s%s: %w", server, infoPath, err)
	}
	return certs, nil
}

// Cluster reads cluster-info: where its servers say they are, and which CAs they have.
func Cluster(info *corev1.ConfigMap) (server string, ca []*x509.Certificate, err error) {
	config, err := clientcmd.Load([]byte(info.Data[bootstrap.KubeconfigKey]))
	if err == nil {
		for _, cluster := range config.Clusters {
			if ca, err = pki.ParseCertificates(cluster.CertificateAuthorityData); err == nil {
				return cluster.Server, ca, nil
			}
		}
	}
	return "", nil, errors.New("it holds no kubeconfig with a certificate authority")
}

// ask fetches cluster-info without credentials.
func ask(ctx context.Context, server string, config *tls.Config) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(server, "/")+infoPath, nil)
	if err != nil {
		return nil, &failure{err}
	}
	request.Header.Set("Accept", "application/json")
	client := &http.Client{
		Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true, Proxy: http.ProxyFromEnvironment},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return errors.New("it redirects, which an API server does not")
		},
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, explain(err, server)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	switch {
	case err != nil:
		return nil, err
	case response.StatusCode == http.StatusNotFound:
		return nil, &notYet{fmt.Errorf("%s has no kube-public/%s: it is not an API server of Portal", server, bootstrap.ClusterInfo)}
	case response.StatusCode == http.StatusUnauthorized || response.StatusCode == http.StatusForbidden:
		return nil, &notYet{fmt.Errorf("%s lets nobody read kube-public/%s without credentials: it must, for machines to join", server, bootstrap.ClusterInfo)}
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("GET %s%s: %s", server, infoPath, response.Status)
	}
	info := &corev1.ConfigMap{}
	if err := json.Unmarshal(body, info); err != nil {
		return nil, fail("%s%s is no ConfigMap: is it an API server?", server, infoPath)
	}
	return info, nil
}

// explain says what is behind a failed connection, and whether it can pass.
func explain(err error, server string) error {
	var stranger x509.UnknownAuthorityError
	var misnamed x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &stranger):
		return fail("the certificate of %s is not of the cluster that was to be joined: somebody may be in between. The token was not sent", server)
	case errors.As(err, &misnamed):
		return fail("the certificate of %s is not for that name: use an address that it is for, or start the server with --tls-san (%v)", server, misnamed)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return skewed(invalid.Cert)
	case strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return fail("%s does not speak TLS: is it the API server?", server)
	}
	return err
}

// skewed is about a certificate outside its time by this machine's clock.
func skewed(cert *x509.Certificate) error {
	return fail("the clock of this machine (%s) and the certificate of %s (valid from %s to %s) don't agree: set the clock right, or renew the certificate",
		time.Now().UTC().Format(time.RFC3339), cert.Subject.CommonName, cert.NotBefore.UTC().Format(time.RFC3339), cert.NotAfter.UTC().Format(time.RFC3339))
}

// refresh asks the cluster which CAs it has now, over a connection that is verified.
func refresh(ctx context.Context, config *rest.Config) ([]byte, error) {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(config.Host, "/")+infoPath, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return nil, explain(err, config.Host)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s%s: %s", config.Host, infoPath, response.Status)
	}
	info := &corev1.ConfigMap{}
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(info); err != nil {
		return nil, err
	}
	all, err := authorities(info, config.Host)
	return pki.EncodeCertificates(all...), err
}

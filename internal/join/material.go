package join

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"portal/internal/pki"
)

// The files in Options.Dir. Certificate and key are in one, so that a crash can't leave those of two renewals.
const (
	pairFile = "client.pem"
	// AuthorityFile has the CAs of the cluster, and follows renewals.
	AuthorityFile = "ca.crt"
	// KubeconfigFile names the others, for programs that read kubeconfigs. They follow renewals.
	KubeconfigFile = "kubeconfig"
	joinedFile     = "joined.json"
)

// Files are the names of all of them.
func Files() []string { return []string{pairFile, AuthorityFile, KubeconfigFile, joinedFile} }

// material is what proves a machine's identity, and by what it knows the server.
type material struct {
	pair   []byte // PEM
	cert   tls.Certificate
	leaf   *x509.Certificate
	ca     []byte // PEM
	server string
	// hashes are those that the CA was verified by when the machine joined. The CA may have been rotated since.
	hashes []string
}

// joined is what the file of this name holds.
type joined struct {
	Server   string   `json:"server"`
	CAHashes []string `json:"caHashes,omitempty"`
}

// newMaterial checks that a certificate is what was asked for, and valid by this machine's clock.
func newMaterial(chain []byte, key *ecdsa.PrivateKey, user string) (*material, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	m, err := parse(slices.Concat(chain, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})))
	if err != nil {
		return nil, fail("the server's certificate is not for the key that was made: %w", err)
	}
	if m.leaf.Subject.CommonName != user {
		return nil, fail("the server's certificate is for %s, not %s", m.leaf.Subject.CommonName, user)
	}
	if now := time.Now(); now.Before(m.leaf.NotBefore) || now.After(m.leaf.NotAfter) {
		return nil, skewed(m.leaf)
	}
	return m, nil
}

func parse(pair []byte) (*material, error) {
	cert, err := tls.X509KeyPair(pair, pair)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		return nil, err
	}
	cert.Leaf = leaf
	return &material{pair: pair, cert: cert, leaf: leaf}, nil
}

// load reads what an earlier run saved. The error is os.ErrNotExist if there is nothing.
func load(dir string) (*material, error) {
	pair, err := os.ReadFile(filepath.Join(dir, pairFile))
	if err != nil {
		return nil, err
	}
	m, err := parse(pair)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pairFile, err)
	}
	about, err := os.ReadFile(filepath.Join(dir, joinedFile))
	if err == nil {
		m.ca, err = os.ReadFile(filepath.Join(dir, AuthorityFile))
	}
	if err != nil {
		return nil, errors.New(err.Error()) // incomplete, which is not the same as absent
	}
	if _, err := pki.ParseCertificates(m.ca); err != nil {
		return nil, fmt.Errorf("%s: %w", AuthorityFile, err)
	}
	var j joined
	if err := json.Unmarshal(about, &j); err != nil {
		return nil, fmt.Errorf("%s: %w", joinedFile, err)
	}
	m.server, m.hashes = j.Server, j.CAHashes
	return m, nil
}

// save writes all files, the pair last: with it, what load needs is complete.
func (m *material) save(dir string) error {
	about, err := json.MarshalIndent(joined{m.server, m.hashes}, "", "  ")
	if err != nil {
		return err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["portal"] = &clientcmdapi.Cluster{Server: m.server, CertificateAuthority: AuthorityFile}
	config.AuthInfos["this-machine"] = &clientcmdapi.AuthInfo{ClientCertificate: pairFile, ClientKey: pairFile}
	config.Contexts["portal"] = &clientcmdapi.Context{Cluster: "portal", AuthInfo: "this-machine"}
	config.CurrentContext = "portal"
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		data []byte
		mode os.FileMode
	}{{AuthorityFile, m.ca, 0o644}, {joinedFile, about, 0o600}, {KubeconfigFile, kubeconfig, 0o600}, {pairFile, m.pair, 0o600}} {
		path := filepath.Join(dir, f.name)
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, f.data) {
			continue
		}
		if err := pki.WriteFile(path, f.data, f.mode); err != nil {
			return err
		}
	}
	return nil
}

// sameCluster says whether the machine joined with one of the hashes. None given is no question.
func (m *material) sameCluster(hashes []string) bool {
	return len(hashes) == 0 || len(m.hashes) == 0 || slices.ContainsFunc(hashes, func(h string) bool { return slices.Contains(m.hashes, h) })
}

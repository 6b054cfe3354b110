package apiserver

import (
	"net"
	"path/filepath"
	"strconv"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"portal/internal/pki"
)

// Kubeconfig is the path of the administrator's kubeconfig.
func (s *Server) Kubeconfig() string { return filepath.Join(s.opts.DataDir, "admin.kubeconfig") }

// DataDir is where the server keeps its files.
func (s *Server) DataDir() string { return s.opts.DataDir }

// writeKubeconfig gives the administrator a certificate and all that kubectl needs, in a file that only they can read.
func (s *Server) writeKubeconfig(pair pki.Pair, bundle []byte) error {
	host := s.opts.host
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["portal"] = &clientcmdapi.Cluster{
		Server:                   "https://" + net.JoinHostPort(host, strconv.Itoa(int(s.opts.port))),
		CertificateAuthorityData: bundle,
	}
	config.AuthInfos["admin"] = &clientcmdapi.AuthInfo{ClientCertificateData: pair.Cert, ClientKeyData: pair.Key}
	config.Contexts["portal"] = &clientcmdapi.Context{Cluster: "portal", AuthInfo: "admin"}
	config.CurrentContext = "portal"
	data, err := clientcmd.Write(*config)
	if err != nil {
		return err
	}
	return pki.WriteFile(s.Kubeconfig(), data, 0o600)
}

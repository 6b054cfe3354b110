package apiserver

import (
	"context"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"portal/internal/bootstrap"
)

// ensureClusterInfo publishes where the API is and which CAs it has, for machines that join. Signatures are a controller's.
func (s *Server) ensureClusterInfo(ctx context.Context) error {
	client := s.client.CoreV1().ConfigMaps(metav1.NamespacePublic)
	current, err := client.Get(ctx, bootstrap.ClusterInfo, metav1.GetOptions{})
	missing := apierrors.IsNotFound(err)
	switch {
	case missing:
		current = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: bootstrap.ClusterInfo, Namespace: metav1.NamespacePublic}}
	case err != nil:
		return err
	case current.DeletionTimestamp != nil:
		current.Finalizers = nil
		_, err = client.Update(ctx, current, metav1.UpdateOptions{})
		return ignoreRace(err)
	}
	have := clusterInfoServer(current.Data[bootstrap.KubeconfigKey])
	server, err := s.announced(ctx, have)
	if err != nil {
		return err
	}
	want, err := clusterInfo(server, s.certs.agreed())
	if err != nil {
		return err
	}
	// Nobody could sign one that is immutable for tokens to come.
	immutable := current.Immutable != nil && *current.Immutable
	if current.Data[bootstrap.KubeconfigKey] == want && !immutable {
		s.hasAnnounced.Store(true)
		return nil
	}
	if current.Data == nil {
		current.Data = map[string]string{}
	}
	current.Data[bootstrap.KubeconfigKey] = want
	switch {
	case missing:
		_, err = client.Create(ctx, current, metav1.CreateOptions{})
	case immutable:
		err = replaceImmutable(current.UID, func(opts metav1.DeleteOptions) error {
			return client.Delete(ctx, current.Name, opts)
		}, func() error {
			_, err := client.Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: current.Name, Namespace: current.Namespace}, Data: current.Data,
			}, metav1.CreateOptions{})
			return err
		})
	default:
		_, err = client.Update(ctx, current, metav1.UpdateOptions{})
	}
	if err == nil {
		s.hasAnnounced.Store(true)
	}
	return ignoreRace(err)
}

// announced is the server that cluster-info should name. Several servers must agree on it: each says where it is once, when it
// starts, and only if what is there is no server that is alive.
func (s *Server) announced(ctx context.Context, have string) (string, error) {
	if have != "" && s.hasAnnounced.Load() {
		return have, nil
	}
	own := s.url()
	if have == "" || have == own {
		return own, nil
	}
	endpoints, err := s.client.CoreV1().Endpoints(metav1.NamespaceDefault).Get(ctx, defaultName, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return "", err
	}
	if err == nil && slices.ContainsFunc(endpointURLs(endpoints), func(u string) bool { return u == have }) {
		return have, nil
	}
	return own, nil
}

func endpointURLs(endpoints *corev1.Endpoints) (out []string) {
	for _, subset := range endpoints.Subsets {
		for _, address := range subset.Addresses {
			for _, port := range subset.Ports {
				out = append(out, "https://"+net.JoinHostPort(address.IP, strconv.Itoa(int(port.Port))))
			}
		}
	}
	return out
}

// url is where others reach this server, or on loopback if they can't.
func (s *Server) url() string {
	host := s.opts.host
	if s.opts.advertise.IsValid() {
		host = s.opts.advertise.String()
	} else if a, err := netip.ParseAddr(host); host == "" || err == nil && a.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "https://" + net.JoinHostPort(host, strconv.Itoa(int(s.opts.port)))
}

// clusterInfo is a kubeconfig without credentials.
func clusterInfo(server string, bundle []byte) (string, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters[""] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: bundle}
	data, err := clientcmd.Write(*config)
	return string(data), err
}

// clusterInfoServer is the URL in a kubeconfig, or "" if it has none that is one.
func clusterInfoServer(kubeconfig string) string {
	config, err := clientcmd.Load([]byte(kubeconfig))
	if err != nil || config.Clusters[""] == nil {
		return ""
	}
	if u, err := url.Parse(config.Clusters[""].Server); err != nil || u.Scheme != "https" || u.Host == "" {
		return ""
	}
	return config.Clusters[""].Server
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/apiserver"
)

// kubeconfigHelp describes the default of --kubeconfig, which is the same for all commands.
const kubeconfigHelp = "kubeconfig of the API server (default: $KUBECONFIG, this machine's Portal server, ~/.kube/config, or the Pod's own service account)"

// adminKubeconfig is the file in a server's data directory.
const adminKubeconfig = "admin.kubeconfig"

// dataDirVariable names the data directory of this machine's server, to it and to the commands that look for it.
const dataDirVariable = "PORTAL_DATA_DIR"

var errNoServer = errors.New("no API server known: give --kubeconfig, or set KUBECONFIG")

// orJoin adds to errNoServer what else commands can do that join a server.
func orJoin(err error) error {
	if errors.Is(err, errNoServer) {
		return fmt.Errorf("%w, or join a Portal server with --server, --token and --ca-hash: portal token create --role …, typed there, prints the command", err)
	}
	return err
}

// apiConfig finds the API server. Without a file it looks where all commands look: see findKubeconfig.
func apiConfig(kubeconfig string) (*rest.Config, error) { return apiConfigFor(kubeconfig, "") }

// apiClient is a client of the API that a kubeconfig leads to, with its configuration.
func apiClient(kubeconfig string) (kubernetes.Interface, *rest.Config, error) {
	config, err := apiConfig(kubeconfig)
	if err != nil {
		return nil, nil, usageError{err}
	}
	client, err := kubernetes.NewForConfig(config)
	return client, config, err
}

// apiConfigFor is apiConfig with a context of the kubeconfig.
func apiConfigFor(kubeconfig, context string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	if kubeconfig != "" {
		if _, err := os.Stat(kubeconfig); err != nil {
			return nil, fmt.Errorf("--kubeconfig: %w", err)
		}
		rules.ExplicitPath = kubeconfig
	} else {
		rules.ExplicitPath = findKubeconfig()
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context}).ClientConfig()
	if err != nil {
		if rules.ExplicitPath == "" {
			if err := missing(os.Getenv("KUBECONFIG")); err != nil {
				return nil, err
			}
			return nil, errNoServer
		}
		if clientcmd.IsEmptyConfig(err) {
			err = errors.New("it names no API server: give one's kubeconfig, such as DATA-DIR/admin.kubeconfig of a portal server")
		}
		if strings.Contains(err.Error(), "cannot unmarshal") { // what follows are Go's types
			err = errors.New("it is not a kubeconfig")
		}
		return nil, fmt.Errorf("--kubeconfig %s: %w", rules.ExplicitPath, err)
	}
	if err := usable(config); err != nil {
		return nil, fmt.Errorf("--kubeconfig %s: %w", cmp.Or(rules.ExplicitPath, "(default)"), err)
	}
	return config, nil
}

// compressUnlessHere asks a server of this machine for answers as they are: to compress and expand a long list takes longer than all else, and there is
// no network that it would relieve.
func compressUnlessHere(config *rest.Config) {
	if base, _, err := rest.DefaultServerUrlFor(config); err == nil && here(base.Hostname()) {
		config.DisableCompression = true
	}
}

// here says whether a host is this machine, as far as that is known without asking anybody.
func here(host string) bool {
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return host == "localhost"
	}
	if addr = addr.Unmap(); addr.IsLoopback() {
		return true
	}
	own, _ := net.InterfaceAddrs() // without them it is another machine
	return slices.ContainsFunc(own, func(a net.Addr) bool {
		prefix, err := netip.ParsePrefix(a.String())
		return err == nil && prefix.Addr().Unmap() == addr
	})
}

// missing says that none of the files of $KUBECONFIG is there.
func missing(list string) (err error) {
	for _, path := range filepath.SplitList(list) {
		if path == "" {
			continue
		}
		if _, err = os.Stat(path); err == nil {
			return nil
		}
	}
	if err != nil {
		err = fmt.Errorf("KUBECONFIG: %w", err)
	}
	return err
}

// serverClient is a client of a Portal server's own paths, beside the Kubernetes API.
func serverClient(config *rest.Config) (*rest.RESTClient, error) {
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	return rest.UnversionedRESTClientFor(config)
}

// apiConfigAt is apiConfig with another URL of the server, if one is given (--master). Without a file it then has no
// credentials.
func apiConfigAt(master, kubeconfig string) (*rest.Config, error) {
	if master == "" {
		return apiConfig(kubeconfig)
	}
	config := &rest.Config{}
	if kubeconfig != "" {
		var err error
		if config, err = apiConfig(kubeconfig); err != nil {
			return nil, err
		}
	}
	config.Host = master
	if err := usable(config); err != nil {
		return nil, fmt.Errorf("--master: %w", err)
	}
	return config, nil
}

// usable reports what is wrong with an API server's address or certificates before the first request is made.
func usable(config *rest.Config) error {
	if _, _, err := rest.DefaultServerUrlFor(config); err != nil {
		return err
	}
	_, err := rest.TransportFor(config)
	return err
}

// connectTimeout is how long an API server may take to accept a connection.
const connectTimeout = 3 * time.Second

// reachable asks the API server something small, and says in one line why it can't be asked.
func reachable(ctx context.Context, config *rest.Config, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	config = rest.CopyConfig(config)
	if config.Dial == nil {
		config.Dial = (&net.Dialer{Timeout: connectTimeout}).DialContext
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Services(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{Limit: 1})
	if err == nil || apierrors.IsForbidden(err) {
		return nil
	}
	why, hint := apiTrouble(err, config.Host)
	return fmt.Errorf("the API server at %s does not answer: %s: %s", config.Host, why, hint)
}

// findKubeconfig returns the kubeconfig of the Portal server of this machine, or "" if $KUBECONFIG is set or there is none
// that this user may read. In that case client-go's own defaults apply.
func findKubeconfig() string {
	if os.Getenv("KUBECONFIG") != "" {
		return ""
	}
	for _, dir := range []string{os.Getenv(dataDirVariable), userDataDir(), apiserver.DefaultOptions().DataDir} {
		if dir == "" {
			continue
		}
		if path := filepath.Join(dir, adminKubeconfig); readable(path) {
			return path
		}
	}
	return ""
}

func readable(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	return f.Close() == nil
}

// usualDataDir is the data directory of a server on this machine whose flags name none.
func usualDataDir() string {
	return cmp.Or(os.Getenv(dataDirVariable), userDataDir(), apiserver.DefaultOptions().DataDir)
}

// userDataDir is the data directory of `portal up` without root; "" as root.
func userDataDir() string {
	if os.Geteuid() == 0 {
		return ""
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "share", "portal")
}

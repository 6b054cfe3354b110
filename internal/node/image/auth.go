package image

import (
	"encoding/json"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
)

// Credentials are for registries: what docker's configuration files have.
type Credentials struct{ list []credential }

type credential struct {
	host, path string // of the registry: the host may have wildcards
	auth       authn.AuthConfig
}

// ParseCredentials reads a configuration with "auths" in it, or (old) the content of that alone.
func ParseCredentials(data []byte, old bool) (Credentials, error) {
	var file struct {
		Auths map[string]json.RawMessage `json:"auths"`
	}
	var err error
	if old {
		err = json.Unmarshal(data, &file.Auths)
	} else {
		err = json.Unmarshal(data, &file)
	}
	if err != nil {
		// The text is secret: an error must not show it.
		return Credentials{}, fmt.Errorf("it is not JSON with credentials for registries, as docker login writes it")
	}
	var out Credentials
	for key, raw := range file.Auths {
		c := credential{}
		if err := json.Unmarshal(raw, &c.auth); err != nil {
			return Credentials{}, fmt.Errorf("its credentials for %q can't be read", key)
		}
		c.host, c.path = registryKey(key)
		out.list = append(out.list, c)
	}
	return out, nil
}

// registryKey reads what credentials are for: a host, perhaps with a path, perhaps written as a URL.
func registryKey(key string) (host, prefix string) {
	if strings.Contains(key, "://") {
		if u, err := url.Parse(key); err == nil {
			key = u.Host + u.Path
		}
	}
	host, prefix, _ = strings.Cut(key, "/")
	prefix = strings.Trim(prefix, "/")
	// What docker login calls its own registry.
	if host == "docker.io" || host == "registry-1.docker.io" {
		host = "index.docker.io"
	}
	if prefix == "v1" || prefix == "v2" {
		prefix = ""
	}
	return host, prefix
}

// Add adds others.
func (c *Credentials) Add(other Credentials) { c.list = append(c.list, other.list...) }

// forRepository are the credentials for a repository, those that say most about it first, and none last.
func (c Credentials) forRepository(registry, repo string) []authn.AuthConfig {
	var fit []credential
	for _, have := range c.list {
		if matchHost(have.host, registry) && (have.path == "" || repo == have.path || strings.HasPrefix(repo, have.path+"/")) {
			fit = append(fit, have)
		}
	}
	slices.SortStableFunc(fit, func(a, b credential) int { return len(b.path) - len(a.path) })
	var out []authn.AuthConfig
	for _, f := range fit {
		if !slices.Contains(out, f.auth) {
			out = append(out, f.auth)
		}
	}
	return append(out, authn.AuthConfig{})
}

// matchHost compares names part by part: a wildcard stands for one part. A port must be the same.
func matchHost(pattern, host string) bool {
	patternName, patternPort, _ := strings.Cut(pattern, ":")
	hostName, hostPort, _ := strings.Cut(host, ":")
	if patternPort != hostPort {
		return false
	}
	a, b := strings.Split(patternName, "."), strings.Split(hostName, ".")
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if ok, err := path.Match(a[i], b[i]); err != nil || !ok {
			return false
		}
	}
	return true
}

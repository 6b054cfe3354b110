// Package image finds the file system that a container's image stands for: the node's own root, a folder that an image is mapped to, or
// the layers of an OCI image, which it pulls from registries and reads from archives. How they are mounted, and what runs in them, it
// does not know.
package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// Host is the image that is the node's own root.
const Host = "host"

// Image is a file system, and how it is run.
type Image struct {
	// ID is what the API shows: host, a folder, or the digest in a registry.
	ID    string
	Lower []string // folders, the uppermost first
	// Hide are paths that belong to the node alone.
	Hide []string
	// Scratch are folders that each container gets empty, and can write to.
	Scratch []string
	Config  Config
	// OCI says that it is one with layers: its users are in its own /etc/passwd.
	OCI bool
}

// Config is what an image says about how it is run.
type Config struct {
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Env        []string `json:"env,omitempty"`
	WorkingDir string   `json:"workingDir,omitempty"`
	// User and Group are numbers.
	User  *int64 `json:"user,omitempty"`
	Group *int64 `json:"group,omitempty"`
	// Account is the user that an OCI image says: a name or a number, and perhaps a group. Lookup finds its numbers.
	Account string `json:"-"`
	// StopSignal ends the first process, such as SIGQUIT; empty: SIGTERM.
	StopSignal string `json:"stopSignal,omitempty"`
}

// Mapping is an image that stands for a folder.
type Mapping struct {
	Name   string `json:"name"`
	Dir    string `json:"dir"`
	Config `json:",inline"`
}

// Map is what --image-map has.
type Map struct {
	Images []Mapping `json:"images"`
}

// ReadMap reads a file of mappings.
func ReadMap(path string) ([]Mapping, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var m Map
	if err := yaml.UnmarshalStrict(data, &m); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	seen := map[string]bool{}
	for i, e := range m.Images {
		at := fmt.Sprintf("%s: images[%d]", path, i)
		switch {
		case e.Name == "":
			return nil, errors.New(at + ".name: is required")
		case e.Name == Host:
			return nil, errors.New(at + ".name: host is the node's own root, and can't be mapped")
		case seen[Normalize(e.Name)]:
			return nil, fmt.Errorf("%s.name: %s is there twice", at, e.Name)
		case !filepath.IsAbs(e.Dir):
			return nil, fmt.Errorf("%s.dir: %q must be an absolute path", at, e.Dir)
		}
		if st, err := os.Stat(e.Dir); err != nil || !st.IsDir() {
			return nil, fmt.Errorf("%s.dir: %s is not a folder", at, e.Dir)
		}
		seen[Normalize(e.Name)] = true
	}
	return m.Images, nil
}

// Normalize completes a reference as clients do: the registry, the library, the tag.
func Normalize(ref string) string {
	first, _, found := strings.Cut(ref, "/")
	if !found || !strings.ContainsAny(first, ".:") && first != "localhost" {
		if !found {
			ref = "library/" + ref
		}
		ref = "docker.io/" + ref
	}
	if name := ref[strings.LastIndexByte(ref, '/')+1:]; !strings.ContainsAny(name, ":@") {
		ref += ":latest"
	}
	return ref
}

// secrets are paths of a machine that no container should read, even if it sees the machine's root: keys, passwords, people's files.
var secrets = []string{
	"/home", "/var/lib/portal", "/var/spool", "/boot", "/srv", "/mnt", "/media", "/lost+found", "/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-",
	"/etc/ssh", "/etc/ssl/private", "/etc/kubernetes", "/etc/portal", "/etc/sudoers", "/etc/sudoers.d",
}

// scratch are folders of a machine that are nobody else's business either, and that programs write to.
var scratch = []string{"/run", "/tmp", "/var/tmp", "/var/log", "/root"}

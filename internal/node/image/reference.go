package image

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/distribution/reference"
	"github.com/google/go-containerregistry/pkg/name"
)

// InvalidNameError says that a reference can't be that of an image.
type InvalidNameError struct {
	Image string
	Err   error
}

func (e *InvalidNameError) Error() string {
	return fmt.Sprintf("image %q: is no reference to an image, such as registry.example/team/web:1.2: %v", e.Image, e.Err)
}

func (e *InvalidNameError) Unwrap() error { return e.Err }

// parse reads a reference as clients of registries do. Registries that may be spoken to without encryption are those of this machine,
// and those in insecure.
func parse(ref string, insecure []string) (name.Reference, error) {
	if _, err := reference.ParseNormalizedNamed(ref); err != nil {
		return nil, &InvalidNameError{ref, err}
	}
	out, err := name.ParseReference(Normalize(ref))
	if err == nil && mayBePlain(out.Context().RegistryStr(), insecure) {
		out, err = name.ParseReference(Normalize(ref), name.Insecure)
	}
	if err != nil {
		return nil, &InvalidNameError{ref, err}
	}
	return out, nil
}

// mayBePlain says whether a registry may be spoken to without encryption.
func mayBePlain(registry string, insecure []string) bool {
	if slices.Contains(insecure, registry) {
		return true
	}
	host := registry
	if h, _, err := net.SplitHostPort(registry); err == nil {
		host = h
	}
	if host == "localhost" || slices.Contains(insecure, host) {
		return true
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && a.IsLoopback()
}

// repository is a reference without its tag and digest.
func repository(ref string) string {
	ref = Normalize(ref)
	ref, _, _ = strings.Cut(ref, "@")
	if i := strings.LastIndexByte(ref, ':'); i > strings.LastIndexByte(ref, '/') {
		ref = ref[:i]
	}
	return ref
}

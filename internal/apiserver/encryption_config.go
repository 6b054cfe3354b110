package apiserver

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	apiserverapi "k8s.io/apiserver/pkg/apis/apiserver"
	apiserverv1 "k8s.io/apiserver/pkg/apis/apiserver/v1"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"

	"portal/internal/configfile"
	"portal/internal/store"
)

// encryptionFlag names the file in errors.
const encryptionFlag = "--encryption-provider-config"

// EncryptionOptions say how objects are encrypted in etcd.
type EncryptionOptions struct {
	// ConfigFile is an EncryptionConfiguration of apiserver.config.k8s.io/v1; none encrypts nothing.
	ConfigFile string
	// Reload takes changes of the file while the server runs.
	Reload bool
}

func (o EncryptionOptions) validate() error {
	if o.ConfigFile == "" {
		if o.Reload {
			return fmt.Errorf("%s-automatic-reload: needs %s", encryptionFlag, encryptionFlag)
		}
		return nil
	}
	_, err := readEncryptionConfig(o)
	return err
}

// encryptionConfig is what a configuration file says, without its keys.
type encryptionConfig struct {
	// entries are the resources as the file names them, wildcards included.
	entries []schema.GroupResource
	// keys are what values of an entry can be encrypted with.
	keys map[schema.GroupResource][]store.Header
	// services are the names of key management services.
	services map[string]bool
}

// readEncryptionConfig reads a file and names the field and line of each mistake. It connects to nothing.
func readEncryptionConfig(o EncryptionOptions) (*encryptionConfig, error) {
	data, err := os.ReadFile(o.ConfigFile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", encryptionFlag, err)
	}
	wrong := func(err error) error { return configfile.Mistakes(encryptionFlag+" "+o.ConfigFile, data, err) }
	scheme := runtime.NewScheme()
	utilruntime.Must(apiserverapi.AddToScheme(scheme))
	utilruntime.Must(apiserverv1.AddToScheme(scheme))
	object, kind, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder().Decode(data, nil, nil)
	if err != nil {
		return nil, wrong(err)
	}
	config, ok := object.(*apiserverapi.EncryptionConfiguration)
	if !ok {
		return nil, wrong(fmt.Errorf("it is a %s, and must be an EncryptionConfiguration of %s", kind.Kind, apiserverv1.SchemeGroupVersion))
	}
	errs := validation.ValidateEncryptionConfiguration(config, o.Reload)
	for i := range config.Resources {
		for j, provider := range config.Resources[i].Providers {
			if provider.KMS != nil && provider.KMS.APIVersion != "v2" {
				path := field.NewPath("resources").Index(i).Child("providers").Index(j).Child("kms", "apiVersion")
				errs = append(errs, field.Invalid(path, "", "must be v2"))
			}
		}
	}
	if len(errs) > 0 {
		return nil, wrong(errs.ToAggregate())
	}
	return summarize(config), nil
}

func summarize(config *apiserverapi.EncryptionConfiguration) *encryptionConfig {
	out := &encryptionConfig{keys: map[schema.GroupResource][]store.Header{}, services: map[string]bool{}}
	for _, part := range config.Resources {
		var keys []store.Header
		for _, provider := range part.Providers {
			keys = append(keys, keysOf(provider)...)
			if provider.KMS != nil {
				out.services[provider.KMS.Name] = true
			}
		}
		for _, name := range part.Resources {
			entry := schema.ParseGroupResource(name)
			if !slices.Contains(out.entries, entry) {
				out.entries = append(out.entries, entry)
			}
			out.keys[entry] = append(out.keys[entry], keys...)
		}
	}
	return out
}

func keysOf(provider apiserverapi.ProviderConfiguration) []store.Header {
	named := func(name string, keys []apiserverapi.Key) []store.Header {
		var out []store.Header
		for _, key := range keys {
			out = append(out, store.Header{Provider: name, Key: key.Name})
		}
		return out
	}
	switch {
	case provider.Secretbox != nil:
		return named("secretbox", provider.Secretbox.Keys)
	case provider.AESGCM != nil:
		return named("aesgcm", provider.AESGCM.Keys)
	case provider.AESCBC != nil:
		return named("aescbc", provider.AESCBC.Keys)
	case provider.KMS != nil:
		return []store.Header{{Provider: store.ProviderKMS, Key: provider.KMS.Name}}
	}
	return []store.Header{{Provider: store.ProviderIdentity}}
}

// has says that the file gives a resource the key of a header, right or wrong. The entry that counts is the resource's own,
// else its group's, else that of everything.
func (c *encryptionConfig) has(resource schema.GroupResource, header store.Header) bool {
	header.KeyID = ""
	for _, entry := range []schema.GroupResource{resource, {Group: resource.Group, Resource: "*"}, {Group: "*", Resource: "*"}} {
		if keys, ok := c.keys[entry]; ok {
			return slices.Contains(keys, header)
		}
	}
	return header.Provider == store.ProviderIdentity
}

// lostBy are values that can't be decrypted for one reason.
type lostBy struct {
	header    store.Header
	has       bool
	resources []string
	example   string
}

// explainLost says in one error which values can't be decrypted with the configuration, why, and what would be right.
// config is nil if there is none.
func explainLost(o EncryptionOptions, config *encryptionConfig, lost []store.Usage) error {
	var groups []*lostBy
	for _, u := range lost {
		has := config != nil && config.has(schema.ParseGroupResource(u.Resource), u.Header)
		i := slices.IndexFunc(groups, func(g *lostBy) bool { return g.header == u.Header && g.has == has })
		if i < 0 {
			i, groups = len(groups), append(groups, &lostBy{header: u.Header, has: has, example: u.Example})
		}
		what := fmt.Sprintf("%d of %s", u.Count, u.Resource)
		if u.Claims > 0 {
			what += fmt.Sprintf(" (%d of them claims on ports)", u.Claims)
		}
		groups[i].resources = append(groups[i].resources, what)
	}
	var errs []error
	for _, g := range groups {
		errs = append(errs, g.explain(o, config != nil))
	}
	return errors.Join(errs...)
}

// mostNamed bounds how many resources an error names.
const mostNamed = 3

func (g *lostBy) explain(o EncryptionOptions, configured bool) error {
	what := strings.Join(g.resources[:min(len(g.resources), mostNamed)], ", ")
	if more := len(g.resources) - mostNamed; more > 0 {
		what += fmt.Sprintf(" and values of %d more resources", more)
	}
	switch {
	case !configured:
		return fmt.Errorf("%s: %s are encrypted with %s, e.g. %s: give the configuration file that has this key",
			encryptionFlag, what, g.header, g.example)
	case g.header.Provider == store.ProviderIdentity:
		return fmt.Errorf("%s %s: %s are not encrypted, e.g. %s, and the file gives them no identity provider: add `identity: {}` as the last one, until `portal storage reencrypt` has encrypted them",
			encryptionFlag, o.ConfigFile, what, g.example)
	case g.has:
		return fmt.Errorf("%s %s: %s are encrypted with %s, e.g. %s, and the one of that name in the file does not decrypt them: give the key that they were encrypted with",
			encryptionFlag, o.ConfigFile, what, g.header, g.example)
	}
	return fmt.Errorf("%s %s: %s are encrypted with %s, e.g. %s, which the file does not give them: add it, not as the first, until `portal storage reencrypt` has rewritten them",
		encryptionFlag, o.ConfigFile, what, g.header, g.example)
}

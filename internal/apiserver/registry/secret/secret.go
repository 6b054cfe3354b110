// Package secret describes Secrets: data that few may read. It checks that a Secret of a known type has what its
// readers expect; what the data says it never repeats in an error.
package secret

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

var doc = corev1.Secret{}.SwaggerDoc()

// New describes core/v1 Secrets.
func New() registry.Resource {
	return &registry.Kind[corev1.Secret, *corev1.Secret]{
		Served:           corev1.SchemeGroupVersion,
		Plural:           "secrets",
		Singular:         "secret",
		KindName:         "Secret",
		NewList:          func() runtime.Object { return &corev1.SecretList{} },
		Default:          setDefaults,
		Validate:         validate,
		Warnings:         warnings,
		Fields:           func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} },
		SelectableFields: []string{"type"},
		Columns: []registry.Column[corev1.Secret]{
			{Name: "Type", Description: doc["type"], Cell: func(s *corev1.Secret) any { return string(s.Type) }},
			{Name: "Data", Description: doc["data"], Cell: func(s *corev1.Secret) any { return int64(len(s.Data)) }},
			registry.Age[corev1.Secret](),
		},
		ValidateUpdate: validateUpdate,
	}
}

// setDefaults also moves stringData, which exists for people to write, to data, where readers look. It is never
// stored nor shown.
func setDefaults(s *corev1.Secret) {
	if s.Type == "" {
		s.Type = corev1.SecretTypeOpaque
	}
	if len(s.StringData) > 0 && s.Data == nil {
		s.Data = map[string][]byte{}
	}
	for key, value := range s.StringData {
		s.Data[key] = []byte(value)
	}
	s.StringData = nil
}

func validate(_ context.Context, s *corev1.Secret) field.ErrorList {
	errs := rules.Finalizers(s)
	path := field.NewPath("data")
	errs = append(errs, registry.CountKeys(path, s.Data)...)
	size := 0
	for key, value := range s.Data {
		errs = append(errs, rules.Each(path.Key(key), key, utilvalidation.IsConfigMapKey(key))...)
		size += len(value)
	}
	if size > corev1.MaxSecretSize {
		errs = append(errs, field.TooLong(path, "", corev1.MaxSecretSize))
	}
	if check, known := types[s.Type]; known {
		errs = append(errs, check(s)...)
	}
	return errs
}

// types are the types whose data is known; everything else is its users' own business.
var types = map[corev1.SecretType]func(*corev1.Secret) field.ErrorList{
	corev1.SecretTypeServiceAccountToken: namesServiceAccount,
	corev1.SecretTypeDockercfg:           holdsJSON(corev1.DockerConfigKey),
	corev1.SecretTypeDockerConfigJson:    holdsJSON(corev1.DockerConfigJsonKey),
	corev1.SecretTypeBasicAuth:           hasUserOrPassword,
	corev1.SecretTypeSSHAuth:             hasPrivateKey,
	corev1.SecretTypeTLS:                 hasKeyPair,
}

// namesServiceAccount is all a token Secret needs: a controller may add the token later.
func namesServiceAccount(s *corev1.Secret) field.ErrorList {
	if s.Annotations[corev1.ServiceAccountNameKey] != "" {
		return nil
	}
	return field.ErrorList{field.Required(field.NewPath("metadata", "annotations").Key(corev1.ServiceAccountNameKey),
		"must name the ServiceAccount")}
}

func holdsJSON(key string) func(*corev1.Secret) field.ErrorList {
	return func(s *corev1.Secret) field.ErrorList {
		content, ok := s.Data[key]
		if !ok {
			return missing(s, key)
		}
		if err := json.Unmarshal(content, &map[string]any{}); err != nil {
			// The decoder's own words may quote what is secret.
			return field.ErrorList{field.Invalid(field.NewPath("data").Key(key), "(not shown)", "must be a JSON object")}
		}
		return nil
	}
}

// hasUserOrPassword takes either, even empty.
func hasUserOrPassword(s *corev1.Secret) field.ErrorList {
	_, user := s.Data[corev1.BasicAuthUsernameKey]
	_, password := s.Data[corev1.BasicAuthPasswordKey]
	if user || password {
		return nil
	}
	return missing(s, corev1.BasicAuthUsernameKey, corev1.BasicAuthPasswordKey)
}

func hasPrivateKey(s *corev1.Secret) field.ErrorList {
	if len(s.Data[corev1.SSHAuthPrivateKey]) > 0 {
		return nil
	}
	return missing(s, corev1.SSHAuthPrivateKey)
}

func hasKeyPair(s *corev1.Secret) field.ErrorList {
	var absent []string
	for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
		if _, ok := s.Data[key]; !ok {
			absent = append(absent, key)
		}
	}
	return missing(s, absent...)
}

func missing(s *corev1.Secret, keys ...string) field.ErrorList {
	var errs field.ErrorList
	for _, key := range keys {
		errs = append(errs, field.Required(field.NewPath("data").Key(key), fmt.Sprintf("a Secret of type %s has it", s.Type)))
	}
	return errs
}

func validateUpdate(ctx context.Context, s, old *corev1.Secret) field.ErrorList {
	errs := validate(ctx, s)
	errs = append(errs, validation.ValidateImmutableField(s.Type, old.Type, field.NewPath("type"))...)
	if old.Immutable == nil || !*old.Immutable {
		return errs
	}
	refuse := func(name string) {
		errs = append(errs, field.Forbidden(field.NewPath(name),
			fmt.Sprintf("Secret %q was made immutable; delete it and create it anew to change it", old.Name)))
	}
	if s.Immutable == nil || !*s.Immutable {
		refuse("immutable")
	}
	if !equality.Semantic.DeepEqual(s.Data, old.Data) {
		refuse("data")
	}
	return errs
}

// warnings tell of a TLS certificate and key that no server can use. They are taken all the same: a placeholder may
// be filled in later.
func warnings(_ context.Context, s, _ *corev1.Secret) []string {
	if s.Type != corev1.SecretTypeTLS {
		return nil
	}
	if _, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]); err != nil {
		return []string{fmt.Sprintf("data: %s and %s are not a certificate and its key: %v", corev1.TLSCertKey, corev1.TLSPrivateKeyKey, err)}
	}
	return nil
}

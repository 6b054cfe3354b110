package tokens

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
)

const (
	// ConfigurationPath and KeysPath are where OpenID Connect's discovery looks.
	ConfigurationPath = "/.well-known/openid-configuration"
	KeysPath          = "/openid/v1/jwks"
)

// discovery is the least that OpenID Connect Discovery 1.0 demands of an issuer whose tokens are verified and who logs
// nobody in.
type discovery struct {
	Issuer     string   `json:"issuer"`
	Keys       string   `json:"jwks_uri"`
	Responses  []string `json:"response_types_supported"`
	Subjects   []string `json:"subject_types_supported"`
	Algorithms []string `json:"id_token_signing_alg_values_supported"`
}

// CheckIssuer says what keeps others from verifying the tokens of an issuer by discovery.
func CheckIssuer(issuer string) error {
	u, err := url.Parse(issuer)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("%q is no https URL without query and fragment", issuer)
	}
	return nil
}

// Configuration answers what others need to verify tokens; keys is the URL of the keys.
func (i *Issuer) Configuration(keys string) http.Handler {
	return document("application/json", func() (any, error) {
		doc := discovery{
			Issuer: i.Issuers[0], Keys: keys, Responses: []string{"id_token"}, Subjects: []string{"public"},
		}
		for _, key := range i.Keys.Keys() {
			if !slices.Contains(doc.Algorithms, key.Algorithm()) {
				doc.Algorithms = append(doc.Algorithms, key.Algorithm())
			}
		}
		slices.Sort(doc.Algorithms)
		return doc, nil
	})
}

// KeySet answers the public keys.
func (i *Issuer) KeySet() http.Handler {
	return document("application/jwk-set+json", func() (any, error) {
		set := struct {
			Keys []jwk `json:"keys"`
		}{}
		for _, key := range i.Keys.Keys() {
			described, err := key.jwk()
			if err != nil {
				return nil, err
			}
			set.Keys = append(set.Keys, described)
		}
		return set, nil
	})
}

func document(kind string, write func() (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "it can only be read", http.StatusMethodNotAllowed)
			return
		}
		doc, err := write()
		if err != nil {
			http.Error(w, "the keys can't be written", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "public, max-age=3600")
		_ = json.NewEncoder(w).Encode(doc)
	})
}

package tokens

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/golang-jwt/jwt/v5"
	"k8s.io/client-go/util/keyutil"
)

// rsaBits is the size of keys made here, and the least that a given one may have.
const rsaBits = 2048

// Key verifies tokens. Its ID says which tokens it is for; it is a hash, from which the key cannot be known.
type Key struct {
	ID     string
	Public crypto.PublicKey
	method jwt.SigningMethod
}

// Signer is a Key that tokens are signed with.
type Signer struct {
	Key
	private crypto.Signer
}

// NewKey makes a Key of a public key. The algorithm follows from the key and from nothing that a token says.
func NewKey(public crypto.PublicKey) (Key, error) {
	key := Key{Public: public}
	switch p := public.(type) {
	case *rsa.PublicKey:
		if p.N.BitLen() < rsaBits {
			return Key{}, fmt.Errorf("an RSA key of %d bits is too short: it must have at least %d", p.N.BitLen(), rsaBits)
		}
		key.method = jwt.SigningMethodRS256
	case *ecdsa.PublicKey:
		switch p.Curve.Params().BitSize {
		case 256:
			key.method = jwt.SigningMethodES256
		case 384:
			key.method = jwt.SigningMethodES384
		case 521:
			key.method = jwt.SigningMethodES512
		default:
			return Key{}, fmt.Errorf("the curve %s is not supported: it must be P-256, P-384 or P-521", p.Curve.Params().Name)
		}
	default:
		return Key{}, fmt.Errorf("a key of type %T is not supported: it must be RSA or ECDSA", public)
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return Key{}, err
	}
	sum := sha256.Sum256(der)
	key.ID = base64.RawURLEncoding.EncodeToString(sum[:])
	return key, nil
}

// Algorithm is the one that the key's tokens are signed with: RS256, ES256, ES384 or ES512.
func (k Key) Algorithm() string { return k.method.Alg() }

// PEM is the public key as text.
func (k Key) PEM() ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(k.Public)
	return pem.EncodeToMemory(&pem.Block{Type: keyutil.PublicKeyBlockType, Bytes: der}), err
}

// ParseKeys reads PEM with public keys, certificates or private keys, whose public part is meant.
func ParseKeys(data []byte) ([]Key, error) {
	public, err := keyutil.ParsePublicKeysPEM(data)
	if err != nil {
		return nil, errors.New("must be PEM with RSA or ECDSA keys")
	}
	var out []Key
	for _, p := range public {
		key, err := NewKey(p)
		if err != nil {
			return nil, err
		}
		out = append(out, key)
	}
	return out, nil
}

// ParseSigner reads PEM with a private key.
func ParseSigner(data []byte) (*Signer, error) {
	parsed, err := keyutil.ParsePrivateKeyPEM(data)
	if err != nil {
		return nil, errors.New("must be PEM with an RSA or ECDSA private key") // parsers' own words may quote the file
	}
	private, ok := parsed.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a key of type %T is not supported: it must be RSA or ECDSA", parsed)
	}
	key, err := NewKey(private.Public())
	if err != nil {
		return nil, err
	}
	return &Signer{Key: key, private: private}, nil
}

// GenerateKey makes a private key as PEM. It is an RSA key, because RS256 is what everybody who verifies tokens knows.
func GenerateKey() ([]byte, error) {
	key, err := rsa.GenerateKey(rand.Reader, rsaBits)
	if err != nil {
		return nil, err
	}
	return keyutil.MarshalPrivateKeyToPEM(key)
}

// Ring holds the keys: the one that signs, and those whose tokens are accepted. It may be used by many at once.
type Ring struct {
	// Missing, if there, is called for a key ID that the ring does not have; it may Accept more keys.
	Missing func(ctx context.Context)

	mu       sync.RWMutex
	signer   *Signer
	fixed    []Key
	accepted []Key
}

// NewRing makes a ring with keys that are accepted as long as it exists.
func NewRing(signer *Signer, fixed ...Key) *Ring { return &Ring{signer: signer, fixed: fixed} }

// Sign makes the ring sign with another key.
func (r *Ring) Sign(signer *Signer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.signer = signer
}

// Accept replaces the keys that are accepted beside the one that signs and the fixed ones.
func (r *Ring) Accept(keys []Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepted = keys
}

// Signer is the key that signs.
func (r *Ring) Signer() *Signer {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.signer
}

// Keys are all keys whose tokens are accepted, the one that signs first.
func (r *Ring) Keys() []Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := []Key{r.signer.Key}
	for _, key := range slices.Concat(r.fixed, r.accepted) {
		if !slices.ContainsFunc(out, func(k Key) bool { return k.ID == key.ID }) {
			out = append(out, key)
		}
	}
	return out
}

// find gives the keys that may have signed a token: that of its key ID, or all if it has none.
func (r *Ring) find(ctx context.Context, id string) []Key {
	keys := r.Keys()
	if id == "" {
		return keys
	}
	for again := range 2 {
		for _, key := range keys {
			if key.ID == id {
				return []Key{key}
			}
		}
		if again == 0 && r.Missing != nil {
			r.Missing(ctx)
			keys = r.Keys()
		}
	}
	return nil
}

// jwk is a public key as RFC 7517 writes it.
type jwk struct {
	Use       string `json:"use"`
	Type      string `json:"kty"`
	ID        string `json:"kid"`
	Curve     string `json:"crv,omitempty"`
	Algorithm string `json:"alg"`
	N         string `json:"n,omitempty"`
	E         string `json:"e,omitempty"`
	X         string `json:"x,omitempty"`
	Y         string `json:"y,omitempty"`
}

func (k Key) jwk() (jwk, error) {
	out := jwk{Use: "sig", ID: k.ID, Algorithm: k.Algorithm()}
	text := base64.RawURLEncoding.EncodeToString
	switch p := k.Public.(type) {
	case *rsa.PublicKey:
		exponent := []byte{byte(p.E >> 24), byte(p.E >> 16), byte(p.E >> 8), byte(p.E)}
		out.Type, out.N, out.E = "RSA", text(p.N.Bytes()), text(bytes.TrimLeft(exponent, "\x00"))
	case *ecdsa.PublicKey:
		point, err := p.Bytes() // 4, then both coordinates at full length
		if err != nil {
			return jwk{}, err
		}
		half := (len(point) - 1) / 2
		out.Type, out.Curve = "EC", p.Curve.Params().Name
		out.X, out.Y = text(point[1:1+half]), text(point[1+half:])
	}
	return out, nil
}

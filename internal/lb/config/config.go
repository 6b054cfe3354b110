// Package config is what a balancer process carries out: plain data, compiled from Services, Ingresses, endpoints and Secrets, and
// handed to the process as a whole. It says what to do and never why: nothing in it is a Kubernetes object or an annotation.
package config

import (
	"crypto/sha256"
	"encoding/json"
	"net/netip"
	"time"
)

// Protocol is what one side of a connection speaks.
type Protocol string

// The protocols. TCP and SSL are passed on as bytes; HTTP and HTTPS are read. H2C is HTTP/2 without TLS and H2 with it, for endpoints
// only: clients of HTTP and HTTPS listeners choose HTTP/2 themselves.
const (
	TCP   Protocol = "tcp"
	SSL   Protocol = "ssl"
	HTTP  Protocol = "http"
	HTTPS Protocol = "https"
	H2C   Protocol = "h2c"
	H2    Protocol = "h2"
)

// Encrypted says whether the protocol is spoken over TLS.
func (p Protocol) Encrypted() bool { return p == SSL || p == HTTPS || p == H2 }

// Parsed says whether requests are read, rather than bytes passed on.
func (p Protocol) Parsed() bool { return p != TCP && p != SSL }

// Config is everything that one machine's balancer does.
type Config struct {
	Listeners []Listener `json:"listeners,omitempty"`
	// Pools and Certificates are by the names that listeners and routes use.
	Pools        map[string]*Pool        `json:"pools,omitempty"`
	Certificates map[string]*Certificate `json:"certificates,omitempty"`
	// Zone is this machine's.
	Zone string `json:"zone,omitempty"`
}

// Owner is the object that a listener or pool was made for: in metrics, access logs and error messages.
type Owner struct {
	Kind      string `json:"kind"` // Service, Ingress
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Listener accepts connections to one address and port.
type Listener struct {
	// Name is unique and stays the same as long as the listener is meant to be the same one.
	Name    string         `json:"name"`
	Owner   Owner          `json:"owner"`
	Address netip.AddrPort `json:"address"`
	// Protocol is what clients speak.
	Protocol Protocol `json:"protocol"`
	// TLS is set if the protocol is encrypted.
	TLS *TLS `json:"tls,omitempty"`
	// TrustedProxies may send a PROXY header, version 1 or 2, before anything else. A header from any other client is data like any other
	// byte. X-Forwarded fields are believed if the client is one of them: with a PROXY header, the client that it names.
	TrustedProxies []netip.Prefix `json:"trustedProxies,omitempty"`
	// Pool is where connections go if they are not parsed, and Routes where requests go if they are.
	Pool   string  `json:"pool,omitempty"`
	Routes []Route `json:"routes,omitempty"`
	// IdleTimeout ends connections over which nothing passes either way; 0: DefaultIdleTimeout.
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// Limits bound what one listener and one client can take.
	Limits    Limits     `json:"limits"`
	AccessLog *AccessLog `json:"accessLog,omitempty"`
	// Tags are labels that a person chose: in metrics and JSON access logs.
	Tags map[string]string `json:"tags,omitempty"`
}

// DefaultIdleTimeout is that of a classic balancer.
const DefaultIdleTimeout = 60 * time.Second

// TLS is how a listener ends TLS.
type TLS struct {
	// Certificates are by name; the first is for clients that ask for no name, or for one that none has.
	Certificates []string `json:"certificates"`
	// Names leads from server names, in lower case, to those of the certificates that are shown for them; *.NAME is for names with exactly one more label.
	// Without any, a certificate is shown for the names that are in it.
	Names map[string][]string `json:"names,omitempty"`
	// MinVersion, MaxVersion and CipherSuites are those of crypto/tls; 0 and empty: its defaults.
	MinVersion   uint16   `json:"minVersion,omitempty"`
	MaxVersion   uint16   `json:"maxVersion,omitempty"`
	CipherSuites []uint16 `json:"cipherSuites,omitempty"`
}

// Certificate is a chain and its key, both in PEM. It is never logged.
type Certificate struct {
	Chain []byte `json:"chain"`
	Key   []byte `json:"key"`
}

// String hides the key.
func (c *Certificate) String() string { return "certificate" }

// GoString hides the key.
func (c *Certificate) GoString() string { return "certificate" }

// Limits bound what clients can take. 0 is the default of each.
type Limits struct {
	// Connections are how many a listener has at a time, ClientConnections how many of these one client: an IPv4
	// address, or the network of 64 bits of an IPv6 address.
	Connections       int `json:"connections,omitempty"`
	ClientConnections int `json:"clientConnections,omitempty"`
	// HeaderBytes bounds a request's first line and header fields, BodyBytes its body (-1: no bound).
	HeaderBytes int   `json:"headerBytes,omitempty"`
	BodyBytes   int64 `json:"bodyBytes,omitempty"`
	// HeaderTimeout is how long a client may take for the header, RequestTimeout how long an endpoint may take for its first byte of an answer.
	HeaderTimeout  time.Duration `json:"headerTimeout,omitempty"`
	RequestTimeout time.Duration `json:"requestTimeout,omitempty"`
}

// The defaults of limits.
const (
	DefaultConnections       = 20_000
	DefaultClientConnections = 4_000
	DefaultHeaderBytes       = 64 << 10
	DefaultBodyBytes         = -1
	DefaultHeaderTimeout     = 10 * time.Second
	DefaultRequestTimeout    = 60 * time.Second
)

// PathMatch is how a path is compared.
type PathMatch string

// The ways to compare paths: those of Ingress. Prefix compares elements between slashes.
const (
	Exact  PathMatch = "Exact"
	Prefix PathMatch = "Prefix"
)

// Route says where requests go. Of several that match, the one with the more specific host wins (an exact one, the longest wildcard,
// none), then the more specific path (Exact before Prefix, the longer), then the earlier.
type Route struct {
	// Host is a name, *.NAME for names with exactly one more label, or empty for every host.
	Host string `json:"host,omitempty"`
	// Path begins with a slash, or is empty for every path.
	Path  string    `json:"path,omitempty"`
	Match PathMatch `json:"match,omitempty"`
	// Exactly one of the following is set.
	Pool     string    `json:"pool,omitempty"`
	Redirect *Redirect `json:"redirect,omitempty"`
	// Status answers by itself, with Message: for a backend that can't be used.
	Status  int    `json:"status,omitempty"`
	Message string `json:"message,omitempty"`
	// Owner is the object that the route is from.
	Owner Owner `json:"owner"`
}

// Redirect sends clients elsewhere.
type Redirect struct {
	Scheme string `json:"scheme,omitempty"`
	Port   uint16 `json:"port,omitempty"`
	Status int    `json:"status"`
}

// Pool are endpoints that do the same, and how one is chosen.
type Pool struct {
	Owner     Owner      `json:"owner"`
	Port      string     `json:"port,omitempty"` // of the Service: in metrics
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Protocol is what endpoints speak.
	Protocol Protocol `json:"protocol"`
	// TLS is how endpoints are verified if the protocol is encrypted; nil: not at all.
	TLS *EndpointTLS `json:"tls,omitempty"`
	// ProxyProtocol is the version of the PROXY header that endpoints get at the begin of a connection; 0: none.
	ProxyProtocol int    `json:"proxyProtocol,omitempty"`
	Policy        Policy `json:"policy"`
	// Affinity keeps a client at its endpoint until this long after its last connection; 0: no affinity.
	Affinity time.Duration `json:"affinity,omitempty"`
	// PreferZone chooses endpoints of this machine's zone as long as one of them is usable.
	PreferZone  bool         `json:"preferZone,omitempty"`
	HealthCheck *HealthCheck `json:"healthCheck,omitempty"`
	// Draining is how long connections stay open after their endpoint has left the pool; 0: DefaultDraining, negative: not at all.
	Draining time.Duration `json:"draining,omitempty"`
	// ConnectTimeout is for one endpoint, Retries how many others are tried; 0: the defaults, negative Retries: none.
	ConnectTimeout time.Duration `json:"connectTimeout,omitempty"`
	Retries        int           `json:"retries,omitempty"`
	// Outlier takes endpoints out that fail in use; SlowStart is how long a new one takes to its whole share.
	Outlier   *Outlier      `json:"outlier,omitempty"`
	SlowStart time.Duration `json:"slowStart,omitempty"`
	// EndpointConnections and EndpointRequests are how many one endpoint has at a time; 0: no bound.
	EndpointConnections int `json:"endpointConnections,omitempty"`
	EndpointRequests    int `json:"endpointRequests,omitempty"`
}

// The defaults of pools.
const (
	DefaultDraining       = 300 * time.Second
	DefaultConnectTimeout = 3 * time.Second
	DefaultRetries        = 2
)

// Endpoint is one that the API has as usable: ready, or terminating while none is ready.
type Endpoint struct {
	Address netip.AddrPort `json:"address"`
	// Name is its Pod's or target's, if there is one.
	Name string `json:"name,omitempty"`
	Node string `json:"node,omitempty"`
	Zone string `json:"zone,omitempty"`
	// Weight is its share; 0 is 1, negative none.
	Weight int `json:"weight,omitempty"`
}

// EndpointTLS is how an endpoint's certificate is verified.
type EndpointTLS struct {
	// CA are certificates in PEM.
	CA []byte `json:"ca,omitempty"`
	// ServerName is asked for and verified.
	ServerName string `json:"serverName,omitempty"`
}

// Policy is how an endpoint is chosen.
type Policy struct {
	Kind PolicyKind `json:"kind,omitempty"`
	// Hash is what ConsistentHash and Shard hash.
	Hash HashOf `json:"hash,omitempty"`
	// Name is that of the header or cookie.
	Name string `json:"name,omitempty"`
}

// PolicyKind names a policy.
type PolicyKind string

// The policies; empty is RoundRobin. Weights count in all but Leader and Shard.
const (
	RoundRobin       PolicyKind = "round-robin"
	Random           PolicyKind = "random"
	LeastConnections PolicyKind = "least-connections" // the fewest open connections
	LeastRequest     PolicyKind = "least-request"     // of two chosen at random the one with fewer requests under way
	ConsistentHash   PolicyKind = "consistent-hash"   // the same key goes to the same endpoint while that is usable
	Leader           PolicyKind = "leader"            // one endpoint has everything, the next takes over if it is lost
	Shard            PolicyKind = "shard"             // the key's hash modulo the number of endpoints, in the order of their names
)

// HashOf is what is hashed.
type HashOf string

// What can be hashed: the client's address, a header field, a cookie (which is set if the client has none).
const (
	HashClient HashOf = "client"
	HashHeader HashOf = "header"
	HashCookie HashOf = "cookie"
)

// HealthCheck is how endpoints are probed: a connection (TCP), a TLS handshake (SSL), or a request that must be answered with 200 (HTTP, HTTPS).
type HealthCheck struct {
	Protocol  Protocol      `json:"protocol"`
	Path      string        `json:"path,omitempty"`
	Port      uint16        `json:"port,omitempty"` // 0: the endpoint's
	Healthy   int           `json:"healthy"`
	Unhealthy int           `json:"unhealthy"`
	Interval  time.Duration `json:"interval"`
	Timeout   time.Duration `json:"timeout"`
}

// Outlier says when an endpoint is taken out for a while because it fails.
type Outlier struct {
	// Failures in a row: connections refused or timed out, answers of 502, 503 and 504.
	Failures int           `json:"failures"`
	Ejection time.Duration `json:"ejection"` // the first time; the n-th time n times as long
	// MostEjected is how many of a hundred endpoints may be out at a time.
	MostEjected int `json:"mostEjected"`
}

// AccessLog is where lines go.
type AccessLog struct {
	// URL is that of a bucket: s3://NAME, file:///FOLDER. Prefix is the folder in it.
	URL      string        `json:"url"`
	Prefix   string        `json:"prefix,omitempty"`
	Interval time.Duration `json:"interval"`
	// Format is elb or json.
	Format string `json:"format"`
	// Balancer is the name that lines and objects have.
	Balancer string `json:"balancer"`
}

// Digest is the same for two configurations that say the same.
func (c *Config) Digest() []byte {
	data, err := json.Marshal(c)
	if err != nil {
		panic(err) // it is plain data
	}
	sum := sha256.Sum256(data)
	return sum[:]
}

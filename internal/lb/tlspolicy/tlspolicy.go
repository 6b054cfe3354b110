// Package tlspolicy knows the TLS policies that AWS' balancers have names for, as versions and cipher suites of crypto/tls. It is pure.
package tlspolicy

import (
	"crypto/tls"
	"slices"
)

// Default is the policy of a balancer that names none.
const Default = "ELBSecurityPolicy-2016-08"

// Policy is one of AWS' predefined policies, as far as this process can offer it.
type Policy struct {
	Name string
	// MinVersion and MaxVersion are those of crypto/tls.
	MinVersion, MaxVersion uint16
	// Suites are those up to TLS 1.2 by their names in OpenSSL, which AWS uses, and CipherSuites the same for crypto/tls. TLS 1.3 has its
	// own, which are always offered: TLS_AES_128_GCM_SHA256, TLS_AES_256_GCM_SHA384, TLS_CHACHA20_POLY1305_SHA256.
	Suites       []string
	CipherSuites []uint16
	// NotOffered are protocols and suites of the policy that crypto/tls does not have.
	NotOffered []string
}

// Lookup returns the policy of a name.
func Lookup(name string) (Policy, bool) {
	for _, d := range definitions {
		if d.name == name {
			return d.policy(), true
		}
	}
	return Policy{}, false
}

// All returns all policies: those of classic balancers first, the newest first.
func All() []Policy {
	var out []Policy
	for _, d := range definitions {
		out = append(out, d.policy())
	}
	return out
}

// suite is one of TLS up to 1.2.
type suite struct {
	name string
	id   uint16 // 0: crypto/tls does not have it
}

// The suites in groups that policies have as a whole.
var (
	forwardGCM = []suite{
		{"ECDHE-ECDSA-AES128-GCM-SHA256", tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256},
		{"ECDHE-RSA-AES128-GCM-SHA256", tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256},
		{"ECDHE-ECDSA-AES256-GCM-SHA384", tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384},
		{"ECDHE-RSA-AES256-GCM-SHA384", tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384},
	}
	forwardCBC = []suite{
		{"ECDHE-ECDSA-AES128-SHA256", tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256},
		{"ECDHE-RSA-AES128-SHA256", tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256},
		{"ECDHE-ECDSA-AES256-SHA384", 0},
		{"ECDHE-RSA-AES256-SHA384", 0},
	}
	forwardSHA1 = []suite{
		{"ECDHE-ECDSA-AES128-SHA", tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA},
		{"ECDHE-RSA-AES128-SHA", tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA},
		{"ECDHE-RSA-AES256-SHA", tls.TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA},
		{"ECDHE-ECDSA-AES256-SHA", tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA},
	}
	plain = []suite{
		{"AES128-GCM-SHA256", tls.TLS_RSA_WITH_AES_128_GCM_SHA256},
		{"AES128-SHA256", tls.TLS_RSA_WITH_AES_128_CBC_SHA256},
		{"AES256-GCM-SHA384", tls.TLS_RSA_WITH_AES_256_GCM_SHA384},
		{"AES256-SHA256", 0},
	}
	plainSHA1 = []suite{
		{"AES128-SHA", tls.TLS_RSA_WITH_AES_128_CBC_SHA},
		{"AES256-SHA", tls.TLS_RSA_WITH_AES_256_CBC_SHA},
	}
	tripleDES    = []suite{{"DES-CBC3-SHA", tls.TLS_RSA_WITH_3DES_EDE_CBC_SHA}}
	finiteField  = []suite{{"DHE-RSA-AES128-SHA", 0}, {"DHE-DSS-AES128-SHA", 0}}
	rc4          = []suite{{"RC4-SHA", tls.TLS_RSA_WITH_RC4_128_SHA}}
	forwardRC4   = []suite{{"ECDHE-RSA-RC4-SHA", tls.TLS_ECDHE_RSA_WITH_RC4_128_SHA}}
	camelliaEtc  = []suite{{"CAMELLIA128-SHA", 0}, {"EDH-RSA-DES-CBC3-SHA", 0}}
	beforeTLS13  = [][]suite{forwardGCM, forwardCBC, forwardSHA1, plain, plainSHA1}
	onlyForward  = [][]suite{forwardGCM, forwardCBC, forwardSHA1}
	withoutSHA1  = [][]suite{forwardGCM, forwardCBC, plain}
	forwardNoSHA = [][]suite{forwardGCM, forwardCBC}
	authentic    = [][]suite{forwardGCM}
)

// definition is a policy as AWS documents it.
type definition struct {
	name     string
	min, max uint16
	ssl3     bool
	groups   [][]suite
}

func (d definition) policy() Policy {
	p := Policy{Name: d.name, MinVersion: d.min, MaxVersion: d.max}
	if d.ssl3 {
		p.NotOffered = append(p.NotOffered, "SSLv3")
	}
	for _, g := range d.groups {
		for _, s := range g {
			if s.id == 0 {
				p.NotOffered = append(p.NotOffered, s.name)
				continue
			}
			p.Suites = append(p.Suites, s.name)
			p.CipherSuites = append(p.CipherSuites, s.id)
		}
	}
	return p
}

func with(groups [][]suite, more ...[]suite) [][]suite { return append(slices.Clip(groups), more...) }

const (
	v10, v11, v12, v13 = tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12, tls.VersionTLS13
)

// Where classic and newer balancers have different policies of one name, those of the classic ones are here: the annotations are theirs.
var definitions = []definition{
	{name: "ELBSecurityPolicy-TLS-1-2-2017-01", min: v12, max: v12, groups: withoutSHA1},
	{name: "ELBSecurityPolicy-TLS-1-1-2017-01", min: v11, max: v12, groups: beforeTLS13},
	{name: Default, min: v10, max: v12, groups: beforeTLS13},
	{name: "ELBSecurityPolicy-2015-05", min: v10, max: v12, groups: with(beforeTLS13, tripleDES)},
	{name: "ELBSecurityPolicy-2015-03", min: v10, max: v12, groups: with(beforeTLS13, finiteField, tripleDES)},
	{name: "ELBSecurityPolicy-2015-02", min: v10, max: v12, groups: with(beforeTLS13, finiteField)},
	{name: "ELBSecurityPolicy-2014-10", min: v10, max: v12, groups: with(beforeTLS13, finiteField, forwardRC4, rc4)},
	{name: "ELBSecurityPolicy-2014-01", min: v10, max: v12, ssl3: true, groups: with(beforeTLS13, finiteField, forwardRC4, rc4)},
	{name: "ELBSecurityPolicy-2011-08", min: v10, max: v10, ssl3: true, groups: [][]suite{plainSHA1, finiteField, camelliaEtc, tripleDES, rc4}},

	{name: "ELBSecurityPolicy-TLS13-1-3-2021-06", min: v13, max: v13},
	{name: "ELBSecurityPolicy-TLS13-1-2-Res-2021-06", min: v12, max: v13, groups: authentic},
	{name: "ELBSecurityPolicy-TLS13-1-2-2021-06", min: v12, max: v13, groups: forwardNoSHA},
	{name: "ELBSecurityPolicy-TLS13-1-2-Ext1-2021-06", min: v12, max: v13, groups: withoutSHA1},
	{name: "ELBSecurityPolicy-TLS13-1-2-Ext2-2021-06", min: v12, max: v13, groups: beforeTLS13},
	{name: "ELBSecurityPolicy-TLS13-1-1-2021-06", min: v11, max: v13, groups: beforeTLS13},
	{name: "ELBSecurityPolicy-TLS13-1-0-2021-06", min: v10, max: v13, groups: beforeTLS13},
	// crypto/tls agrees on hybrid key exchange with every client that can.
	{name: "ELBSecurityPolicy-TLS13-1-3-PQ-2025-09", min: v13, max: v13},
	{name: "ELBSecurityPolicy-TLS13-1-2-Res-PQ-2025-09", min: v12, max: v13, groups: authentic},
	{name: "ELBSecurityPolicy-TLS13-1-2-PQ-2025-09", min: v12, max: v13, groups: forwardNoSHA},
	{name: "ELBSecurityPolicy-TLS13-1-2-Ext1-PQ-2025-09", min: v12, max: v13, groups: withoutSHA1},
	{name: "ELBSecurityPolicy-TLS13-1-2-Ext2-PQ-2025-09", min: v12, max: v13, groups: beforeTLS13},
	{name: "ELBSecurityPolicy-FS-1-2-Res-2020-10", min: v12, max: v12, groups: authentic},
	{name: "ELBSecurityPolicy-FS-1-2-Res-2019-08", min: v12, max: v12, groups: forwardNoSHA},
	{name: "ELBSecurityPolicy-FS-1-2-2019-08", min: v12, max: v12, groups: onlyForward},
	{name: "ELBSecurityPolicy-FS-1-1-2019-08", min: v11, max: v12, groups: onlyForward},
	{name: "ELBSecurityPolicy-FS-2018-06", min: v10, max: v12, groups: onlyForward},
	{name: "ELBSecurityPolicy-TLS-1-2-Ext-2018-06", min: v12, max: v12, groups: beforeTLS13},
	{name: "ELBSecurityPolicy-TLS-1-0-2015-04", min: v10, max: v12, groups: with(beforeTLS13, tripleDES)},
}

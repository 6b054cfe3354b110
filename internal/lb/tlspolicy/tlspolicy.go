// Package tlspolicy knows the TLS policies that AWS' balancers have names for, as versions and cipher suites of crypto/tls. It is pure.
package tlspolicy

import (
	"crypto/tls"
	"slices"
	"strings"
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

// The suites in groups that policies have as a whole, by their names in OpenSSL.
var (
	forwardGCM   = group("ECDHE-ECDSA-AES128-GCM-SHA256 ECDHE-RSA-AES128-GCM-SHA256 ECDHE-ECDSA-AES256-GCM-SHA384 ECDHE-RSA-AES256-GCM-SHA384")
	forwardCBC   = group("ECDHE-ECDSA-AES128-SHA256 ECDHE-RSA-AES128-SHA256 ECDHE-ECDSA-AES256-SHA384 ECDHE-RSA-AES256-SHA384")
	forwardSHA1  = group("ECDHE-ECDSA-AES128-SHA ECDHE-RSA-AES128-SHA ECDHE-RSA-AES256-SHA ECDHE-ECDSA-AES256-SHA")
	plain        = group("AES128-GCM-SHA256 AES128-SHA256 AES256-GCM-SHA384 AES256-SHA256")
	plainSHA1    = group("AES128-SHA AES256-SHA")
	tripleDES    = group("DES-CBC3-SHA")
	finiteField  = group("DHE-RSA-AES128-SHA DHE-DSS-AES128-SHA")
	rc4          = group("RC4-SHA")
	forwardRC4   = group("ECDHE-RSA-RC4-SHA")
	camelliaEtc  = group("CAMELLIA128-SHA EDH-RSA-DES-CBC3-SHA")
	beforeTLS13  = [][]string{forwardGCM, forwardCBC, forwardSHA1, plain, plainSHA1}
	onlyForward  = [][]string{forwardGCM, forwardCBC, forwardSHA1}
	withoutSHA1  = [][]string{forwardGCM, forwardCBC, plain}
	forwardNoSHA = [][]string{forwardGCM, forwardCBC}
	authentic    = [][]string{forwardGCM}
)

func group(names string) []string { return strings.Fields(names) }

// offered are the suites of crypto/tls up to TLS 1.2, which name their key exchange, by their names in OpenSSL.
var offered = func() map[string]uint16 {
	out := map[string]uint16{}
	for _, s := range slices.Concat(tls.CipherSuites(), tls.InsecureCipherSuites()) {
		if strings.Contains(s.Name, "_WITH_") {
			out[openSSL(s.Name)] = s.ID
		}
	}
	return out
}()

// openSSL is what OpenSSL calls a suite with this name in RFCs: it leaves out what was usual once, the key exchange RSA and the mode CBC.
func openSSL(name string) string {
	return strings.NewReplacer("TLS_RSA_WITH_", "", "TLS_", "", "_WITH", "", "3DES_EDE_CBC", "DES-CBC3", "AES_", "AES", "RC4_128", "RC4", "_CBC", "", "_", "-").Replace(name)
}

// definition is a policy as AWS documents it.
type definition struct {
	name     string
	min, max uint16
	ssl3     bool
	groups   [][]string
}

func (d definition) policy() Policy {
	p := Policy{Name: d.name, MinVersion: d.min, MaxVersion: d.max}
	if d.ssl3 {
		p.NotOffered = append(p.NotOffered, "SSLv3")
	}
	for _, g := range d.groups {
		for _, name := range g {
			id, found := offered[name]
			if !found {
				p.NotOffered = append(p.NotOffered, name)
				continue
			}
			p.Suites = append(p.Suites, name)
			p.CipherSuites = append(p.CipherSuites, id)
		}
	}
	return p
}

func with(groups [][]string, more ...[]string) [][]string {
	return append(slices.Clip(groups), more...)
}

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
	{name: "ELBSecurityPolicy-2011-08", min: v10, max: v10, ssl3: true, groups: [][]string{plainSHA1, finiteField, camelliaEtc, tripleDES, rc4}},

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

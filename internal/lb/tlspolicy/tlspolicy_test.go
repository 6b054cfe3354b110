package tlspolicy

import (
	"crypto/tls"
	"slices"
	"strings"
	"testing"
)

// TestSuites: what a policy offers exists in crypto/tls, and is for a version that the policy has.
func TestSuites(t *testing.T) {
	known := map[uint16]*tls.CipherSuite{}
	for _, s := range append(tls.CipherSuites(), tls.InsecureCipherSuites()...) {
		known[s.ID] = s
	}
	seen := map[string]bool{}
	for _, p := range All() {
		if seen[p.Name] {
			t.Errorf("%s is there twice", p.Name)
		}
		seen[p.Name] = true
		if len(p.Suites) != len(p.CipherSuites) || p.MinVersion > p.MaxVersion {
			t.Errorf("%s: %+v", p.Name, p)
		}
		if p.MinVersion < tls.VersionTLS13 && len(p.CipherSuites) == 0 {
			t.Errorf("%s has no suites: crypto/tls would offer its own", p.Name)
		}
		for i, id := range p.CipherSuites {
			s := known[id]
			switch {
			case s == nil:
				t.Errorf("%s: crypto/tls has no %s", p.Name, p.Suites[i])
			case !slices.ContainsFunc(s.SupportedVersions, func(v uint16) bool { return v >= p.MinVersion && v <= p.MaxVersion }):
				t.Errorf("%s: %s is for none of its versions", p.Name, p.Suites[i])
			case strings.Contains(s.Name, "_ECDHE_") != strings.HasPrefix(p.Suites[i], "ECDHE-"), strings.Contains(s.Name, "ECDSA") != strings.Contains(p.Suites[i], "ECDSA"),
				strings.Contains(s.Name, "GCM") != strings.Contains(p.Suites[i], "GCM"), strings.Contains(s.Name, "_256_") != strings.Contains(p.Suites[i], "AES256"):
				t.Errorf("%s: %s is taken for %s", p.Name, p.Suites[i], s.Name)
			}
		}
		if got, ok := Lookup(p.Name); !ok || got.Name != p.Name {
			t.Errorf("%s is not found", p.Name)
		}
	}
	if _, ok := Lookup("ELBSecurityPolicy-2099-01"); ok {
		t.Error("a policy that does not exist was found")
	}
}

// TestNames: the suites of crypto/tls have the names that OpenSSL has for them.
func TestNames(t *testing.T) {
	for name, want := range map[string]uint16{
		"ECDHE-ECDSA-AES128-GCM-SHA256": tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
		"ECDHE-RSA-AES256-GCM-SHA384":   tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
		"ECDHE-RSA-AES128-SHA256":       tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256,
		"ECDHE-ECDSA-AES256-SHA":        tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA,
		"AES128-GCM-SHA256":             tls.TLS_RSA_WITH_AES_128_GCM_SHA256,
		"AES128-SHA256":                 tls.TLS_RSA_WITH_AES_128_CBC_SHA256,
		"AES256-SHA":                    tls.TLS_RSA_WITH_AES_256_CBC_SHA,
		"DES-CBC3-SHA":                  tls.TLS_RSA_WITH_3DES_EDE_CBC_SHA,
		"RC4-SHA":                       tls.TLS_RSA_WITH_RC4_128_SHA,
		"ECDHE-RSA-RC4-SHA":             tls.TLS_ECDHE_RSA_WITH_RC4_128_SHA,
	} {
		if got := offered[name]; got != want {
			t.Errorf("%s is %s, want %s", name, tls.CipherSuiteName(got), tls.CipherSuiteName(want))
		}
	}
}

func TestPolicies(t *testing.T) {
	for _, c := range []struct {
		name       string
		min, max   uint16
		suites     int
		notOffered string
	}{
		{Default, tls.VersionTLS10, tls.VersionTLS12, 15, "ECDHE-ECDSA-AES256-SHA384 ECDHE-RSA-AES256-SHA384 AES256-SHA256"},
		{"ELBSecurityPolicy-TLS-1-2-2017-01", tls.VersionTLS12, tls.VersionTLS12, 9, "ECDHE-ECDSA-AES256-SHA384 ECDHE-RSA-AES256-SHA384 AES256-SHA256"},
		{"ELBSecurityPolicy-TLS13-1-2-Res-2021-06", tls.VersionTLS12, tls.VersionTLS13, 4, ""},
		{"ELBSecurityPolicy-TLS13-1-3-2021-06", tls.VersionTLS13, tls.VersionTLS13, 0, ""},
		{"ELBSecurityPolicy-2015-05", tls.VersionTLS10, tls.VersionTLS12, 16, "ECDHE-ECDSA-AES256-SHA384 ECDHE-RSA-AES256-SHA384 AES256-SHA256"},
		{"ELBSecurityPolicy-2011-08", tls.VersionTLS10, tls.VersionTLS10, 4, "SSLv3 DHE-RSA-AES128-SHA DHE-DSS-AES128-SHA CAMELLIA128-SHA EDH-RSA-DES-CBC3-SHA"},
	} {
		p, ok := Lookup(c.name)
		if !ok || p.MinVersion != c.min || p.MaxVersion != c.max || len(p.Suites) != c.suites || strings.Join(p.NotOffered, " ") != c.notOffered {
			t.Errorf("%s: %+v", c.name, p)
		}
	}
}

package pki

import (
	"crypto/x509"
	"testing"
	"testing/synctest"
	"time"
)

// TestRenewedAtTwoThirds: a certificate, and the CA itself, is replaced when two thirds of its life are over and not before.
func TestRenewedAtTwoThirds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca, err := Open(t.TempDir(), Lifetimes{Authority: 900 * time.Hour, Certificate: 90 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		issue := func() *x509.Certificate {
			t.Helper()
			_, cert, err := ca.Issue(Request{File: "server", Name: "s", Hosts: []string{"localhost"}}, false)
			if err != nil {
				t.Fatal(err)
			}
			return cert
		}
		rotate := func() *x509.Certificate {
			t.Helper()
			if _, err := ca.Rotate(false); err != nil {
				t.Fatal(err)
			}
			return ca.Own()[0]
		}
		for name, current := range map[string]func() *x509.Certificate{"certificate": issue, "authority": rotate} {
			old := current()
			twoThirds := old.NotBefore.Add(old.NotAfter.Sub(old.NotBefore) * 2 / 3)
			time.Sleep(time.Until(twoThirds) - time.Minute)
			if !current().Equal(old) {
				t.Errorf("the %s was replaced before two thirds of its life were over", name)
			}
			time.Sleep(time.Minute)
			if current().Equal(old) {
				t.Errorf("the %s was not replaced when two thirds of its life were over", name)
			}
		}
	})
}
